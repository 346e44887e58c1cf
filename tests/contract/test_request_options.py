"""Requests whose options text was parsed before read as if they were the first, and what is remembered is bounded."""

import json

import numpy as np
import pytest
import safetensors.numpy

from attention_contract.errors import InvalidRequest, InvalidTensor, Unreadable
from attention_contract.request_options import KNOWN, parsed_options
from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.weights import WeightsRequest
from attention_contract.tensor_files import request_from_safetensors


@pytest.fixture(autouse=True)
def forgotten():
    parsed_options.cache_clear()


def body(request=None, **tensors):
    return memoryview(safetensors.numpy.save(tensors, {"request": json.dumps(request or {})}))


def read(data, model=ForwardRequest):
    return request_from_safetensors(data, model)


def outcome(data):
    try:
        request = read(data)
    except (InvalidRequest, Unreadable) as fault:
        return fault.to_problem()
    arrays = {name: (x.dtype, type(x)) for name, x in request.__dict__.items() if isinstance(x, np.ndarray)}
    return request.model_dump_json(), arrays, request.model_fields_set


X = np.arange(6, dtype=np.float32).reshape(1, 3, 2)


@pytest.mark.parametrize(
    ("tensors", "request_"),
    [
        ({"query": X}, {}),
        ({"query": X.astype(np.float64), "key": X.astype(np.float16), "value": X}, {"return": ["weights"]}),
        ({"query": X, "mask": np.array([[True, False, True]])}, {}),
        ({"query": X, "key_mask": np.array([[True, True, False]])}, {"average_heads": True}),
        ({"query": X, "key_mask": np.array([[1, 0, 1]])}, {}),
        ({"query": X, "key_mask": np.array([[1, 0, 2]])}, {}),
        ({"query": X, "key_mask": X}, {}),
        ({"query": X, "key_lengths": np.array([2])}, {}),
        ({"query": X}, {"key_lengths": [3], "version": "v"}),
        ({"query": X}, {"query": [[1.0]]}),
        ({"query": X, "edits.0.value": X}, {"edits": [{"tap": "weights"}]}),
        ({"query": X[:, :0]}, {}),
        ({"query": X}, {"return": ["nothing"]}),
    ],
)
def test_the_second_request_with_the_same_options_reads_as_the_first(tensors, request_):
    data = body(request_, **tensors)
    first = outcome(data)
    assert outcome(data) == first
    parsed_options.cache_clear()
    assert outcome(data) == first


def test_the_numbers_and_shapes_are_those_of_each_request():
    for length in (1, 5, 2):
        x = np.full((1, length, 2), length, np.float32)
        assert np.array_equal(read(body(query=x)).query, x)
    assert parsed_options.cache_info().misses == 1


def test_bytes_that_are_no_tensor_are_found_under_known_options():
    good = body(query=X, key_mask=np.ones((1, 3), np.bool_))
    bad = memoryview(bytes(good).replace(b"\x01\x01\x01", b"\x01\x02\x01"))
    for _ in range(2):
        assert read(good).key_mask.all()
        with pytest.raises(InvalidTensor, match="key_mask"):
            read(bad)


def test_options_belong_to_one_kind_of_request():
    data = body(query=X)
    assert type(read(data)) is ForwardRequest
    assert type(read(data, WeightsRequest)) is WeightsRequest


def test_remembered_options_are_bounded_and_hold_no_numbers():
    for index in range(KNOWN + 5):
        assert read(body({"version": str(index)}, query=X)).version == str(index)
    assert parsed_options.cache_info().currsize == KNOWN
    assert not parsed_options(ForwardRequest, '{"version": "7"}', (("query", "float32"),)).query.size


@pytest.mark.parametrize(
    ("request_", "tensors"),
    [
        ({"edits": [{"tap": "weights", "scale": 1.0}] * 200}, {}),  # a long text
        ({"edits": [{"tap": "weights"}]}, {"edits.0.value": X}),  # a tensor within a list
        ({}, {"key_lengths": np.array([2])}),  # integers
    ],
)
def test_other_options_are_not_remembered(request_, tensors):
    read(body(request_, query=X, **tensors))
    assert not parsed_options.cache_info().currsize
