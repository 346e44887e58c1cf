"""Heads of width 2 whose queries and keys are turned: over HTTP every number is that of the formula, and one's own.

Halves that are one wide are put together in a layout that the CPU's flash kernel does not read.
"""

import numpy as np
import pytest

ROPE = {"position": {"name": "rope"}}
CAUSAL = ROPE | {"masks": [{"name": "causal"}]}
WINDOW = ROPE | {"masks": [{"name": "sliding_window", "left": 300, "right": 300}]}
OTHER = 12345.678
"""A number that only another request holds."""
KERNELS = ["blocked", "fused", "materialized", None]


def rotated(x):
    """x ``[L, 2]`` rotated by its places, in radians."""
    place = np.arange(len(x))
    (a, b), cos, sin = x.T, np.cos(place), np.sin(place)
    return np.stack([a * cos - b * sin, b * cos + a * sin], -1)


def attended(x, rows, left=None, right=0):
    """The output of two heads for these rows of x ``[L, 4]``; a window of None has no end."""
    outputs = []
    for values in (x[:, :2], x[:, 2:]):
        scores = rotated(values)[rows] @ rotated(values).T / np.sqrt(2)
        ahead = np.arange(len(x)) - np.asarray(rows)[:, None]
        seen = (ahead >= (-np.inf if left is None else -left)) & (ahead <= (np.inf if right is None else right))
        weights = np.exp(scores - scores.max(-1, keepdims=True)) * seen
        outputs.append(weights / weights.sum(-1, keepdims=True) @ values)
    return np.concatenate(outputs, -1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_reply_holds_a_number_of_another_request(client, rng, kernel):
    for length in (2, 8, 32, 200):
        client.attention.forward(np.full((1, length, 4), OTHER), num_heads=2, kernel=kernel)
        x = rng.normal(size=(1, length, 4)).astype(np.float32)
        found = client.attention.forward(x, num_heads=2, spec=CAUSAL, kernel=kernel).output
        np.testing.assert_allclose(found[0], attended(x[0].astype(float), range(length)), atol=1e-5)


@pytest.mark.parametrize("kernel", ["blocked", "fused", None])
def test_gradients_and_modules_too(client, rng, kernel):
    for dtype in ("float32", "bfloat16"):
        name = f"narrow.{kernel}.{dtype}"
        client.modules.create(name, {"d_model": 4, "num_heads": 2, "dtype": dtype, "spec": CAUSAL}, seed=0)
        tolerance = {"float32": 1e-4, "bfloat16": 6e-2}[dtype]
        for length in (2, 33):
            client.forward(name, np.full((1, length, 4), OTHER))
            x, upstream = rng.normal(size=(2, 1, length, 4)).astype(np.float32)
            ask = {"upstream": upstream, "wrt": ["query", "parameters"], "return_": ["output"]}
            found, expected = (client.gradients(name, x, **ask, kernel=each) for each in (kernel, "materialized"))
            np.testing.assert_allclose(found.output, expected.output, atol=tolerance)
            for key, wanted in expected.gradients.items():
                np.testing.assert_allclose(
                    found.gradients[key].astype(float), wanted.astype(float), atol=tolerance * abs(wanted).max()
                )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "spec", "window"),
    [(12000, ROPE, (None, None)), (12000, CAUSAL, (None, 0)), (6000, WINDOW, (300, 300))],
    ids=["dense", "causal", "window"],
)
def test_long_sequences_by_whichever_kernel_is_chosen(client, rng, length, spec, window):
    x = rng.normal(size=(1, length, 4)).astype(np.float32)
    rows = [0, 1, 299, 5000, length - 1]
    found = client.attention.forward(x, num_heads=2, spec=spec)
    assert found.ran.kernel != "materialized"
    np.testing.assert_allclose(found.output[0, rows], attended(x[0].astype(float), rows, *window), atol=1e-4)
