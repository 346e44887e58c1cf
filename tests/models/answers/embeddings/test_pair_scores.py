"""Scores of pairs: the logits of a reranker of transformers alone, the cosine of states, and the cut of long pairs."""

from functools import cache

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.models.answers.embeddings.test_text_embeddings import unit
from tests.models.answers.small_classifiers import eager, loaded, sharp, words
from tests.models.small_models import device

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.openai_api.scoring import RerankRequest, ScoreRequest
from attention_contract.validation import validate
from attention_service.models.answers.embeddings.pair_scores import plan_scoring, scored
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.inputs.text_tokens import longest_first
from attention_service.models.loaded.loaded_model import LoadedModel

QUERY = "the cat on the mat"
DOCUMENTS = ["the dog", "the cat sat on the mat the dog sat", "mat", "Katze saß the cat"]
ONE_CLASS = {"id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}


@cache
def theirs(family):
    return sharp(family, "ForSequenceClassification", **ONE_CLASS)


@cache
def reranker(family):
    made = sharp(family, "ForSequenceClassification", **ONE_CLASS)
    return LoadedModel(family, made, words(), device())


def answered(model, kind, **fields):
    request = validate(kind, {"model": "m"} | fields)
    return at_once(scored(model, ModelCosts(model).memory, request, plan_scoring(model, request)))


def by_transformers(family, first, second, limit=None):
    given = words()(first, second, truncation="longest_first" if limit else False, max_length=limit)
    names = ["input_ids"] + ["token_type_ids"] * (family in {"bert", "roberta"})
    with torch.no_grad():
        logits = theirs(family)(**{name: torch.tensor([given[name]]) for name in names}).logits
    return float(logits.double().sigmoid()), len(given["input_ids"])


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "llama"])
def test_a_reranker_orders_documents_by_its_own_logit(family):
    expected, counts = zip(*[by_transformers(family, QUERY, each) for each in DOCUMENTS], strict=True)
    reply = answered(reranker(family), RerankRequest, query=QUERY, documents=DOCUMENTS)
    assert [each.index for each in reply.results] == np.argsort(expected)[::-1].tolist()
    for each in reply.results:
        assert each.relevance_score == pytest.approx(expected[each.index], abs=2e-5)
        assert each.document.text == DOCUMENTS[each.index]
        assert each.truncated is None
    assert reply.usage.prompt_tokens == sum(counts)
    best = answered(reranker(family), RerankRequest, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False)
    assert [each.index for each in best.results] == [each.index for each in reply.results[:2]]
    assert all(each.document is None for each in best.results)


def test_scores_are_those_of_the_pairs_in_their_order():
    expected = [by_transformers("bert", QUERY, each)[0] for each in DOCUMENTS]
    for fields in ({"text_1": QUERY, "text_2": DOCUMENTS}, {"queries": [QUERY] * 4, "documents": DOCUMENTS}):
        reply = answered(reranker("bert"), ScoreRequest, **fields)
        assert [each.index for each in reply.data] == [0, 1, 2, 3]
        np.testing.assert_allclose([each.score for each in reply.data], expected, atol=2e-5)


@pytest.mark.parametrize("limit", [8, 9, 11])
def test_a_long_pair_is_cut_as_the_tokenizer_cuts_the_longest_first(limit):
    reply = answered(reranker("bert"), ScoreRequest, text_1=QUERY, text_2=DOCUMENTS, truncate_prompt_tokens=limit)
    for each, document in zip(reply.data, DOCUMENTS, strict=True):
        expected, count = by_transformers("bert", QUERY, document, limit)
        assert each.score == pytest.approx(expected, abs=2e-5)
        assert bool(each.truncated) == (len(words()(QUERY, document)["input_ids"]) > limit)
        assert count <= limit
    assert any(each.truncated for each in reply.data)


@pytest.mark.parametrize("kind", ["reranker", "vectors"])
def test_many_pairs_are_scored_in_parts(kind):
    model = reranker("bert") if kind == "reranker" else loaded("bert", "Model")
    documents = [f"{each} cat" for each in DOCUMENTS] * 60
    request = validate(ScoreRequest, {"model": "m", "text_1": QUERY, "text_2": documents})
    parts = scored(model, ModelCosts(model).memory, request, plan_scoring(model, request))
    if kind == "reranker":
        assert next(parts) > 0  # others have their turns
    found = [each.score for each in at_once(parts).data]
    few = answered(model, ScoreRequest, text_1=QUERY, text_2=documents[:4]).data
    np.testing.assert_allclose(found, [each.score for each in few] * 60, atol=1e-5)


ACTIVATIONS = {
    "the default": ({}, torch.sigmoid),
    "sentence-transformers 5": ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, None),
    "sentence-transformers 4": ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, None),
    "another one": ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, torch.tanh),
    "a softmax of one": ({"sbert_ce_default_activation_function": "torch.nn.Softmax"}, torch.sigmoid),
    "a regression": ({"problem_type": "regression"}, None),
    "the problem before a name": (
        {"problem_type": "multi_label_classification", "sbert_ce_default_activation_function": "torch.nn.Identity"},
        torch.sigmoid,
    ),
}


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_a_score_is_the_logit_after_the_activation_of_the_config(case):
    entries, activation = ACTIVATIONS[case]
    model = LoadedModel("bert", sharp("bert", "ForSequenceClassification", **ONE_CLASS, **entries), words(), device())
    raw = answered(model, ScoreRequest, text_1=QUERY, text_2=DOCUMENTS, use_activation=False).data
    logits = torch.tensor([each.score for each in raw], dtype=torch.float64)
    given = words()(QUERY, DOCUMENTS[0], return_tensors="pt")
    with torch.no_grad():
        assert float(theirs("bert")(**given).logits) == pytest.approx(float(logits[0]), abs=1e-4)
    scores = [each.score for each in answered(model, ScoreRequest, text_1=QUERY, text_2=DOCUMENTS).data]
    np.testing.assert_allclose(scores, logits if activation is None else activation(logits), atol=1e-6)


def test_an_activation_that_is_none_of_pytorch_is_refused():
    entries = {"sentence_transformers": {"activation_fn": "os.system"}}
    model = LoadedModel("bert", sharp("bert", "ForSequenceClassification", **ONE_CLASS, **entries), words(), device())
    with pytest.raises(InvalidCheckpoint, match="activation"):
        answered(model, RerankRequest, query=QUERY, documents=DOCUMENTS)


@pytest.mark.parametrize("kind", ["reranker", "vectors"])
def test_a_text_that_the_model_cannot_read_is_named_by_its_own_field(kind):
    model = reranker("bert") if kind == "reranker" else loaded("bert", "Model")
    model.reader.vocabulary, kept = 8, model.reader.vocabulary
    try:
        for text in ("cat", "mat", "dog", "sat"):
            ids = words()(text)["input_ids"]
            if max(ids) >= 8:
                break
        good = next(each for each in ("the", "cat", "on", "sat", "mat") if max(words()(each)["input_ids"]) < 8)
        for fields, param in (
            ({"query": text, "documents": [good, good]}, "query"),
            ({"query": good, "documents": [good, text]}, "documents.1"),
        ):
            with pytest.raises(InvalidRequest) as refusal:
                answered(model, RerankRequest, **fields)
            assert refusal.value.param == param
        with pytest.raises(InvalidRequest) as refusal:
            answered(model, ScoreRequest, queries=[good, text], documents=[good, good])
        assert refusal.value.param == "queries.1"
    finally:
        model.reader.vocabulary = kept


def test_longest_first_keeps_what_fits():
    for first in range(8):
        for second in range(8):
            for room in range(16):
                kept = longest_first(first, second, room)
                assert sum(kept) == min(room, first + second)
                assert kept[0] <= first
                assert kept[1] <= second
                cut = [at for at in (0, 1) if kept[at] < (first, second)[at]]
                assert all(kept[at] + 1 >= kept[1 - at] for at in cut)  # what is cut is not shorter than the other


def test_an_encoder_scores_by_the_cosine_of_its_vectors():
    model = loaded("bert", "Model")

    def vector(text):
        with torch.no_grad():
            states = eager("bert", "Model")(torch.tensor([words()(text)["input_ids"]])).last_hidden_state[0]
        return unit(states.double().mean(0).numpy())

    expected = [float(vector(QUERY) @ vector(each)) for each in DOCUMENTS]
    reply = answered(model, ScoreRequest, text_1=QUERY, text_2=DOCUMENTS)
    np.testing.assert_allclose([each.score for each in reply.data], expected, atol=1e-5)
    ranked = answered(model, RerankRequest, query=QUERY, documents=[*DOCUMENTS, QUERY])
    assert ranked.results[0].index == 4
    assert ranked.results[0].relevance_score == pytest.approx(1, abs=1e-6)


REFUSED = {
    "a causal model": (lambda: loaded("llama", "ForCausalLM"), {}, "model"),
    "a masked model": (lambda: loaded("bert", "ForMaskedLM"), {}, "model"),
    "three classes": (lambda: loaded("bert", "ForSequenceClassification"), {}, "model"),
    "no room": (lambda: reranker("bert"), {"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    "the logit of vectors": (lambda: loaded("bert", "Model"), {"use_activation": False}, "use_activation"),
    "a cut of vectors": (lambda: loaded("bert", "Model"), {"truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_scores_no_pairs_is_refused_by_name(case):
    model, fields, param = REFUSED[case]
    with pytest.raises(InvalidRequest) as refusal:
        answered(model(), RerankRequest, query=QUERY, documents=DOCUMENTS, **fields)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"text_1": "a"}, {"text_2": "a"}, {"text_1": "a", "queries": "a", "text_2": "b"},
        {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]},
    ],
)  # fmt: skip
def test_pairs_that_do_not_match_are_refused(fields):
    with pytest.raises(ValidationError, match="expected one"):
        ScoreRequest.model_validate({"model": "m"} | fields)
