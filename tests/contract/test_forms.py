"""Requests of a form that was read before: the same as read anew, for a bounded number of forms."""

import json

import numpy as np
import pytest
import safetensors.numpy

from attention_contract.errors import InvalidTensor, Unreadable
from attention_contract.forms import MOST, Forms
from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.weights import WeightsRequest
from attention_contract.wire import SAFETENSORS, from_body


def body(request=None, **tensors):
    return memoryview(safetensors.numpy.save(tensors, {"request": json.dumps(request or {})}))


def outcome(read, data):
    try:
        request = read(data)
    except (InvalidTensor, Unreadable) as fault:
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
        ({"query": X, "key_lengths": np.array([2])}, {}),
        ({"query": X}, {"key_lengths": [3], "version": "v"}),
        ({"query": X, "edits.0.value": X}, {"edits": [{"tap": "weights"}]}),
        ({"query": X[:, :0]}, {}),
    ],
)
def test_a_known_form_reads_as_anew(tensors, request_):
    forms = Forms()

    def anew(data):
        return from_body(ForwardRequest, data, SAFETENSORS, "request")

    for factor in (1, 2, 3):
        numbers = {
            name: (x * factor if x.dtype.kind == "f" else x[..., ::-1].copy() if factor == 2 else x)
            for name, x in tensors.items()
        }
        data = body(request_, **numbers)
        assert outcome(lambda sent: forms.read(ForwardRequest, sent), data) == outcome(anew, data)


def test_bytes_that_are_no_tensor_are_found_in_a_known_form():
    forms = Forms()
    good = body(query=X, key_mask=np.ones((1, 3), np.bool_))
    bad = memoryview(bytes(good).replace(b"\x01\x01\x01", b"\x01\x02\x01"))
    for data, fails in ((good, False), (bad, True), (good, False), (bad, True)):
        if fails:
            with pytest.raises(InvalidTensor, match="key_mask"):
                forms.read(ForwardRequest, data)
        else:
            forms.read(ForwardRequest, data)


def test_a_body_of_another_length_is_of_another_form():
    forms = Forms()
    whole = body(query=X)
    forms.read(ForwardRequest, whole)
    for data in (whole[:-4], memoryview(bytes(whole) + b"\0" * 4)):
        with pytest.raises(Unreadable):
            forms.read(ForwardRequest, data)


def test_forms_belong_to_one_kind_of_request():
    forms = Forms()
    data = body(query=X)
    assert type(forms.read(ForwardRequest, data)) is ForwardRequest
    assert type(forms.read(WeightsRequest, data)) is WeightsRequest
    assert len(forms) == 2


def test_forms_are_bounded_and_hold_no_numbers():
    forms = Forms()
    for length in range(MOST + 5):
        data = body(query=np.zeros((length, 2), np.float32))
        assert forms.read(ForwardRequest, data).query.shape == (length, 2)
    assert len(forms) == MOST
    assert all(form.request.query is None for form in forms)
    few = Forms()
    few.read(ForwardRequest, body({"edits": [{"tap": "weights", "scale": 1.0}] * 200}, query=X))  # a long header
    few.read(ForwardRequest, body({"edits": [{"tap": "weights"}]}, **{"query": X, "edits.0.value": X}))
    few.read(ForwardRequest, body(query=X, key_lengths=np.array([2])))
    assert not len(few)
