"""Queries and keys of different widths, raw: which specs take them, and their cost. The fuzz compares the numbers."""

import pytest

from attention_client import InvalidRequest, ShapeMismatch
from tests.api.talk import post


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"score": {"name": "cosine"}},
        {"score": {"name": "bilinear"}, "position": {"name": "rope"}},
        {"score": {"name": "bilinear"}, "method": {"name": "performer"}},
    ],
)
def test_other_specs_take_one_width(client, rng, spec):
    q, k, v = (rng.normal(size=(2, 4, 5, width)) for width in (3, 6, 4))
    with pytest.raises(ShapeMismatch) as error:
        client.attention.forward(q, k, v, spec=spec)
    assert error.value.param == "key"
    with pytest.raises(InvalidRequest) as error:
        client.attention.complexity(8, num_heads=2, head_dim=4, key_dim=6, spec=spec)
    assert error.value.param == "key_dim"


def test_costs_count_both_widths(http):
    sizes = {"num_heads": 3, "head_dim": 4, "key_dim": 6, "value_dim": 5, "shape": {"queries": 7, "keys": 9}}
    sizes["memory_bytes"] = 2**16  # little, so that limits are found soon
    bilinear = post(http, "/v1/attention/complexity", spec={"score": {"name": "bilinear"}}, **sizes)
    additive = post(http, "/v1/attention/complexity", spec={"score": {"name": "additive", "hidden": 8}}, **sizes)
    pairs = 3 * 7 * 9
    scores = [reply["costs"][0]["forward"]["dense"]["scores"] for reply in (bilinear, additive)]
    assert scores == [2 * pairs * 6 + 3 * 7 * 2 * 4 * 6, 2 * pairs * 8 + 3 * 2 * 8 * (7 * 4 + 9 * 6)]
