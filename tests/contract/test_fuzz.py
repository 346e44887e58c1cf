"""Whatever comes, the contract answers with one of its own errors, and blames the caller."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention_contract import wire
from attention_contract.errors import AttentionError
from attention_contract.operations import OPERATIONS
from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.validation import validate

thorough = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MODELS = sorted({operation.request for operation in OPERATIONS if operation.request}, key=lambda model: model.__name__)

WORDS = [
    "name", "dot", "causal", "any", "of", "softmax", "scaled_dot", "dtype", "shape", "data", "base64", "float32",
    "NaN", "Infinity", "weights", "output", "set", "tap", "value", "heads", "score", "masks", "", ".", "\0", "é",
]  # fmt: skip
FIELDS = sorted(RawForwardRequest.model_json_schema()["properties"])
words = st.sampled_from(WORDS + FIELDS) | st.text(max_size=5)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | words
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=10,
)
objects = st.dictionaries(words, values, max_size=6)
requests = st.dictionaries(st.sampled_from(FIELDS), values, max_size=2).map(lambda fields: {"query": [[1.0]]} | fields)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I64", "BOOL", "BF16"]) | values,
        "shape": st.lists(st.integers(-1, 2**64), max_size=3) | st.just([1]) | values,
        "data_offsets": st.tuples(st.integers(0, 16), st.integers(0, 16)) | st.just([0, 4]) | values,
    }
)
names = (
    words
    | st.sampled_from(["edits.0.value", "parameters.a.b", "spec.masks.0", "query.0"])
    | st.text(".0aeé", max_size=6)
)
headers = st.dictionaries(names, entries | values, max_size=4)


def only_our_errors(read, *arguments):
    try:
        read(*arguments)
    except AttentionError as error:
        fault = error
    else:
        return
    assert 400 <= fault.status < 500
    assert len(fault.detail) < 400
    json.dumps(fault.to_problem())


def only_our_errors_in_a_file(header, data=b""):
    text = json.dumps(header).encode()
    body = len(text).to_bytes(8, "little") + text + data
    only_our_errors(wire.from_body, RawForwardRequest, body, wire.SAFETENSORS, "request")


@thorough
@given(requests | values)
def test_any_json_value_is_a_request_or_a_refusal(value):
    only_our_errors(validate, RawForwardRequest, value)


@thorough
@given(st.sampled_from(MODELS), objects)
def test_any_json_object_is_a_body_of_any_operation_or_a_refusal(model, value):
    only_our_errors(validate, model, value)


@thorough
@given(headers, st.none() | objects.map(json.dumps) | values, st.binary(max_size=16))
def test_any_safetensors_header_is_read_or_refused(header, metadata, data):
    only_our_errors_in_a_file({"__metadata__": {"request": metadata}} | header, data)


@thorough
@given(st.sampled_from(["edits.0.value", "query", "parameters.a", "mask", "edits.1.set", "x.y"]), requests)
def test_a_sound_tensor_in_any_place_is_taken_or_refused(name, request):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    only_our_errors_in_a_file({"__metadata__": {"request": json.dumps(request)}, name: entry}, b"\0" * 4)
