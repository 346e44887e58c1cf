"""``attention parity``: two servers on the same prompts."""

import json

import numpy as np
import pytest

from attention_client.cli.compare.parity_commands import parity_of
from attention_contract.schemas.openai import GeneratedToken
from tests.client.cli.command_line import invoke


def tokens(ids, spoiled=(), begin=2):
    """Generated tokens of two layers; ``spoiled``: pairs of a token and a layer whose weights are others."""
    found = []
    for at, token in enumerate(ids):
        layers = []
        for layer in range(2):
            weights = np.full((1, begin + at), 1 / (begin + at)) + (0.25 if (at, layer) in spoiled else 0)
            layers.append({"layer": layer, "weights": weights.tolist(), "statistics": {"entropy": [1.0]}})
        found.append(
            GeneratedToken.model_validate({"position": begin + at, "token": "", "id": token, "layers": layers})
        )
    return found


def test_a_server_agrees_with_itself(server):
    result = invoke(["--url", server, "parity", "tiny", "the cat sat", "a dog", "--against", server, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["passed"]
    assert [(text["prompt"], text["alike"], text["departs"]) for text in found["texts"]] == [
        ("the cat sat", 8, None), ("a dog", 8, None),
    ]  # fmt: skip
    assert all(layer["weights"] < 1e-6 for text in found["texts"] for layer in text["layers"])


def test_the_first_layer_that_departs_is_named():
    found = parity_of("x", tokens([5, 6, 7]), tokens([5, 6, 7], spoiled={(1, 1)}))
    assert [layer.weights for layer in found.layers] == [0, pytest.approx(0.25, abs=1e-6)]
    assert found.departs(1e-3) == 1
    assert found.departs(0.5) is None


def test_tokens_behind_another_choice_are_not_compared():
    found = parity_of("x", tokens([5, 6, 7]), tokens([5, 9, 7], spoiled={(2, 0)}))
    assert (found.alike, found.tokens) == (1, 3)
    assert found.departs(1e-3) is None


def test_a_weight_that_is_no_number_departs():
    first = tokens([5])
    first[0].layers[0].weights[0, 0] = np.nan
    assert parity_of("x", first, tokens([5])).departs(1.0) == 0


def test_prompts_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match="send token ids"):
        parity_of("x", tokens([5]), tokens([5], begin=3))
