"""Large JSON text, piece by piece: the same text, or the same numbers, and never much of it at once."""

import json
import tracemalloc

import numpy as np
import pytest

from attention_contract import json_writing
from attention_contract.json_writing import json_pieces, to_json
from attention_contract.tensors import Untyped

SHAPES = [(700,), (3, 700), (5, 30, 31), (1001, 1), (1, 1, 900), (7, 2, 3, 40), (0, 5), ()]


@pytest.fixture
def small(monkeypatch):
    """Pieces of 64 numbers."""
    monkeypatch.setattr(json_writing, "_PIECE_ITEMS", 64)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("encoding", ["list", "base64"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.bool_, np.float16])
def test_the_pieces_are_the_text(dtype, encoding, rng):
    for shape in SHAPES:
        array = np.asarray(rng.standard_normal(shape) * 3).astype(dtype)
        for one in (array, np.asfortranarray(array), array[::-1] if shape else array):
            value = {"x": one, "y": [1, one, {"z": np.arange(3)}], "s": '"\\\x00', "u": one.view(Untyped)}
            assert b"".join(json_pieces(value, encoding)) == to_json(value, encoding), shape


@pytest.mark.usefixtures("small")
def test_numbers_that_are_not_finite_survive(rng):
    array = rng.standard_normal((30, 41)).astype(np.float32)
    array[0, 3], array[29, 40], array[15, 0] = np.nan, np.inf, -np.inf
    read = json.loads(b"".join(json_pieces({"x": array})))["x"]
    assert np.array_equal(np.array(read, np.float64).astype(np.float32), array, equal_nan=True)


def test_little_is_held_at_once(rng):
    array = rng.standard_normal(2**20).astype(np.float32)
    tracemalloc.start()
    try:
        size = sum(map(len, json_pieces({"x": array})))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 2**23 > 2 * peak
