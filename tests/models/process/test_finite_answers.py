"""A question whose numbers overflow gets an error that names the layer; its mates get their answers."""

import copy

import numpy as np
import orjson
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.small_models import IDS, device
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest, NotFinite
from attention_contract.schemas.model_requests import ModelForwardReply
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.finite_answers import check_finite, end_of
from attention_service.models.process.served import Answer
from attention_service.models.process.served_model import ServedModel

BAD = 2
LARGE = 3e4
"""Its double is beyond float16."""


def model(dtype=torch.float16):
    """A Llama of four layers that is the identity but for one, whose MLP makes 2 · LARGE of each token."""
    found = built("llama", num_hidden_layers=4)
    with torch.no_grad():
        mlp = found.model.layers[BAD].mlp
        for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            each.weight.zero_()
        found.model.layers[BAD].post_attention_layernorm.weight.fill_(1)
        found.model.embed_tokens.weight.zero_()
        found.model.embed_tokens.weight[:, 0] = 1  # normed to √d
        mlp.gate_proj.weight[:, 0] = LARGE / 64
        mlp.up_proj.weight[:, 0] = LARGE / 64
        for layer in found.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            if layer is not found.model.layers[BAD]:
                layer.mlp.down_proj.weight.zero_()
    return LoadedModel("net", copy.deepcopy(found).to(dtype).requires_grad_(False), tokenizer(), device())


@pytest.fixture(scope="module")
def served():
    return ServedModel(model())


def asked(served, operation, **fields):
    facts = {"free_bytes": 2**30, "reader": "", "lens": None}
    return end_of(served.prepare(operation, memoryview(orjson.dumps(fields)), facts, lambda _: None))


QUESTIONS = {
    "forward": {"tokens": IDS},
    "gradients": {"tokens": IDS, "of": {"position": -1, "token": 3}, "wrt": ["embeddings"]},
    "effects": {
        "tokens": IDS, "of": {"position": -1, "token": 3},
        "sweep": {"tap": "context", "over": ["layers"], "set": 0},
    },
    "embed": {"model": "net", "input": [IDS]},
    "similarity": {"pairs": [["the cat", "the mat"]]},
}  # fmt: skip


@pytest.mark.parametrize("operation", QUESTIONS)
def test_an_overflow_names_its_layer(served, operation):
    with pytest.raises(NotFinite) as fault:
        asked(served, operation, **QUESTIONS[operation])
    assert fault.value.status == 422
    assert fault.value.facts["layer"] == BAD
    assert fault.value.facts["module"].startswith(f"model.layers.{BAD}.mlp")
    assert fault.value.facts["dtype"] == "float16"
    assert "load the model with dtype bfloat16 or float32" in fault.value.detail


@pytest.mark.parametrize("drawn", [{"temperature": 0}, {"temperature": 1.0, "seed": 1}])
def test_a_generation_that_overflows_ends_with_the_layer(served, drawn):
    running = asked(served, "complete", model="net", prompt=IDS, max_tokens=3, logprobs=1, **drawn)
    (fault,) = served.read([running], 100).values()
    assert isinstance(fault, NotFinite)
    assert fault.facts["layer"] == BAD
    running.leave()


def test_what_does_not_overflow_is_answered(served):
    reply = asked(served, "forward", tokens=IDS, top_k=0).reply
    assert reply.predictions == []
    wide = ServedModel(model(torch.float32))
    for operation, fields in QUESTIONS.items():
        assert isinstance(asked(wide, operation, **fields), Answer)


def test_what_a_request_brings_is_answered(served):
    """A score of −∞, which hides its key, is asked for, and returned as it is; NaN is refused before the pass."""
    wide = ServedModel(model(torch.float32))
    edit = {"tap": "scores", "keys": [0], "queries": [2], "set": "-Infinity"}
    reply = asked(wide, "forward", tokens=IDS, edits={"0": [edit]}, layers=[0], **{"return": ["scores"]}).reply
    assert np.isneginf(reply.layers[0].scores[:, 2, 0]).all()
    with pytest.raises(InvalidRequest, match="expected finite numbers"):
        asked(wide, "forward", tokens=IDS, edits={"0": [{"tap": "output", "set": "NaN"}]})


@pytest.mark.parametrize("change", [{"set": 0}, {"scale": 0}])
def test_a_head_without_weights_has_no_shares(change):
    served = ServedModel(LoadedModel("net", built("llama"), tokenizer(), device()))
    edits = {"0": [{"tap": "weights", "heads": [0], **change}]}
    layer = asked(served, "weights", tokens=IDS, edits=edits, layers=[0]).reply.layers[0]
    assert np.isnan(layer.statistics.entropy[0])
    assert np.isfinite(layer.statistics.entropy[1:]).all()
    reply = layer.model_copy(update={"weights": np.full_like(layer.weights, np.nan)})
    with pytest.raises(NotFinite, match="weights"):
        check_finite(reply, memoryview(orjson.dumps({"edits": edits})))


def test_paths_that_do_not_exist_are_nan_in_the_reply():
    """A component sends nothing to an MLP before it."""
    fields = {
        "tokens": IDS,
        "of": {"position": -1, "token": 3},
        "from": {"layer": 1},
        "to": {"parts": ["mlps", "logits"]},
    }
    plain = ServedModel(LoadedModel("net", built("llama", num_hidden_layers=3), tokenizer(), device()))
    values = asked(plain, "effects", **fields).reply.effects.value
    assert np.isnan(values[:, 0]).all()  # the MLP of layer 0
    assert np.isfinite(values[:, 1:]).all()


def test_numbers_that_forbid_are_meant():
    fields = {"predictions": [], "layers": [], "labels": [], "ran": None}
    check_finite(ModelForwardReply.model_construct(**fields, logits=np.array([1.0, -np.inf])))
    for number in (np.nan, np.inf):
        with pytest.raises(NotFinite, match="logits of the reply"):
            check_finite(ModelForwardReply.model_construct(**fields, logits=np.array([1.0, number])))
    with pytest.raises(NotFinite, match="pooled of the reply"):
        check_finite(ModelForwardReply.model_construct(**fields, pooled=np.array([1.0, -np.inf])))
