"""Answers in place of mask tokens: log p at these places by transformers alone, its gradient, and its effects."""

from functools import partial

import numpy as np
import pytest
import torch
from tests.models.answers.small_classifiers import eager, loaded, sharp, words
from tests.models.small_models import device

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.schemas.openai_api.tokenization import TokenizeRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.sweeps.swept_effects import EffectsOfSweep
from attention_service.models.answers.tokenized_inputs import tokenize
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.loaded.loaded_model import LoadedModel

FAMILIES = ("bert", "roberta", "distilbert", "modernbert")
ONE = {"text": "the [MASK] sat on [MASK] mat", "answer": "cat the"}
SEVERAL = {"text": ["[MASK] cat sat", "the [MASK] [MASK] on the mat"], "answer": ["the", "dog sat"]}


def masked(family="bert"):
    return loaded(family, "ForMaskedLM")


def by_transformers(model, text, answer):
    """The places of the masks, and ln p of the tokens of the answer there, in a run without padding."""
    ids = words()(text)["input_ids"]
    places = [at for at, token in enumerate(ids) if token == words().mask_token_id]
    tokens = words()(answer, add_special_tokens=False)["input_ids"]
    logs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return places, tokens, torch.stack([logs[at, token] for at, token in zip(places, tokens, strict=True)])


def forward(model, **fields):
    return forward_reply(model, validate(ModelForwardRequest, fields))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_has_the_log_probabilities_at_the_masks(family):
    reply = forward(masked(family), **SEVERAL, top_k=2, positions=[1])
    for text, answer, tokens in zip(SEVERAL["text"], SEVERAL["answer"], reply.answer, strict=True):
        places, ids, logs = by_transformers(eager(family, "ForMaskedLM"), text, answer)
        assert [token.position for token in tokens] == places
        assert [token.id for token in tokens] == ids
        np.testing.assert_allclose([token.logprob for token in tokens], logs.detach(), atol=2e-5)
    assert [(each.text, each.position) for each in reply.predictions] == [(0, 1), (1, 1)]
    assert [part == "answer" for part in reply.labels[1].parts] == [
        token == "[MASK]" for token in reply.labels[1].tokens
    ]
    (plain,) = forward(masked(family), text=SEVERAL["text"][0], positions=[1], top_k=2).predictions
    np.testing.assert_allclose([t.logit for t in plain.top], [t.logit for t in reply.predictions[0].top], atol=1e-4)


def test_a_head_that_ignores_its_input_gives_the_answer_its_own_probability():
    model = sharp("bert", "ForMaskedLM")
    logs = torch.linspace(-3, 2, 96).log_softmax(-1)
    with torch.no_grad():
        model.cls.predictions.decoder.weight.zero_()
        model.cls.predictions.decoder.bias.copy_(logs)
    tokens = forward(LoadedModel("known", model, words(), device()), **ONE).answer
    np.testing.assert_allclose([token.logprob for token in tokens], logs[[4, 3]], atol=1e-5)
    assert [token.rank for token in tokens] == [91, 92]


@pytest.mark.parametrize("of", [None, {"answer": "sum"}, {"answer": "mean"}], ids=str)
def test_gradients_are_those_of_log_p_at_the_masks(of):
    model = sharp("bert", "ForMaskedLM")
    embedded = []
    model.bert.embeddings.word_embeddings.register_forward_hook(
        lambda *given: embedded.append(given[2].requires_grad_())
    )
    total = by_transformers(model, **ONE)[2].sum() / (2 if of == {"answer": "mean"} else 1)
    (gradient,) = torch.autograd.grad(total, embedded)
    given = ONE if of is None else ONE | {"of": of}
    found = ModelGradients(masked(), validate(ModelGradientsRequest, given | {"check": True})).reply()
    assert float(found.value) == pytest.approx(float(total.detach()), abs=1e-5)
    np.testing.assert_allclose(found.tokens, (gradient * embedded[0]).sum(-1)[0].detach(), atol=1e-4)
    assert all(check.passed for check in found.check.values())
    assert [token.position for token in found.answer] == by_transformers(eager("bert", "ForMaskedLM"), **ONE)[0]


def test_effects_measure_log_p_of_the_answer():
    sweep = {"tap": "context", "over": ["layers", "heads"], "set": 0}
    found = EffectsOfSweep(masked(), validate(ModelEffectsRequest, ONE | {"sweep": sweep}))
    reply = at_once(found.parts(3))
    plain = sum(token.logprob for token in forward(masked(), **ONE).answer)
    assert float(reply.baseline) == pytest.approx(plain, abs=1e-5)
    edits = {"1": [{"tap": "context", "heads": [2], "set": 0}]}
    edited = sum(token.logprob for token in forward(masked(), **ONE, edits=edits).answer)
    assert abs(edited - plain) > 0.01
    assert float(reply.effects.value[1][2]) == pytest.approx(edited - plain, abs=1e-4)


def test_edits_compare_the_answer_with_the_run_without_them():
    edits = {"1": [{"tap": "context", "heads": [2], "set": 0}]}
    both = forward(masked(), **ONE, edits=edits, compare="unedited").answer
    for token, plain in zip(both, forward(masked(), **ONE).answer, strict=True):
        assert token.unedited_logprob == pytest.approx(plain.logprob, abs=1e-5)
        assert token.unedited_logprob != pytest.approx(token.logprob, abs=1e-3)


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"text": "the [MASK] sat", "answer": "cat dog"}, "1; got 2"),
        ({"text": "the [MASK] [MASK]", "answer": "cat"}, "2; got 1"),
        ({"text": ["the [MASK]", "the cat"], "answer": "cat"}, "0; got 1"),
    ],
)
def test_other_counts_are_refused_with_both(fields, counts):
    for ask in (
        partial(forward, masked()),
        lambda **given: ModelGradients(masked(), validate(ModelGradientsRequest, given)),
    ):
        with pytest.raises(InvalidRequest, match=counts) as refusal:
            ask(**fields)
        assert refusal.value.param == "answer"
        assert "[MASK]" in refusal.value.detail


def test_a_number_of_an_answer_needs_one():
    with pytest.raises(InvalidRequest, match="mask token") as refusal:
        ModelGradients(masked(), validate(ModelGradientsRequest, {"text": ONE["text"], "of": {"answer": "sum"}}))
    assert refusal.value.param == "of"


def test_tokens_name_the_places_of_the_answer():
    request = validate(TokenizeRequest, {"model": "m", "prompt": ONE["text"], "answer": ONE["answer"]})
    reply = tokenize(masked(), request)
    assert [at for at, part in enumerate(reply.labels.parts) if part == "answer"] == [2, 5]
    assert reply.text == ONE["text"]
