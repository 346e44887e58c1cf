"""Embeddings of a model as a point: returned and edited as transformers runs with other ``inputs_embeds``."""

import numpy as np
import pytest
import torch
from tests.models.generation.decoding.test_joined import alone
from tests.models.small_models import loaded

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.validation import validate
from attention_service.models.answers.joined_questions import group_of, joined_replies
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.loaded.checked_request import read_request

IDS = [5, 9, 3, 7, 2, 11]
ACTIONS = {
    "set": {"set": 0.25, "queries": [1, 4]},
    "value": {"value": np.linspace(-1, 1, 12).reshape(2, 6).repeat(8, 1)[:, :32].tolist(), "queries": [0, 3]},
    "scale": {"scale": -2.0},
    "add": {"add": np.linspace(-1, 1, 32).tolist(), "queries": [5]},
}


def changed(table, action):
    """The embeddings after an edit, by plain indexing."""
    x, at = table.clone(), action.get("queries", slice(None))
    if "set" in action:
        x[at] = action["set"]
    elif "value" in action:
        x[at] = torch.tensor(action["value"])
    else:
        x[at] = x[at] * action["scale"] if "scale" in action else x[at] + torch.tensor(action["add"])
    return x


def edits(action):
    return {"embeddings": [{"tap": "embeddings", **action}]}


@pytest.mark.sampled
@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "gemma2"])
def test_an_edit_is_a_run_with_other_embeddings(kind, action):
    model, every = loaded(kind), [*range(len(IDS))]
    end = (
        {"return": ["embeddings", "hidden"]}
        if kind == "bert"
        else {"return": ["embeddings", "logits"], "positions": every}
    )
    found = forward_reply(model, validate(ModelForwardRequest, {"tokens": IDS, "edits": edits(action)} | end))
    with torch.no_grad():
        x = changed(model.model.get_input_embeddings()(torch.tensor(IDS)), action)
        output = model.model(inputs_embeds=x[None])
    np.testing.assert_allclose(found.embeddings, x, atol=1e-6)
    last, expected = (found.layers[-1].hidden, output[0]) if kind == "bert" else (found.logits, output.logits)
    np.testing.assert_allclose(last, expected[0], atol=1e-4)


def test_questions_that_share_a_pass_have_their_own_embeddings():
    model = loaded("llama")
    asked = [
        {"tokens": IDS, "edits": edits(ACTIONS["set"])}, {"tokens": IDS[:4]},
        {"tokens": IDS[::-1], "edits": edits(ACTIONS["add"])}, {"tokens": IDS[1:], "edits": edits(ACTIONS["scale"])},
    ]  # fmt: skip
    requests = [validate(ModelForwardRequest, fields) for fields in asked]
    questions = [(request, read_request(model, request)) for request in requests]
    assert len({group_of(model, *question) for question in questions} - {None}) == 1
    for request, found in zip(requests, joined_replies(model, questions), strict=True):
        expected = forward_reply(model, request)
        ours, theirs = ([(one.id, one.logit) for one in each.predictions[0].top] for each in (found, expected))
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


REFUSED = {
    "a layer's": ({"0": [{"tap": "embeddings", "set": 0}]}, "edits.0.0.tap"),
    "another tap": ({"embeddings": [{"tap": "hidden", "set": 0}]}, "edits.embeddings.0.tap"),
    "heads": ({"embeddings": [{"tap": "embeddings", "heads": [0], "set": 0}]}, "edits.embeddings.0.heads"),
    "another width": ({"embeddings": [{"tap": "embeddings", "add": [1.0, 2.0, 3.0]}]}, "edits.embeddings.0.add"),
    "no number": ({"embeddings": [{"tap": "embeddings", "set": float("nan")}]}, "edits.embeddings.0.set"),
}


@pytest.mark.parametrize(("given", "param"), REFUSED.values(), ids=REFUSED)
def test_what_fits_no_embeddings_is_refused_by_its_field(given, param):
    with pytest.raises(InvalidRequest) as caught:
        forward_reply(loaded("llama"), validate(ModelForwardRequest, {"tokens": IDS, "edits": given}))
    assert caught.value.param == param


def test_an_answer_has_no_embeddings_in_a_model_that_reads_its_prompt_by_an_encoder():
    attention = {"edits": edits({"scale": 2.0}), "from": "answer", "top_k": 1}
    with pytest.raises(InvalidRequest, match="prompt alone") as caught:
        alone(loaded("t5"), IDS, max_tokens=2, attention=attention)
    assert caught.value.param == "attention.edits.embeddings"
