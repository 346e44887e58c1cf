"""Pseudo log-likelihoods: those of a loop of transformers alone over masked copies, and some known by construction."""

from functools import partial

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.client.tiny_models import tokenizer
from tests.models.answers.small_classifiers import eager, loaded, sharp, words
from tests.models.small_models import device

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.costs.model_complexity import ModelComplexityRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.validation import validate
from attention_service.models.answers.masked_likelihoods import masked_likelihoods, plan_likelihoods
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.loaded.loaded_model import LoadedModel

TEXTS = ["the cat sat on the mat", "the dog", "the mat saß on Katze"]
MASK, SPECIAL = 12, {0, 2, 12}
"""The tokenizer's own; token 1 stands for what it does not know, which is a part of a text."""
FAMILIES = ("bert", "roberta", "distilbert", "modernbert")


def masked(family):
    return loaded(family, "ForMaskedLM")


def likelihoods(model, copies=4, **fields):
    request = validate(ModelForwardRequest, {"likelihood": "masked"} | fields)
    return at_once(masked_likelihoods(model, plan_likelihoods(model, request), copies))


def by_loop(model, ids):
    """Ln p of each token that is not special, and its rank: a run of transformers' model for each, without padding."""
    found = {}
    for at, token in enumerate(ids):
        if token not in SPECIAL:
            own = torch.tensor([[*ids[:at], MASK, *ids[at + 1 :]]])
            with torch.no_grad():
                logits = model(input_ids=own).logits[0, at].double()
            found[at] = float(logits.log_softmax(-1)[token]), int((logits > logits[token]).sum())
    return found


def check(likelihood, expected):
    assert [token.position for token in likelihood.tokens] == [*expected]
    np.testing.assert_allclose(
        [token.logprob for token in likelihood.tokens], [log for log, _ in expected.values()], atol=2e-5
    )
    assert [token.rank for token in likelihood.tokens] == [rank for _, rank in expected.values()]
    total = sum(log for log, _ in expected.values())
    assert likelihood.sum == pytest.approx(total, abs=1e-4)
    assert likelihood.mean == pytest.approx(total / len(expected), abs=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_token_has_the_probability_that_a_loop_of_transformers_gives(family):
    reply = likelihoods(masked(family), text=TEXTS)
    for text, likelihood in zip(TEXTS, reply.likelihood, strict=True):
        ids = words()(text)["input_ids"]
        check(likelihood, by_loop(eager(family, "ForMaskedLM"), ids))
        assert [token.id for token in likelihood.tokens] == [each for each in ids if each not in SPECIAL]
    assert not reply.predictions
    assert reply.predicts == "own"


@pytest.mark.parametrize("copies", [1, 3, 64])
def test_the_copies_of_a_pass_change_no_number(copies):
    expected = likelihoods(masked("bert"), 2, text=TEXTS).likelihood
    for one, other in zip(likelihoods(masked("bert"), copies, text=TEXTS).likelihood, expected, strict=True):
        np.testing.assert_allclose([t.logprob for t in one.tokens], [t.logprob for t in other.tokens], atol=1e-5)


def test_one_text_and_tokens_have_no_dimension_of_texts():
    ids = words()(TEXTS[0])["input_ids"]
    one, other = (likelihoods(masked("bert"), **given).likelihood for given in ({"text": TEXTS[0]}, {"tokens": ids}))
    assert one == other
    check(one, by_loop(eager("bert", "ForMaskedLM"), ids))


def test_a_mask_in_the_text_stays_and_is_not_scored():
    found = likelihoods(masked("bert"), tokens=[3, MASK, 5]).likelihood
    check(found, by_loop(eager("bert", "ForMaskedLM"), [3, MASK, 5]))
    assert [token.position for token in found.tokens] == [0, 2]


def test_a_head_that_ignores_its_input_gives_each_token_its_own_probability():
    model = sharp("bert", "ForMaskedLM")
    logs = torch.linspace(-3, 2, 96).log_softmax(-1)
    with torch.no_grad():
        model.cls.predictions.decoder.weight.zero_()
        model.cls.predictions.decoder.bias.copy_(logs)
    reply = likelihoods(LoadedModel("known", model, words(), device()), tokens=[[3, 5, 7, 9], [8, 3, 2, 2]])
    first, second = reply.likelihood
    assert first.sum == pytest.approx(float(logs[[3, 5, 7, 9]].sum()), abs=1e-5)
    assert second.mean == pytest.approx(float(logs[[8, 3]].mean()), abs=1e-5)
    assert [token.rank for token in first.tokens] == [95 - token for token in (3, 5, 7, 9)]


def test_edits_are_those_of_each_copy():
    model = sharp("bert", "ForMaskedLM")
    layer, width = model.bert.encoder.layer[1].attention, 4
    width = layer.self.attention_head_size

    def without_head(_, given):
        changed = given[0].clone()
        changed[..., width : 2 * width] = 0
        return (changed, *given[1:])

    layer.output.dense.register_forward_pre_hook(without_head)
    reply = likelihoods(masked("bert"), text=TEXTS, edits={"1": [{"tap": "context", "heads": [1], "set": 0}]})
    for text, likelihood in zip(TEXTS, reply.likelihood, strict=True):
        check(likelihood, by_loop(model, words()(text)["input_ids"]))


def test_the_price_is_that_of_the_passes():
    model, length = masked("bert"), 9
    costs = ModelCosts(model)
    price = costs.report(ModelComplexityRequest(length=length, batch=2, likelihood="masked"), 2**34)
    one = costs.report(ModelComplexityRequest(length=length, batch=2 * length), 2**34).prefill
    assert price.likelihood.flops == one.flops
    assert price.likelihood.peak_bytes == one.peak_bytes
    long = costs.report(ModelComplexityRequest(length=length, batch=100, likelihood="masked"), 2**34).likelihood
    assert long.flops == 50 * one.flops
    assert long.peak_bytes < 50 * one.peak_bytes  # in parts
    assert costs.report(ModelComplexityRequest(length=length), 2**34).likelihood is None


def test_parts_say_how_many_copies_come_next():
    request = ModelForwardRequest(text=TEXTS, likelihood="masked")
    plan = plan_likelihoods(masked("bert"), request)
    count = len(plan.copies)
    assert count == sum(each not in SPECIAL for text in TEXTS for each in words()(text)["input_ids"])
    assert [*masked_likelihoods(masked("bert"), plan, 6)] == [6] * (count // 6 - 1) + [count % 6] * (count % 6 > 0)


REFUSED = {
    "a causal model": (partial(loaded, "llama", "ForCausalLM"), {"text": "the cat"}, "likelihood"),
    "a classifier": (partial(loaded, "bert", "ForSequenceClassification"), {"text": "the cat"}, "likelihood"),
    "no mask token": (
        lambda: LoadedModel("bert", sharp("bert", "ForMaskedLM"), tokenizer(), device()), {"text": "cat"}, "likelihood",
    ),
    "no tokenizer": (
        lambda: LoadedModel("bert", sharp("bert", "ForMaskedLM"), None, device()), {"tokens": [3]}, "likelihood",
    ),
    "special tokens alone": (partial(masked, "bert"), {"tokens": [[3], [2, 12]]}, "tokens.1"),
    "an edit by text": (
        partial(masked, "bert"),
        {"tokens": [3, 4], "edits": {"0": [{"tap": "weights", "heads": [0], "value": np.zeros((1, 1, 2, 2))}]}},
        "edits.0",
    ),
    "an addition by text": (
        partial(masked, "bert"),
        {"tokens": [3, 4], "edits": {"0": [{"tap": "weights", "heads": [0], "add": np.zeros((1, 1, 2, 2))}]}},
        "edits.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_likelihood_is_refused_by_its_field(case):
    model, fields, param = REFUSED[case]
    with pytest.raises(InvalidRequest) as refusal:
        likelihoods(model(), **fields)
    assert refusal.value.param == param
    if param == "likelihood":
        with pytest.raises(InvalidRequest) as refusal:
            ModelCosts(model()).report(ModelComplexityRequest(length=4, likelihood="masked"), 2**34)
        assert refusal.value.param == param


@pytest.mark.parametrize(
    "fields",
    [{"return": ["logits"]}, {"positions": [0]}, {"compare": "unedited"}, {"keep": True}, {"answer": "cat"},
     {"top_k": 3}],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_fields_that_a_likelihood_has_no_use_for_are_refused(fields):
    with pytest.raises(ValidationError, match="leave it out"):
        ModelForwardRequest.model_validate({"text": "cat", "likelihood": "masked"} | fields)
    assert ModelForwardRequest.model_validate({"text": "cat", "likelihood": "masked", "top_k": 0})
