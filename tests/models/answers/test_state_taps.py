"""The points mlp and hidden in requests: returned, differentiated, edited and swept.

The reference is the model of transformers with plain hooks.
"""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tests.models.small_models import IDS, eager, loaded, near

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.sweeps.swept_effects import EffectsOfSweep
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.loaded.model_description import model_info

LAYER = 1
IDS_TENSOR = torch.tensor([IDS])


def alike(found, expected):
    """Equal to a millionth of the largest number."""
    near(found, expected, 1e-6 * float(np.abs(np.asarray(expected)).max()))


def module_of(tap):
    layer = eager("llama").model.layers[LAYER]
    return layer.mlp if tap == "mlp" else layer


@contextmanager
def hooked(tap, change):
    def hook(_, __, output):
        first = output[0] if isinstance(output, tuple) else output
        new = change(first)
        return None if new is None else (new, *output[1:]) if isinstance(output, tuple) else new

    handle = module_of(tap).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def forward(**fields):
    return forward_reply(loaded("llama"), validate(ModelForwardRequest, {"tokens": IDS, **fields}))


def log_probabilities(tap=None, change=None):
    if tap is None:
        return eager("llama")(IDS_TENSOR).logits[0, -1].log_softmax(-1)
    with hooked(tap, change):
        return eager("llama")(IDS_TENSOR).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("tap", ["mlp", "hidden"])
def test_a_state_is_returned_and_differentiated(tap):
    seen = []

    def keep(state):
        state.retain_grad()
        seen.append(state)

    chosen = log_probabilities(tap, keep).max()
    chosen.backward()
    reply = forward(**{"return": [tap], "layers": [LAYER]})
    alike(getattr(reply.layers[0], tap), seen[0][0].detach())
    request = validate(ModelGradientsRequest, {"tokens": IDS, "wrt": [tap], "layers": [LAYER], "check": True})
    gradients = ModelGradients(loaded("llama"), request).reply()
    alike(gradients.layers[0].gradients[tap], seen[0].grad[0])
    assert gradients.check[f"{LAYER}.{tap}"].passed


@pytest.mark.parametrize("tap", ["mlp", "hidden"])
@torch.no_grad()
def test_an_edit_of_a_state_changes_the_prediction_as_a_hook_does(tap):
    width = loaded("llama").points.width(LAYER)
    value = np.linspace(-2, 2, width, dtype=np.float32)

    def change(state):
        state = state.clone()
        state[:, 3] = torch.from_numpy(value)
        state[:, -1] *= 0.5
        return state

    edits = [
        {"tap": tap, "queries": [3], "value": value.tolist()},
        {"tap": tap, "queries": [len(IDS) - 1], "scale": 0.5},
    ]
    reply = forward(**{"return": ["logits", tap], "layers": [LAYER], "edits": {str(LAYER): edits}})
    alike(torch.from_numpy(np.array(reply.logits[-1])).log_softmax(-1), log_probabilities(tap, change))
    near(getattr(reply.layers[0], tap)[3], value)


@pytest.mark.parametrize("tap", ["mlp", "hidden"])
@torch.no_grad()
def test_a_sweep_over_queries_patches_the_state_of_each_token(tap):
    request = validate(ModelEffectsRequest, {
        "tokens": IDS, "layers": [LAYER], "sweep": {"tap": tap, "over": ["queries"], "set": 0}, "of": {"token": 7},
    })  # fmt: skip
    effects = EffectsOfSweep(loaded("llama"), request)
    found = at_once(effects.parts(effects.copies)).effects.value

    def without(query):
        def change(state):
            state = state.clone()
            state[:, query] = 0
            return state

        return change

    plain = log_probabilities()[7]
    expected = [float(log_probabilities(tap, without(query))[7] - plain) for query in range(len(IDS))]
    near(found, expected, 1e-5)
    assert abs(expected[-1]) > 1e-3


@pytest.mark.parametrize(
    ("edits", "param", "reason"),
    [
        ({"tap": "mlp", "heads": [0], "set": 0}, "edits.1.0.heads", "mlp has no heads"),
        ({"tap": "hidden", "queries": [len(IDS)], "set": 0}, "edits.1.0.queries", "out of range"),
        ({"tap": "hidden", "value": [1.0, 2.0]}, "edits.1.0.value", "broadcasts"),
        ({"tap": "mlp", "set": float("inf")}, "edits.1.0.set", "finite"),
    ],
)
def test_an_edit_of_a_state_that_does_not_fit_is_refused_by_field(edits, param, reason):
    with pytest.raises(InvalidRequest, match=reason) as refused:
        forward(edits={str(LAYER): [edits]})
    assert refused.value.param == param


def test_each_layer_lists_the_states_that_it_has():
    layer = model_info(loaded("llama"))["layers"][LAYER]
    for states in (layer.taps, layer.edits, layer.gradients):
        assert {"mlp", "hidden"} <= set(states)
