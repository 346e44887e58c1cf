"""``hidden`` is one number: the state after a layer, before the final norm, whichever question tells it."""

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device, near
from tools.models_walk.model_types import built

from attention_client.recording import record
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import ModelLensRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_service.models.answers.lenses.lens_plan import plan_lens
from attention_service.models.answers.lenses.lens_reply import LensRun
from attention_service.models.answers.model_forward import forward_reply, recorded_forward
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.stream_search import find_stream

TEXT, TOKEN = "the cat sat on the mat", 7


@dataclass(frozen=True)
class Way:
    """Where a type's layers stand, what reads their states out, and what its final norm is."""

    layers: str
    head: str
    norm: str | None = None
    stack: str = "layers"
    time_first: bool = False
    keys: dict[int, list] = field(default_factory=lambda: {0: [0], 1: [1]})
    """The attentions of each layer."""


TYPES = {
    "llama": Way("model.layers", "lm_head", "model.norm"),
    "gpt2": Way("transformer.h", "lm_head", "transformer.ln_f"),
    "bloom": Way("transformer.h", "lm_head", "transformer.ln_f"),
    "qwen3_next": Way("model.layers", "lm_head", "model.norm", keys={1: [1]}),
    "xlnet": Way("transformer.layer", "lm_loss", time_first=True),
    "longcat_flash": Way(
        "model.layers", "lm_head", "model.norm",
        keys={0: ["attention.0", "attention.1"], 1: ["attention.2", "attention.3"]},
    ),
    "t5": Way(
        "decoder.block", "lm_head", "decoder.final_layer_norm", "decoder",
        keys={0: ["decoder.0", "cross.0"], 1: ["decoder.1", "cross.1"]},
    ),
    "bert": Way("bert.encoder.layer", "cls"),
    "roberta": Way("roberta.encoder.layer", "lm_head"),
    "albert": Way("albert.encoder.albert_layer_groups", "predictions"),
}  # fmt: skip


def plain(model, way, arguments):
    """The states after each layer ``[L, d]``, ∂log p/∂each, and the logits, by autograd alone."""
    states = []

    def keep(_, __, output):
        state = output[0] if isinstance(output, tuple) else output
        state.retain_grad()
        states.append(state)

    hooks = [layer.register_forward_hook(keep) for layer in model.get_submodule(way.layers)]
    logits = model(**arguments, use_cache=False).logits if "xlnet" not in way.layers else model(**arguments).logits
    for hook in hooks:
        hook.remove()
    logits[0, -1].log_softmax(-1)[TOKEN].backward()
    row = np.s_[:, 0] if way.time_first else np.s_[0]
    return [x.detach()[row] for x in states], [x.grad[row] for x in states], logits.detach()[0]


def read_out(model, way, state):
    """The logits ``[L, V]`` of states by the model's own modules behind its layers."""
    with torch.no_grad():
        normed = state if way.norm is None else model.get_submodule(way.norm)(state)
        if getattr(model.config, "scale_decoder_outputs", False):
            normed = normed * model.model_dim**-0.5
        return model.get_submodule(way.head)(normed[None])[0]


@pytest.mark.sampled(kind=4)
@pytest.mark.parametrize("kind", TYPES)
def test_the_state_after_a_layer_is_one_number_in_every_reply(kind):
    way, model = TYPES[kind], built(kind)
    loaded = LoadedModel(kind, copy.deepcopy(model).requires_grad_(False), tokenizer(), device())
    request = ModelForwardRequest(text=TEXT, return_=["hidden"], keep=True)
    found = recorded_forward(loaded, request)
    forward, kept = {layer.layer: layer.hidden for layer in found.reply.layers}, dict(found.recording.tensors())
    states, gradients, logits = plain(model, way, loaded.reader.read(request).arguments)
    reply = ModelGradients(loaded, ModelGradientsRequest(text=TEXT, of={"token": TOKEN}, wrt=["hidden"])).reply()
    found = {layer.layer: layer.gradients["hidden"] for layer in reply.layers}
    plan = plan_lens(loaded, ModelLensRequest(text=TEXT, targets=[3, TOKEN]), find_stream(loaded))
    readings = {layer.layer: layer.hidden.targets for layer in LensRun(loaded, plan).reply().layers}
    recorded = record(model, tokenizer(), TEXT)
    for number, keys in way.keys.items():
        for key in keys:
            near(forward[key], states[number], 1e-5)
            near(found[key], gradients[number], 1e-4)
            near(readings[key], read_out(model, way, states[number])[:, [3, TOKEN]], 1e-5)
        if "attention" not in str(keys[0]):
            near(kept[f"{way.stack}.{number}.hidden"], states[number], 1e-5)
        near(recorded.hidden(f"{way.stack}.{number}"), states[number], 1e-5)
    near(readings[way.keys[1][-1]], logits[:, [3, TOKEN]], 1e-5)
    last = states[-1] if way.norm is None else model.get_submodule(way.norm)(states[-1]).detach()
    final = f"{way.stack}.final"
    assert (final in recorded.tensors) == (way.norm is not None)
    near(recorded.tensors.get(final, recorded.hidden(f"{way.stack}.1")), last, 1e-5)
    loaded.close()


def test_an_attention_that_is_part_of_no_layer_has_no_state_after_it():
    """XLM lists its attentions beside its other parts."""
    loaded = LoadedModel("xlm", built("xlm").requires_grad_(False), tokenizer(), device())
    with pytest.raises(InvalidRequest, match="layer 0: it is no part of a layer") as fault:
        forward_reply(loaded, ModelForwardRequest(text=TEXT, return_=["hidden"]))
    assert fault.value.param == "return.0"
    loaded.close()
