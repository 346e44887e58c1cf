"""Models travel as safetensors files with nothing copied, and a broken file is refused before it is believed."""

import json

import numpy as np
import pytest

from attention_contract import wire
from attention_contract.errors import AttentionError, InvalidRequest, InvalidTensor, Unreadable
from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.modules import CreateModule
from attention_contract.schemas.sessions import StepsRequest
from attention_contract.schemas.weights import WeightsReply

ROW = np.ones((1, 2), np.float32)
ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
RAN = {
    "kernel": "fused", "device": "cpu", "dtype": "float32", "flops": 1, "predicted_ms": 0.1,
    "predicted_low_ms": 0.05, "predicted_high_ms": 0.2, "compute_ms": 0.1, "cpu_ms": 0.1,
    "queue_ms": float("nan"), "batch": 1, "peak_bytes": 1,
}  # fmt: skip


def tensor(start, dtype="F32", count=1, size=4):
    return {"dtype": dtype, "shape": [count], "data_offsets": [start, start + count * size]}


def file_of(header, data=b"", request=None):
    """A safetensors file, however wrong."""
    if isinstance(header, dict):
        metadata = {} if request is None else {"__metadata__": {"request": json.dumps(request)}}
        header = json.dumps(metadata | header).encode()
    return len(header).to_bytes(8, "little") + header + data


def read(body, model=RawForwardRequest):
    return wire.from_body(model, body, wire.SAFETENSORS, "request")


def refuses(body, kind=AttentionError):
    with pytest.raises(kind) as caught:
        read(body)
    assert 400 <= caught.value.status < 500
    assert len(caught.value.detail) < 400
    assert len(caught.value.param or "") < 250
    return caught.value


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_is_its_tensors_and_the_rest_as_json():
    request = ForwardRequest.model_validate(
        {
            "query": np.ones((2, 4), np.float32),
            "mask": np.ones((2, 2), bool),
            "edits": [{"tap": "scores", "set": 0.0}, {"tap": "weights", "value": np.ones(3), "heads": [1]}],
            "return": ["weights"],
        }
    )
    body = b"".join(wire.to_safetensors(request, "request"))
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    rest = json.loads(header.pop("__metadata__")["request"])
    assert set(header) == {"query", "mask", "edits.1.value"}
    assert rest["edits"][1] == {"tap": "weights", "heads": [1], "renormalize": False}
    assert rest["return"] == ["weights"]
    back = read(body, ForwardRequest)
    assert back.edits[1].value.tolist() == [1.0, 1.0, 1.0]
    assert back.edits[0].set == 0.0
    assert back.mask.dtype == bool


@pytest.mark.parametrize("media_type", wire.MEDIA_TYPES)
@pytest.mark.parametrize("encoding", ["list", "base64"])
def test_parameters_keep_names_with_dots(media_type, encoding):
    given = {"q_proj.weight": np.eye(2, dtype=np.float32), "a.b.c": np.zeros(1), "": np.ones(1), "0": np.ones(2)}
    model = CreateModule.model_validate({"name": "m", "config": {"d_model": 2, "num_heads": 1}, "parameters": given})
    body = b"".join(wire.to_body(model, media_type, "request", encoding))
    back = wire.from_body(CreateModule, body, media_type, "request")
    assert set(back.parameters) == set(given)
    for name, array in given.items():
        np.testing.assert_array_equal(back.parameters[name], array)


@pytest.mark.parametrize("media_type", wire.MEDIA_TYPES)
@pytest.mark.parametrize(
    ("model", "request_"),
    [
        (ModelForwardRequest, {"text": "a", "edits": {"1": [{"tap": "context", "value": ROW}]}}),
        (
            ModelForwardRequest,
            {
                "text": "a",
                "edits": {"decoder.0": [{"tap": "q", "set": 0}, {"tap": "q", "value": ROW}], "cross.1": []},
            },
        ),
        (StepsRequest, {"steps": [{"session": "a", "query": ROW, "parameters": {"q_proj.weight": ROW}}]}),
        (GradientsRequest, {"query": ROW, "directions": {"q_proj.weight": ROW}, "tap_upstream": {"weights": ROW}}),
    ],
)
def test_tensors_below_maps_and_lists_keep_their_places(media_type, model, request_):
    request = model.model_validate(request_)
    body = b"".join(wire.to_body(request, media_type, "request", "base64"))
    assert wire.from_body(model, body, media_type, "request").model_dump_json() == request.model_dump_json()


@pytest.mark.parametrize("media_type", wire.MEDIA_TYPES)
def test_a_reply_keeps_nested_tensors_and_non_finite_numbers(media_type):
    statistics = dict.fromkeys(
        ("entropy", "max_weight", "mean_distance", "first_key", "own_position"), np.array([[np.nan, 1.0]], np.float32)
    )
    top = {"keys": np.zeros((1, 1, 1, 1), np.int64), "weights": np.ones((1, 1, 1, 1), np.float32)}
    reply = WeightsReply.model_validate({"statistics": statistics, "queries": np.array([1]), "top": top, "ran": RAN})
    body = b"".join(wire.to_body(reply, media_type, "reply", "base64"))
    back = wire.from_body(WeightsReply, body, media_type, "reply")
    np.testing.assert_array_equal(back.statistics.entropy, statistics["entropy"])
    assert back.top.keys.dtype == np.int64
    assert back.weights is None
    assert np.isnan(back.ran.queue_ms)


@pytest.mark.parametrize(
    "name",
    [
        "nowhere", "", ".", "..", "query.x", "query.0", "spec", "spec.score", "spec.score.name", "spec.softcap",
        "spec.masks", "spec.nowhere", "return", "return_", "edits", "edits.1.value", "edits.0", "edits.0.tap",
        "edits.0.nowhere", "edits.-1.value", "edits.x.value", "edits.².value", "edits.0.value.x", "edits.",
        "select.heads", "kernel", "version", "a" + ".a" * 50_000, "edits." + "9" * 5000 + ".value", "x" * 100_000,
        "__metadata__.x", "parameters", "é" * 100,
    ],
    ids=lambda name: ascii(name[:30]),
)  # fmt: skip
def test_a_tensor_in_a_place_for_none_is_refused(name):
    header = {"query": ONE, name: tensor(4)}
    refuses(file_of(header, b"\0" * 8, {"edits": [{"tap": "scores"}]}), InvalidRequest)


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("query", {"query": [1.0]}),
        ("query", {"query": None}),
        ("parameters.a.b", {"parameters": {"a.b": [1.0]}}),
        ("edits.0.value", {"edits": [{"tap": "scores", "value": [1.0]}]}),
        ("edits.0.set", {"edits": [{"tap": "scores", "set": 1.0}]}),
    ],
)
def test_a_field_given_as_a_tensor_and_in_the_metadata_is_refused(name, request_):
    header = {name: ONE} if name == "query" else {"query": tensor(4), name: ONE}
    error = refuses(file_of(header, b"\0" * (4 * len(header)), request_), InvalidTensor)
    assert error.param == name
    assert "twice" in error.detail


def test_two_spellings_of_one_place_are_a_field_given_twice():
    header = {"query": ONE, "edits.0.value": tensor(4), "edits.00.value": tensor(8)}
    assert "twice" in refuses(file_of(header, b"\0" * 12, {"edits": [{"tap": "scores"}]}), InvalidTensor).detail


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────

LENGTH_ONLY = (2**63).to_bytes(8, "little")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        LENGTH_ONLY + b"{}",
        (3).to_bytes(8, "little") + b"{}",
        (2**24 + 1).to_bytes(8, "little") + b" " * (2**24 + 1),
        file_of(b""),
        file_of(b"[]"),
        file_of(b"\xff\xfe{}"),
        file_of(b'{"query": NaN}'),
        file_of(b'{"\\ud800": {}}'),
        file_of({"query": [1]}),
        file_of({"query": ONE | {"data_offsets": None}}, b"\0" * 4),
        file_of({"query": ONE | {"data_offsets": [0, 4, 8]}}, b"\0" * 4),
        file_of({"query": ONE | {"data_offsets": [-4, 0]}}, b"\0" * 4),
        file_of({"query": ONE | {"data_offsets": [0.0, 4.0]}}, b"\0" * 4),
        file_of({"query": ONE | {"data_offsets": [False, 4]}}, b"\0" * 4),
        file_of({"query": ONE | {"data_offsets": [4, 0]}}, b"\0" * 4),
        file_of({"query": ONE | {"data_offsets": [0, 10**30]}}, b"\0" * 4),
        file_of({"query": tensor(0, count=2), "key": tensor(4)}, b"\0" * 8),
        file_of({"query": ONE, "key": tensor(8)}, b"\0" * 12),
        file_of({"query": tensor(4)}, b"\0" * 8),
        file_of({"query": ONE}, b"\0" * 5),
        file_of({"query": ONE}),
        file_of({}, b"\0"),
        file_of({"__metadata__": [], "query": ONE}, b"\0" * 4),
        file_of({"__metadata__": {"request": {}}, "query": ONE}, b"\0" * 4),
        file_of({"__metadata__": {"request": "{"}, "query": ONE}, b"\0" * 4),
        file_of({"__metadata__": {"request": "[]"}, "query": ONE}, b"\0" * 4),
        file_of({"__metadata__": {"request": '{"a": NaN}'}, "query": ONE}, b"\0" * 4),
        file_of({"q" * 10**6: ONE | {"data_offsets": None}}, b"\0" * 4),
        file_of({"q" * 10**6: ONE, "key": ONE}, b"\0" * 4),
    ],
    ids=range(30),
)
def test_a_broken_file_is_unreadable(body):
    refuses(body, Unreadable)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F8_E4M3"},
        {"dtype": ["F32"]},
        {"dtype": "F" * 10**6},
        {"shape": [2]},
        {"shape": []} | {"data_offsets": [0, 0]},
        {"shape": [2**40]},
        {"shape": [1.0]},
        {"shape": [True]},
        {"shape": [1] * 9},
        {"shape": [2**62] * 4},
        {"shape": [0, 2**62], "data_offsets": [0, 0]},
        {"dtype": "BOOL", "shape": [4]},
    ],
    ids=lambda entry: repr(entry)[:50],
)
def test_a_wrong_tensor_in_a_sound_file_is_named(entry):
    entry = ONE | entry
    data = b"\7" * entry["data_offsets"][1]
    for name in ("query", "q" * 10**6):
        error = refuses(file_of({name: entry}, data), InvalidTensor)
        assert error.param.rstrip("…") == name[:80]


def test_headers_may_be_padded_and_metadata_may_be_missing_or_say_more():
    header = json.dumps({"query": ONE}).encode() + b"   "
    assert read(file_of(header, b"\0" * 4)).query.tolist() == [0.0]
    assert read(file_of({"__metadata__": {"format": "pt"}, "query": ONE}, b"\0" * 4)).query.tolist() == [0.0]


def test_tensors_of_no_bytes_share_their_place():
    empty = {"dtype": "F32", "shape": [0, 3], "data_offsets": [4, 4]}
    header = {"value": empty | {"data_offsets": [8, 8]}, "key": empty, "query": ONE, "mask": tensor(4)}
    request = read(file_of(header, b"\0" * 8))
    assert request.key.shape == request.value.shape == (0, 3)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def address(array):
    return array.__array_interface__["data"][0]


def test_files_of_one_header_share_nothing_else():
    header = {"query": tensor(0), "edits.0.value": tensor(4)}
    requests = {"edits": [{"tap": "scores"}]}
    first, second = (read(file_of(header, np.float32([k, -k]).tobytes(), requests), ForwardRequest) for k in (1, 2))
    third = read(file_of(header, np.float32([3, -3]).tobytes(), requests), ForwardRequest)
    assert [each.query.item() for each in (first, second, third)] == [1, 2, 3]
    assert [each.edits[0].value.item() for each in (first, second, third)] == [-1, -2, -3]
    assert first.edits[0] is not second.edits[0]


def test_reading_copies_nothing_and_gives_read_only_arrays():
    request = RawForwardRequest(query=np.arange(12.0).reshape(3, 4), mask=np.ones((3, 3), bool))
    body = b"".join(wire.to_safetensors(request, "request"))
    memory = np.frombuffer(body, np.uint8)
    for form in (body, memoryview(body)):
        back = read(form)
        assert np.shares_memory(back.query, memory)
        assert np.shares_memory(back.mask, memory)
        assert not back.query.flags.writeable


def test_writing_copies_no_contiguous_tensor():
    query, mask, key = np.arange(12.0).reshape(3, 4), np.ones((3, 3), bool), np.arange(12.0).reshape(4, 3).T
    pieces = wire.to_safetensors(RawForwardRequest(query=query, mask=mask, key=key), "request")
    pieces = [np.frombuffer(piece, np.uint8) for piece in pieces[1:]]
    assert sum(np.shares_memory(piece, query) for piece in pieces) == 1
    assert sum(np.shares_memory(piece, mask) for piece in pieces) == 1
    assert not any(np.shares_memory(piece, key) for piece in pieces)


def test_every_tensor_is_aligned_to_its_element():
    request = RawForwardRequest(
        query=np.ones(3, np.float16), key=np.ones(1, np.float64), value=np.ones(3, np.float32), mask=np.ones(3, bool)
    )
    body = b"".join(wire.to_safetensors(request, "request"))
    size = int.from_bytes(body[:8], "little")
    assert (8 + size) % 8 == 0
    for name, entry in json.loads(body[8 : 8 + size]).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % {"F16": 2, "F32": 4, "F64": 8, "BOOL": 1}[entry["dtype"]] == 0


def test_a_misaligned_tensor_is_read_all_the_same():
    header = {"mask": tensor(0, "BOOL", 1, 1), "query": tensor(1)}
    query = read(file_of(header, b"\1" + np.float32(2.5).tobytes())).query
    assert query.tolist() == [2.5]
    assert query.flags.aligned


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_fields_that_are_unset_are_left_out():
    text = json.loads(wire.to_json(RawForwardRequest(query=np.ones(1))))
    assert "key" not in text
    assert "scale" not in text["spec"]["score"]
    assert text["query"] == [1.0]


def test_non_finite_numbers_outside_tensors_are_strings_too():
    assert wire.to_json({"a": [float("nan"), float("inf")], "b": -float("inf")}) == (
        b'{"a":["NaN","Infinity"],"b":"-Infinity"}'
    )


@pytest.mark.parametrize("media_type", wire.MEDIA_TYPES)
def test_what_is_remembered_beside_the_fields_of_a_model_does_not_travel(media_type):
    request = RawForwardRequest(query=np.ones((1, 1, 1), np.float32))
    request.spec.__dict__["_found"] = {"a": 1}
    body = b"".join(wire.to_body(request, media_type, "request", "base64"))
    assert b"_found" not in body
    assert wire.from_body(RawForwardRequest, body, media_type, "request").spec == request.spec
