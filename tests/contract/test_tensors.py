"""Every dtype survives every form of a tensor, and what is no tensor is refused in few words."""

import base64
import json
import re
import reprlib
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from attention_contract import wire
from attention_contract.base import WireModel
from attention_contract.errors import InvalidTensor, Unreadable
from attention_contract.tensors import (
    DTYPES,
    FLOATS,
    INTS,
    BoolArray,
    FloatArray,
    IntArray,
    MaskArray,
    TensorFault,
    Untyped,
    cast,
    decode,
    dtype_name,
    encode,
    from_buffer,
)
from attention_contract.validation import validate

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MEGABYTE = 10**6
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# ±0, the least and the greatest subnormal, one, the greatest finite, ±infinity and NaN with a payload, as bits
SPECIAL = {
    "float16": [0, 0x8000, 1, 0x03FF, 0x3C00, 0x7BFF, 0x7C00, 0xFC00, 0x7E01],
    "bfloat16": [0, 0x8000, 1, 0x007F, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC1],
    "float32": [0, 1 << 31, 1, 0x007FFFFF, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001],
    "float64": [0, 1 << 63, 1, 2**52 - 1, 0x3FF << 52, (0x7FF << 52) - 1, 0x7FF << 52, 0xFFF << 52, (0xFFF8 << 48) + 1],
}


class Holder(WireModel):
    """One field of each kind."""

    floats: FloatArray | None = None
    ints: IntArray | None = None
    bools: BoolArray | None = None
    mask: MaskArray | None = None


def label(value):
    """A short name for a parameter, however large or long to write it is."""
    return reprlib.repr(value)[:60]


def field_of(array):
    kind = {"b": "bools", "i": "ints"}.get(array.dtype.kind, "floats")
    return kind, Holder(**{kind: array})


def received(body, media_type, kind):
    return getattr(wire.from_body(Holder, body, media_type, "request"), kind)


@st.composite
def tensors(draw, names=tuple(DTYPES)):
    name = draw(st.sampled_from(names))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=8, min_side=0, max_side=2) | hnp.array_shapes(max_dims=3))
    dtype = DTYPES[name]
    if name == "bool":
        return draw(hnp.arrays(np.bool_, shape))
    bits = BITS[dtype.itemsize]
    elements = st.integers(0, int(np.iinfo(bits).max))
    if name in SPECIAL:
        elements = st.sampled_from(SPECIAL[name]) | elements
    return draw(hnp.arrays(bits, shape, elements=elements)).view(dtype)


def same_bits(left, right):
    return dtype_name(left) == dtype_name(right) and left.shape == right.shape and left.tobytes() == right.tobytes()


def same_numbers(left, right):
    """The same numbers, zeros by their sign too; one NaN is as good as another."""
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    if left.dtype in {np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)}:
        left, right = left.astype(np.float32), right.astype(np.float32)
    np.testing.assert_array_equal(left, right)
    if left.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(left[~np.isnan(left)]), np.signbit(right[~np.isnan(right)]))


# ── round trips ──────────────────────────────────────────────────────────────────────────────────────────────────────


@quick
@given(tensors())
def test_safetensors_and_base64_keep_every_bit(array):
    kind, model = field_of(array)
    assert same_bits(received(b"".join(wire.to_safetensors(model, "request")), wire.SAFETENSORS, kind), array)
    assert same_bits(received(wire.to_json(model, "base64"), wire.JSON, kind), array)


@quick
@given(tensors())
def test_nested_lists_keep_every_number(array):
    kind, model = field_of(array)
    found = received(wire.to_json(model), wire.JSON, kind)
    assert isinstance(found, Untyped)
    if array.size:
        assert found.shape == array.shape
    back = cast(np.asarray(found), dtype_name(array)).reshape(array.shape)
    same_numbers(back, array)


@quick
@given(tensors(tuple(set(DTYPES) - {"bfloat16"})))
def test_the_safetensors_library_reads_what_we_write_and_we_read_what_it_writes(array):
    kind, model = field_of(array)
    loaded = safetensors.numpy.load(b"".join(wire.to_safetensors(model, "request")))
    assert same_bits(loaded[kind], array)
    assert same_bits(received(safetensors.numpy.save({kind: array}), wire.SAFETENSORS, kind), array)


@pytest.mark.parametrize("form", ["list", "base64", "safetensors"])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.arange(6, dtype=">f2").reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.arange(24, dtype=np.float64).reshape(4, 6)[::-2, ::3],
        np.broadcast_to(np.float32(2.5), (3, 2)),
        np.arange(8, dtype=np.float32).view(ml_dtypes.bfloat16)[1::2],
        np.array([[1, 2]], dtype=">i8"),
        np.array([[np.inf, 1.0]], dtype=">f8").T,
    ],
    ids=["big_f4", "big_f2", "transposed", "strided", "broadcast", "bf16_strided", "big_i8", "big_inf"],
)
def test_the_layout_in_memory_does_not_show_on_the_wire(array, form):
    kind, model = field_of(array)
    body = b"".join(wire.to_body(model, wire.SAFETENSORS if form == "safetensors" else wire.JSON, "request", form))
    found = received(body, wire.SAFETENSORS if form == "safetensors" else wire.JSON, kind)
    np.testing.assert_array_equal(found.astype(np.float64), array.astype(np.float64))
    assert found.dtype.isnative


# ── numbers that state no dtype ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("encoding", ["list", "base64"])
@pytest.mark.parametrize("media_type", wire.MEDIA_TYPES)
@pytest.mark.parametrize(
    "value",
    [{"floats": [[1, 2]]}, {"floats": [0.5]}, {"ints": [3, 4]}, {"bools": [1, 0]}, {"mask": [[0, -4]]}],
    ids=str,
)
def test_numbers_without_a_dtype_stay_so_in_every_form(value, media_type, encoding):
    model = validate(Holder, value)
    (kind,) = value
    found = received(b"".join(wire.to_body(model, media_type, "request", encoding)), media_type, kind)
    assert isinstance(found, Untyped)
    np.testing.assert_array_equal(found, getattr(model, kind))


@pytest.mark.parametrize("kind", Holder.model_fields)
@pytest.mark.parametrize("empty", [[], [[]], [[], []]], ids=str)
def test_an_empty_list_is_a_tensor_of_any_kind(kind, empty):
    array = getattr(validate(Holder, {kind: empty}), kind)
    assert array.shape == np.array(empty).shape
    assert array.dtype.kind in {"floats": "f", "ints": "i", "bools": "b", "mask": "f"}[kind]


def test_numbers_are_bool_int64_or_float64_until_their_surroundings_say_more():
    assert [decode(value).dtype.name for value in ([True], [1, 2], [1, 2.5], ["NaN", 1], 3, True)] == [
        "bool", "int64", "float64", "float64", "int64", "bool",
    ]  # fmt: skip


# ── kinds ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", Holder.model_fields)
def test_a_field_takes_the_dtypes_of_its_kind_only(kind, name):
    accepts = {"floats": FLOATS, "ints": INTS, "bools": {"bool", *INTS}, "mask": {"bool", *FLOATS}}[kind]
    value = {"dtype": name, "shape": [2], "data": [True, False] if name == "bool" else [1, 0]}
    if name in accepts:
        found = getattr(validate(Holder, {kind: value}), kind)
        assert dtype_name(found) == ("bool" if kind == "bools" else name)
    else:
        refuses(kind, value)


@pytest.mark.parametrize("ambiguous", [[[0, 1]], [[0]], [1, 1], 1], ids=str)
def test_a_mask_of_zeros_and_ones_could_mean_either_and_is_refused(ambiguous):
    assert "true lets a query look" in refuses("mask", ambiguous)


def test_a_mask_is_boolean_or_added():
    assert validate(Holder, {"mask": [[True, False]]}).mask.dtype == np.bool_
    assert validate(Holder, {"mask": [[0.0, 1.0]]}).mask.dtype == np.float64
    assert validate(Holder, {"mask": [[0, "-Infinity"]]}).mask.tolist() == [[0.0, -np.inf]]
    assert validate(Holder, {"mask": [[0, -10000]]}).mask.dtype == np.float64


def test_a_bool_field_takes_integers_0_and_1():
    assert validate(Holder, {"bools": [[0, 1]]}).bools.tolist() == [[False, True]]
    refuses("bools", [[0, 2]])
    refuses("bools", [[0.0, 1.0]])


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def refuses(kind, value):
    with pytest.raises(InvalidTensor) as caught:
        validate(Holder, {kind: value})
    assert caught.value.param == kind
    assert len(caught.value.detail) < 400
    assert caught.value.detail.startswith(f"{kind}: ")
    return caught.value.detail


def deep(depth, leaf=1.0):
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def f32(**fields):
    return {"dtype": "float32", "shape": [2], "data": [1.0, 2.0]} | fields


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([[1.0], [1.0, 2.0]], "ragged"),
        ([[1.0], 2.0], "ragged"),
        ([[], [[]]], "ragged"),
        ([[1.0], None], "ragged"),
        (deep(9), "more than 8"),
        ([None, 1.0], "null"),
        ([1.0, {}], "dict"),
        ([True, 1.0], "bool"),
        (["nan"], "'nan'"),
        ([b"1"], "bytes"),
        ("hello", "'hello'"),
        ({}, "dtype"),
        ([2**63, 1], "64 bits"),
        ([10**400, 1.0], "64 bits"),
        (np.zeros(2, np.complex64), "complex64"),
        (np.array(["a"]), "cannot be sent"),
        (np.zeros(2, np.uint8), "uint8"),
        (f32(data=[1.0]), "takes 2 numbers, got 1"),
        (f32(data=[[1.0], [2.0]]), "nested"),
        (f32(data="NaN"), "flat list"),
        (f32(data=[1.0, None]), "null"),
        (f32(data=[True, False]), "true and false"),
        (f32(data=[1.0, 1e39]), "too large for float32"),
        (f32(dtype="bfloat16", data=[1.0, 3.4e38]), "too large for bfloat16"),
        (f32(dtype="int32", data=[1, 2**31]), "int32"),
        (f32(dtype="int64", data=[1, 2**63]), "64 bits"),
        (f32(dtype="int64", data=[1, 1.5]), "int64"),
        (f32(dtype="bool", data=[0, 1]), "bool"),
        (f32(dtype="float8"), "'float8'"),
        (f32(dtype=["float32"]), "unknown dtype"),
        (f32(shape=[-1, -2]), "non-negative"),
        (f32(shape=[2.0]), "non-negative"),
        (f32(shape=[True, 2]), "non-negative"),
        (f32(shape=2), "non-negative"),
        (f32(shape=[1] * 9), "9 dimensions"),
        (f32(shape=[2**40]), "takes 1099511627776 numbers"),
        (f32(shape=[2**32, 2**32]), "overflows"),
        (f32(shape=[0, 2**62], data=[]), "overflows"),
        (f32(shape=[10**4000]), "overflows"),
        (f32(base64=""), "one of"),
        ({"dtype": "float32", "shape": [1]}, "one of"),
        ({"shape": [1], "data": [1.0]}, "expected an object"),
    ],
    ids=label,
)
def test_what_is_no_tensor_is_refused(value, says):
    assert says in refuses("floats", value)


def test_depth_is_refused_without_recursion():
    assert "more than 8" in refuses("floats", deep(100_000))
    body = b'{"floats":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(Unreadable):
        wire.from_body(Holder, body, wire.JSON, "request")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("AACAPw==", "12 characters.*got 8"),
        ("AACAPwAAAEAAAA==", "12 characters.*got 16"),
        ("AACAPwAAA!A=", "alphabet"),
        ("AACAPwAA\nEA=", "alphabet"),
        ("AAAA====AAA=", "base64|takes 8 bytes"),
        ("", "takes 8 bytes"),
        (["AACAPwAAAEA="], "not a string"),
        (None, "not a string"),
    ],
)
def test_base64_of_the_wrong_length_or_alphabet_is_refused(text, says):
    value = {"dtype": "float32", "shape": [2], "base64": text}
    assert re.search(says, refuses("floats", value))


def test_a_bool_tensor_holds_bytes_0_and_1_only():
    text = base64.b64encode(bytes([0, 1, 2])).decode()
    assert "other than 0 and 1" in refuses("bools", {"dtype": "bool", "shape": [3], "base64": text})


def test_non_finite_numbers_are_strings_and_never_literals():
    values = wire.from_body(Holder, b'{"floats": ["NaN", "Infinity", "-Infinity", 1]}', wire.JSON, "request").floats
    np.testing.assert_array_equal(values, [np.nan, np.inf, -np.inf, 1.0])
    for literal in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        with pytest.raises((Unreadable, InvalidTensor)):
            wire.from_body(Holder, b'{"floats": [' + literal + b"]}", wire.JSON, "request")


HUGE = 2**40
HEADER = json.dumps({"floats": {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]}}).encode()


@pytest.mark.parametrize(
    ("media_type", "body"),
    [
        (wire.JSON, b'{"floats": {"dtype": "float32", "shape": [1099511627776], "data": [1.0]}}'),
        (wire.JSON, b'{"floats": {"dtype": "float32", "shape": [1099511627776], "base64": "AACAPw=="}}'),
        (wire.SAFETENSORS, len(HEADER).to_bytes(8, "little") + HEADER + b"\0" * 64),
    ],
    ids=["data", "base64", "safetensors"],
)
def test_nothing_of_a_declared_size_is_allocated(media_type, body):
    tracemalloc.start()
    try:
        with pytest.raises((InvalidTensor, Unreadable)):
            wire.from_body(Holder, body, media_type, "request")
        assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    finally:
        tracemalloc.stop()


def test_a_buffer_is_viewed_not_copied_unless_it_lies_unaligned():
    memory = np.arange(5, dtype=np.float64)
    view = memoryview(memory).cast("B")
    assert np.shares_memory(from_buffer(view[8:24], DTYPES["float64"], (2,)), memory)
    unaligned = from_buffer(view[4:20], DTYPES["float64"], (2,))
    assert unaligned.flags.aligned
    assert unaligned.tobytes() == view[4:20].tobytes()


def test_what_the_wire_does_not_carry_cannot_be_encoded():
    with pytest.raises(TensorFault, match="complex64"):
        encode(np.zeros(1, np.complex64), "list")
