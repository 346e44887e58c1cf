"""``attention parity``: two servers on the same prompts."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from attention_client.cli.compare.parity_commands import Departure, add_taps, likelihood_parity, parity_of
from attention_contract.schemas.openai import CompletionLogprobs, GeneratedToken
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
    for text in found["texts"]:
        assert text["logprobs"] < 1e-6
        assert text["layers"]
        for layer in text["layers"]:
            assert max(layer[name] for name in ("weights", "entropy", "context", "output")) < 1e-5


def test_the_first_layer_that_departs_is_named():
    found = parity_of("x", tokens([5, 6, 7]), tokens([5, 6, 7], spoiled={(1, 1)}))
    assert [layer.weights for layer in found.layers] == [0, pytest.approx(0.25, abs=1e-6)]
    assert found.departs(1e-3) == Departure(1, "weights")
    assert found.departs(0.5) is None


def test_tokens_behind_another_choice_are_not_compared():
    found = parity_of("x", tokens([5, 6, 7]), tokens([5, 9, 7], spoiled={(2, 0)}))
    assert (found.alike, found.tokens) == (1, 3)
    assert found.departs(1e-3) is None


def test_a_weight_that_is_no_number_departs():
    first = tokens([5])
    first[0].layers[0].weights[0, 0] = np.nan
    assert parity_of("x", first, tokens([5])).departs(1.0) == Departure(0, "weights")


def forwards(context=0.0, output=0.0):
    """Taps of two layers; the second one's depart by these numbers."""
    layers = [
        SimpleNamespace(
            layer=at, context=np.full((2, 3, 4), 2.0) + at * context, output=np.full((3, 8), 4.0) + at * output
        )
        for at in range(2)
    ]
    return SimpleNamespace(layers=layers)


@pytest.mark.parametrize(("departing", "tap"), [({"context": 0.5}, "context"), ({"output": 0.5}, "output"), ({}, None)])
def test_contexts_and_outputs_are_compared_relative_to_their_size(departing, tap):
    found = parity_of("x", tokens([5]), tokens([5]))
    add_taps(found, forwards(), forwards(**departing))
    assert found.layers[0].context == found.layers[0].output == 0
    assert found.layers[1].context == pytest.approx(departing.get("context", 0) / 2)
    assert found.layers[1].output == pytest.approx(departing.get("output", 0) / 4)
    assert found.departs(1e-3) == (None if tap is None else Departure(1, tap))
    assert found.passed(1e-3) == (tap is None)


def test_likelihoods_of_tokens_that_both_name_are_compared():
    def of(*likeliest):
        return CompletionLogprobs(text_offset=[], tokens=[], token_logprobs=[], top_logprobs=list(likeliest))

    first = of({"a": -1.0, "b": -2.0}, {"a": -1.0}, {"a": 0.0})
    second = of({"a": -1.25, "c": -9.0}, {"a": -1.0}, {"a": -5.0})
    assert likelihood_parity(first, second, 2) == pytest.approx(0.25)
    assert likelihood_parity(first, second, 3) == pytest.approx(5)
    found = parity_of("x", tokens([5]), tokens([5]))
    found.logprobs = 0.25
    assert not found.passed(1e-3)


def test_prompts_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match="send token ids"):
        parity_of("x", tokens([5]), tokens([5], begin=3))
