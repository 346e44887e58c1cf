"""What is taken out of a JSON text, put in again, is what orjson reads in it."""

import json
import time

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from attention_contract import lists
from attention_contract.lists import layout


@pytest.fixture(autouse=True, scope="module")
def loaded():
    lists.load()


def joined(divided):
    """The object, its lists back in their places; and which of its members were taken out."""
    data = orjson.loads(divided.rest)
    taken = {name for name, value in data.items() if isinstance(value, list) and [type(x) for x in value] == [int]}
    return data | {name: divided.arrays[data[name][0]].tolist() for name in taken}, taken


def equal(one, other):
    """Equal to the bit, and to the type but for integers among other numbers."""
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)) and not isinstance(other, bool):
        return np.float64(one).tobytes() == np.float64(other).tobytes()
    return type(one) is type(other) and one == other


leaves = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False), st.floats(-9, 9), st.integers(-9, 9),
    st.integers(-(2**70), 2**70), st.sampled_from([None, True, "text", "[1]", '"\\', "}"]),
)  # fmt: skip
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner), max_leaves=20
)
regular = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40)).map(
    lambda shape: np.random.default_rng(shape).standard_normal(shape).tolist()
)


@settings(max_examples=1000, deadline=None)
@given(st.dictionaries(st.text(max_size=6), values | regular, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_nothing_is_lost(data, indent, plain):
    text = json.dumps(data, indent=indent, ensure_ascii=plain).encode()
    divided = lists.divide(text)
    if divided is not None:
        found, _ = joined(divided)
        expected = orjson.loads(text)
        assert found.keys() == expected.keys()
        assert all(equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("shape", [(1,), (3, 2), (2, 1, 4), (1, 2, 1, 2, 1, 2, 1, 2), (5000,), (70, 3, 40)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("indent", [None, 2])
def test_regular_lists_are_taken_out(rng, shape, dtype, indent):
    array = (rng.standard_normal(shape) * 1000).astype(dtype)
    text = json.dumps({"before": 1, "x": array.tolist(), "y": "z"}, indent=indent).encode()
    for form in (text, bytearray(text), memoryview(text)):
        divided = lists.divide(form)
        (found,) = divided.arrays
        assert found.dtype == (np.int64 if dtype == np.int64 else np.float64)
        np.testing.assert_array_equal(found, array)
        assert orjson.loads(divided.rest) == {"before": 1, "x": [0], "y": "z"}


@pytest.mark.parametrize("shift", range(70))
def test_numbers_may_lie_anywhere(rng, shift):
    # Commas at the ends of blocks and of windows, and a text that ends right behind.
    array = np.round(rng.standard_normal(6000), rng.integers(1, 17))
    text = b" " * shift + b'{"x":' + orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY) + b"}"
    np.testing.assert_array_equal(lists.divide(text).arrays[0], array)
    assert lists.divide(text[:-2]).arrays == []


@pytest.mark.parametrize(
    "value",
    [
        "[]", "[[]]", "[[1],[]]", "[1,[2]]", "[[1],2]", "[[1,2],[3]]", "[[[1]],[[2],[3]]]", "[1,null]", "[1,]", "[,1]",
        "[1 2]", "[1,,2]", "[[1],,[2]]", "[[1][2]]", "[[1],[2]", "[1]]", "[1.]", "[01]", "[-]", "[true]", '["1"]',
        "[" * 9 + "1" + "]" * 9, "[1}", "[{}]", "[1,{}]", "[[1],{}]",
    ],
)  # fmt: skip
def test_other_lists_stay_where_they_are(value):
    text = f'{{"a": {value}, "b": [1.5, 2]}}'.encode()
    divided = lists.divide(text)
    try:
        expected = orjson.loads(text)
    except orjson.JSONDecodeError:
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(divided.rest)
    else:
        assert value.encode() in divided.rest
        assert joined(divided)[0] == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {"b": [1]}}', '{"a": [[1], "x", [2]]}', '{"[1": "[2]", "\\"": "[3]\\\\"}', '{"a": "\\\\"}',
        '{"a": [{"b": [1, 2]}]}',
    ],
)  # fmt: skip
def test_only_members_of_the_object_itself_are_taken_out(text):
    divided = lists.divide(text.encode())
    assert divided.arrays == []
    assert divided.rest == text.encode()


def test_names_that_come_twice_and_many_lists():
    assert joined(lists.divide(b'{"a": [1.5], "a": [2.5, 3.5]}'))[0] == {"a": [2.5, 3.5]}
    few, many = ({f"f{index}": [index] for index in range(count)} for count in (layout.MOST, layout.MOST + 1))
    assert joined(lists.divide(orjson.dumps(few)))[0] == few
    assert lists.divide(orjson.dumps(many)) is None


def test_numbers_that_are_left_to_python(rng):
    odd = ["1e-320", "0.1234567890123456789012345", "-4.9e-324", "123456789012345678901.5"]
    assert lists.divide(f'{{"a": [{", ".join(odd)}]}}'.encode()).arrays[0].tolist() == [float(text) for text in odd]
    many = ", ".join(odd * layout.MOST)
    assert lists.divide(f'{{"a": [{many}]}}'.encode()) is None


@pytest.mark.parametrize("number", ["1e400", "-1e999", "9007199254740993", "1" * 25, "18446744073709551615"])
def test_numbers_that_others_must_tell_of(number):
    assert lists.divide(f'{{"a": [1, {number}]}}'.encode()) is None


def test_a_failed_list_leaves_no_numbers_behind():
    divided = lists.divide(b'{"a": [1.5, 2.5, null], "b": [3.5]}')
    assert [array.tolist() for array in divided.arrays] == [[3.5]]


def test_without_compiled_code_nothing_is_taken_out_or_written(monkeypatch):
    monkeypatch.setattr(lists._Code, "linked", None)
    assert lists.divide(b'{"a": [1.5]}') is None
    assert lists.write(np.ones(1, np.float32)) is None


def test_a_list_that_ends_in_something_else_leaves_nothing_to_python():
    for other in (b"[1e-310, null]", b"[[1e-310], null]", b"[[1e-310], 1.5]"):
        divided = lists.divide(b'{"a": ' + other + b', "b": [0.5]}')
        assert divided.arrays[0].tolist() == [0.5]


@pytest.mark.parametrize(
    "text", [b"", b"{", b'"', b'{"a": "', b'{"a": [', b'{"a": [1', b'{"a": [1,', b'{"a": "\\', b"[["]
)
def test_texts_that_end_too_early(text):
    divided = lists.divide(text)
    assert divided is None or (divided.rest, divided.arrays) == (text, [])


@pytest.mark.parametrize("piece", [b"[}", b"[1}", b"[],", b'"k":[],', b"[1,{", b"[[", b'["', b"[1e,", b"[-"])
def test_lists_that_are_none_take_no_time_to_speak_of(piece):
    text = b"{" + piece * (2**20 // len(piece))
    started = time.perf_counter()
    divided = lists.divide(text)
    assert time.perf_counter() - started < 1  # it would be minutes, were each read to the end of the text
    assert divided is None or divided.arrays == []


digits = st.text("0123456789", min_size=1, max_size=26)
zeros = st.integers(1, 26).map(lambda count: "0" * count)
halfway = st.sampled_from(["8446744073709551615", "8446744073709551616", "8439999999999999999", "844" + "0" * 16])
decimal = st.tuples(
    st.sampled_from(["", " ", "-", " -"]), st.sampled_from("0123456789"), digits | zeros | halfway | st.just("0" * 24)
)


@settings(max_examples=500, deadline=None)
@given(st.lists(decimal, min_size=1, max_size=40))
def test_decimals_of_any_length_are_read_as_python_reads_them(numbers):
    texts = [f"{before}{first}.{others}" for before, first, others in numbers]
    divided = lists.divide(('{"a": "' + "-" * 32 + '", "b": [' + ",".join(texts) + "]}").encode())
    if divided is not None:  # of too many that are left to Python nothing is told
        assert divided.arrays[0].tobytes() == np.array([float(text) for text in texts]).tobytes()
    assert divided is not None or len(numbers) > 30
