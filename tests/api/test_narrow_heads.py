"""Heads of width 2 whose queries and keys are turned: over HTTP every number is that of the formula, and one's own.

Halves that are one wide lie as the flash kernel of the CPU does not read them, which core proves for each kernel.
"""

import numpy as np
import pytest

SPEC = {"position": {"name": "rope"}, "masks": [{"name": "causal"}]}
OTHER = 12345.678
"""A number that only another request holds."""


def rotated(x):
    """x ``[L, 2]`` rotated by its places, in radians."""
    place = np.arange(len(x))
    (a, b), cos, sin = x.T, np.cos(place), np.sin(place)
    return np.stack([a * cos - b * sin, b * cos + a * sin], -1)


def attended(x):
    """The output of two causal heads of x ``[L, 4]``."""
    outputs = []
    for values in (x[:, :2], x[:, 2:]):
        scores = rotated(values) @ rotated(values).T / np.sqrt(2)
        weights = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(len(x))
        outputs.append(weights / weights.sum(-1, keepdims=True) @ values)
    return np.concatenate(outputs, -1)


@pytest.mark.parametrize("kernel", ["blocked", "fused", "materialized", None])
def test_no_reply_holds_a_number_of_another_request(client, rng, kernel):
    for length in (2, 8, 32, 200):
        client.attention.forward(np.full((1, length, 4), OTHER), num_heads=2, kernel=kernel)
        x = rng.normal(size=(1, length, 4)).astype(np.float32)
        found = client.attention.forward(x, num_heads=2, spec=SPEC, kernel=kernel).output
        np.testing.assert_allclose(found[0], attended(x[0].astype(float)), atol=1e-5)
