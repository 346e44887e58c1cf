"""Models of texts that predict classes: their predictions and gradients beside those of transformers."""

import numpy as np
import pytest
import torch
from tests.models.answers.small_classifiers import NAMES, eager, loaded, words
from tests.models.small_models import near

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import (
    ModelForwardRequest,
    ModelGradientsRequest,
    ModelWeightsRequest,
    PredictedLogit,
)
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.loaded.model_description import model_info

TEXTS = ["the cat sat", "the dog sat on the mat"]
PAIRS = ["the mat", "a cat sat on the dog"]
FAMILIES = ("bert", "roberta", "distilbert", "modernbert", "gpt2", "llama", "bart", "t5")
TOKEN = ("bert", "gpt2", "llama")
SPAN = ("bert", "distilbert", "bart", "llama")
TWO = (("num_labels", 2), ("id2label", None), ("label2id", None))
CHOICE = ("bert", "roberta", "distilbert")


def forward(model, **fields):
    return forward_reply(model, ModelForwardRequest(**fields))


def gradients(model, of=None, **fields):
    of = {} if of is None else {"of": PredictedLogit(**of)}
    return ModelGradients(model, ModelGradientsRequest(**fields | of)).reply()


def inputs(texts, pairs=None, types=False):
    return words()(texts, pairs, padding=True, return_tensors="pt", return_token_type_ids=types)


def own(family, texts, head, **more):
    """The output of transformers' own model."""
    return eager(family, head)(**inputs(texts) | more)


def numbers(prediction):
    return {each.token: each.probability for each in prediction.top}


def same(prediction, expected, names=("bad", "so so", "good")):
    """Compare the probabilities of a prediction, by name."""
    assert numbers(prediction) == pytest.approx(dict(zip(names, expected.tolist(), strict=True)), abs=1e-5)


@pytest.mark.sampled(family=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_has_the_classes_of_transformers(family):
    model = loaded(family, "ForSequenceClassification")
    info = model_info(model)
    assert (info["predicts"], info["classes"]) == ("class", [*NAMES.values()])
    for texts in (TEXTS[0], TEXTS):
        reply = forward(model, text=texts, return_=["logits"])
        expected = own(family, [texts] if isinstance(texts, str) else texts, "ForSequenceClassification").logits
        near(reply.logits if isinstance(texts, list) else reply.logits[None], expected[:, None])
        assert reply.predicts == "class"
        for row, prediction in zip(expected.softmax(-1), reply.predictions, strict=True):
            same(prediction, row)


def test_several_texts_of_a_model_without_padding_have_their_last_tokens():
    options = (("pad_token_id", None),)
    model, one = (
        loaded("gpt2", "ForSequenceClassification", options),
        eager("gpt2", "ForSequenceClassification", options),
    )
    found = forward(model, text=TEXTS, return_=["logits"]).logits
    near(found[:, 0], torch.cat([one(**inputs([text])).logits for text in TEXTS]))


@pytest.mark.sampled(family=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_a_class_is_that_of_autograd(family):
    head, texts = "ForSequenceClassification", TEXTS
    model, theirs = loaded(family, head), eager(family, head)
    for of, value in (
        ({"token": "good"}, lambda logits: logits.log_softmax(-1)[:, 2]),
        ({"token": "good", "logit": True}, lambda logits: logits[:, 2]),
        ({"token": 2, "against": "bad"}, lambda logits: logits[:, 2] - logits[:, 0]),
    ):
        found = gradients(model, of, text=texts, wrt=["tokens", "embeddings"])
        sent = inputs(texts)
        table = (theirs.get_encoder() if family in {"bart", "t5"} else theirs).get_input_embeddings()
        held = []

        def hold(_, __, out, held=held):
            held.append(out.detach().requires_grad_())
            return held[-1].clone()

        handle = table.register_forward_hook(hold)
        try:
            expected = value(theirs(**sent).logits)
        finally:
            handle.remove()
        (gradient,) = torch.autograd.grad(expected.sum(), held[:1])
        near(found.value, expected.detach())
        assert found.token_names == ["good", "good"]
        if family not in {"gpt2", "llama"}:  # those are padded at the right here too
            near(found.embeddings, gradient, 1e-4)
        near(found.tokens, (gradient * held[0]).sum(-1).detach(), 1e-4)


@pytest.mark.slow
def test_gradients_of_a_class_pass_the_check():
    reply = gradients(loaded("bert", "ForSequenceClassification"), {"token": 1}, text=TEXTS[0], check=True)
    assert all(each.passed for each in reply.check.values())
    whole = gradients(loaded("bert", "ForSequenceClassification"), {"token": 1}, text=TEXTS[0], integrated=64)
    assert float(np.sum(whole.tokens)) == pytest.approx(float(whole.value - whole.baseline), abs=1e-3)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_one_class_is_a_score(family):
    options = (("num_labels", 1), ("id2label", None), ("label2id", None))
    model, theirs = (
        loaded(family, "ForSequenceClassification", options),
        eager(family, "ForSequenceClassification", options),
    )
    expected = theirs(**inputs([TEXTS[0]] * 2, PAIRS, family == "bert")).logits[:, 0]
    reply = forward(model, text=TEXTS[0], text_pair=PAIRS, top_k=1)
    near([each.top[0].logit for each in reply.predictions], expected)
    near([each.top[0].probability for each in reply.predictions], expected.sigmoid())
    found = gradients(model, text=TEXTS[0], text_pair=PAIRS)
    near(found.value, expected)
    assert np.abs(found.tokens).max() > 0


def test_classes_that_do_not_exclude_each_other_have_probabilities_of_their_own():
    options = (("problem_type", "multi_label_classification"),)
    model = loaded("bert", "ForSequenceClassification", options)
    expected = eager("bert", "ForSequenceClassification", options)(**inputs([TEXTS[0]])).logits[0]
    edits = {"0": [{"tap": "context", "set": 0}]}
    reply = forward(model, text=TEXTS[0])
    same(reply.predictions[0], expected.sigmoid())
    assert float(gradients(model, {"token": "bad"}, text=TEXTS[0]).value) == pytest.approx(
        float(torch.nn.functional.logsigmoid(expected[0])), abs=1e-5
    )
    edited = forward(model, text=TEXTS[0], edits=edits, compare="unedited").predictions[0]
    p = np.array([each.unedited_probability for each in edited.top])
    q = np.array([each.probability for each in edited.top])
    near(edited.divergence, (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum())


@pytest.mark.parametrize("family", TOKEN)
def test_each_token_has_its_classes(family):
    model = loaded(family, "ForTokenClassification")
    reply = forward(model, text=TEXTS, return_=["logits"], top_k=1)
    expected = own(family, TEXTS, "ForTokenClassification").logits
    near(reply.logits[1], expected[1])
    lengths = [len(words()(text).input_ids) for text in TEXTS]
    assert [each.text for each in reply.predictions] == [0] * lengths[0] + [1] * lengths[1]
    likeliest = [NAMES[int(each)] for each in expected[1].argmax(-1)]
    assert [each.top[0].token for each in reply.predictions if each.text == 1] == likeliest
    found = gradients(model, {"token": "good", "position": 2}, text=TEXTS[1])
    assert float(found.value) == pytest.approx(float(expected[1, 2].log_softmax(-1)[2]), abs=1e-5)
    surest = gradients(model, {"token": "good"}, text=TEXTS[1])
    assert float(surest.value) == pytest.approx(float(expected[1].log_softmax(-1)[:, 2].max()), abs=1e-5)


@pytest.mark.sampled(family=2)
@pytest.mark.parametrize("family", SPAN)
def test_an_answer_has_a_likeliest_beginning_and_end(family):
    model = loaded(family, "ForQuestionAnswering", TWO)
    sent = inputs([TEXTS[0]], [PAIRS[1]], family == "bert")
    theirs = eager(family, "ForQuestionAnswering", TWO)(**sent)
    start, end = theirs.start_logits[0].softmax(-1), theirs.end_logits[0].softmax(-1)
    reply = forward(model, text=TEXTS[0], text_pair=PAIRS[1])
    first, last = reply.predictions
    assert (first.position, last.position) == (int(start.argmax()), int(end.argmax()))
    assert numbers(first)["start"] == pytest.approx(float(start.max()), abs=1e-5)
    assert numbers(last)["end"] == pytest.approx(float(end.max()), abs=1e-5)
    found = gradients(model, {"token": "end", "position": 3}, text=TEXTS[0], text_pair=PAIRS[1])
    assert float(found.value) == pytest.approx(float(end[3].log()), abs=1e-5)
    assert float(gradients(model, text=TEXTS[0], text_pair=PAIRS[1]).value) == pytest.approx(
        float(start.max().log()), abs=1e-5
    )
    several = forward(model, text=TEXTS, text_pair=PAIRS, positions=[1])
    sent = inputs(TEXTS, PAIRS, family == "bert")
    theirs = eager(family, "ForQuestionAnswering", TWO)(**sent).start_logits
    if family not in {"llama", "bart"}:  # whose padding is not masked
        masked = theirs.masked_fill(sent["attention_mask"] == 0, -torch.inf).softmax(-1)
        near([numbers(each)["start"] for each in several.predictions], masked[:, 1])


@pytest.mark.parametrize("family", CHOICE)
def test_one_of_several_texts_is_chosen(family):
    model = loaded(family, "ForMultipleChoice")
    sent = inputs([TEXTS[0]] * 2, PAIRS, family != "distilbert")
    expected = eager(family, "ForMultipleChoice")(**{name: x[None] for name, x in sent.items()}).logits[0]
    reply = forward(model, text=TEXTS[0], text_pair=PAIRS)
    (prediction,) = reply.predictions
    same(prediction, expected.softmax(-1), ("0", "1"))
    found = gradients(model, {"token": 1}, text=TEXTS[0], text_pair=PAIRS)
    assert float(found.value[0]) == pytest.approx(float(expected.log_softmax(-1)[1]), abs=1e-5)
    assert np.shape(found.tokens) == (2, len(sent["input_ids"][0]))
    with pytest.raises(InvalidRequest, match="not one of the 2 texts"):
        gradients(model, {"token": 2}, text=TEXTS[0], text_pair=PAIRS)


def test_the_second_text_has_a_type_of_its_own():
    """As the tokenizer gives it, or as the request does."""
    model, theirs = loaded("bert", "ForSequenceClassification"), eager("bert", "ForSequenceClassification")
    sent = words()(TEXTS[0], PAIRS[0], return_tensors="pt", return_token_type_ids=True)
    assert sent["token_type_ids"].any()
    expected = theirs(**sent).logits
    reply = forward(model, text=TEXTS[0], text_pair=PAIRS[0], return_=["logits"])
    near(reply.logits, expected)
    ids, types = sent["input_ids"][0].tolist(), sent["token_type_ids"][0].tolist()
    near(forward(model, tokens=ids, token_type_ids=types, return_=["logits"]).logits, expected)
    several = forward(model, tokens=[ids, ids], token_type_ids=[types, [0] * len(ids)], return_=["logits"]).logits
    near(several[0], expected)
    assert np.abs(several[1] - several[0]).max() > 1e-3
    assert reply.labels.parts == [None, "text", "text", "text", None, "text_pair", "text_pair", None]
    assert [PAIRS[0][slice(*span)] for span, part in zip(reply.labels.spans, reply.labels.parts, strict=True)
            if part == "text_pair"] == ["the", "mat"]  # fmt: skip
    seen = weights_reply(model, ModelWeightsRequest(text=TEXTS[0], text_pair=PAIRS[0]))
    near(seen.layers[0].weights, theirs(**sent, output_attentions=True).attentions[0][0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text_pair": "the"}, "text"),
        ({"tokens": [3], "text_pair": "the"}, "text_pair"),
        ({"text": ["the"], "text_pair": ["the", "cat"]}, "text_pair"),
        ({"text": "the", "token_type_ids": [0]}, "token_type_ids"),
        ({"tokens": [3, 4], "token_type_ids": [0]}, "token_type_ids"),
    ],
)
def test_pairs_and_types_that_do_not_fit_are_named(fields, param):
    with pytest.raises(ValueError, match=param):
        ModelForwardRequest(**fields)


@pytest.mark.parametrize(
    ("head", "of", "words"),
    [
        ("ForSequenceClassification", {"token": "nothing"}, r"not one of the 3 classes \(bad, so so, good\)"),
        ("ForQuestionAnswering", {"position": 99}, "99 is out of range"),
    ],
)
def test_a_class_that_there_is_none_of_is_named(head, of, words):
    with pytest.raises(InvalidRequest, match=words):
        gradients(loaded("bert", head, TWO if "position" in of else ()), of, text=TEXTS[0])


def test_types_that_a_model_does_not_have_are_refused():
    with pytest.raises(InvalidRequest, match="the model has 2 types"):
        forward(loaded("bert", "ForSequenceClassification"), tokens=[3], token_type_ids=[2])
    with pytest.raises(InvalidRequest, match="no types of tokens"):
        forward(loaded("llama", "ForTokenClassification"), tokens=[3], token_type_ids=[0])
    with pytest.raises(InvalidRequest, match="one class for an input"):
        forward(loaded("bert", "ForSequenceClassification"), text="the", positions=[0])
