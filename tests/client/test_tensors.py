"""Tensors that a caller may pass, and those of the reply."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from attention_client import InvalidTensor
from attention_client.array_likes import plain
from attention_contract.tensors import DTYPES, Untyped
from tests.client.service import ask, call_of


def test_the_client_does_not_import_what_it_does_not_need():
    script = "import sys, attention_client.cli.commands.command_table; attention_client.Client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    imported = set(done.stdout.split())
    assert "attention_client.client" in imported
    assert not {"torch", "transformers", "fastapi", "aiohttp", "attention_service"} & imported


@pytest.mark.parametrize("media_type", ["safetensors", "json"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_dtype_comes_back_as_it_went(kind, played, dtype, media_type):
    x = np.array([[0.1, -np.inf], [np.nan, 65504.0]]).astype(DTYPES[dtype])
    reply = ask(kind, played, "forward", "demo", x, media_type=media_type)
    assert played.payload.query.dtype == reply.output.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(reply.output.view(np.uint8), x.view(np.uint8))


def test_a_reply_can_be_written_into(kind, played):
    reply = ask(kind, played, "forward", "demo", np.ones((2, 2), np.float32))
    reply.output[0] += 1
    assert reply.output[0, 0] == 2


def test_masked_values_are_refused_and_the_field_is_named():
    masked = np.ma.masked_greater(np.arange(6.0).reshape(2, 3), 3)
    for value in (masked, [masked, masked]):
        with pytest.raises(InvalidTensor, match=r"^key: .*masked") as refused:
            call_of("forward", "demo", np.zeros((2, 3)), value)
        assert refused.value.param == "key"
    assert call_of("forward", "demo", np.ma.masked_array(np.zeros((2, 3)))).request.query.shape == (2, 3)


def test_arrays_of_several_shapes_in_a_list_are_refused():
    with pytest.raises(InvalidTensor, match="query: a list of arrays cannot be stacked"):
        call_of("forward", "demo", [np.zeros(3), np.zeros(2)])


@pytest.mark.parametrize("media_type", ["safetensors", "json"])
def test_a_nested_list_states_no_dtype_on_the_wire(played, media_type):
    ask("sync", played, "forward", "demo", [[0.1, 2], [3, float("-inf")]], media_type=media_type)
    assert isinstance(played.payload.query, Untyped)
    np.testing.assert_array_equal(played.payload.query, [[0.1, 2], [3, -np.inf]])


def test_a_nested_list_too_long_for_a_header_goes_as_json(played, monkeypatch):
    monkeypatch.setattr("attention_client.calls.base.MAX_HEADER", 1000)
    reply = ask("sync", played, "forward", "demo", [[0.5] * 300])
    assert played.requests[0].headers["content-type"] == "application/json"
    assert reply.output.shape == (1, 300)


@pytest.mark.parametrize("number", [np.float64(0.5), np.float32(0.5), np.int64(2)])
def test_lists_may_hold_numpys_numbers(number):
    for listed in ([number, number], [number.item(), number]):
        beta = call_of("hopfield_retrieve", [[1.0, 2.0]], [[1.0, 2.0]], beta=listed).request.beta
        assert beta.tolist() == [number.item()] * 2
        assert isinstance(beta, Untyped)


def test_lists_of_arrays_are_stacked():
    rows = [np.ones(3, np.float32), np.zeros(3, np.float32)]
    np.testing.assert_array_equal(plain(rows), np.array([[1, 1, 1], [0, 0, 0]], np.float32))
    assert plain([ml_dtypes.bfloat16(1)]) == [1.0]


class Holder:
    """Stand for an array of another library."""

    def __array__(self, dtype=None, copy=None):
        return np.ones((2, 2), np.float32)


def test_anything_with_an_array_is_an_array():
    assert call_of("forward", "demo", Holder()).request.query.shape == (2, 2)
