"""JSON whose lists simdjson reads gives what orjson gives, for texts of every kind; large texts are bounded."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_contract import json_reading
from attention_contract.errors import AttentionError, BodyTooLarge, InvalidRequest, Unreadable
from attention_contract.json_reading import (
    MAX_DEPTH,
    MAX_OBJECTS,
    check_text,
    measure_text,
    read_json,
)
from attention_contract.schemas.analyses.hopfield import HopfieldRequest
from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.tensors import Untyped
from attention_contract.validation import validate
from attention_contract.wire import JSON, from_body, from_json

pytest.importorskip("simdjson")

numbers = st.one_of(
    st.integers(-(2**66), 2**66), st.integers(-9, 9), st.floats(allow_nan=False, allow_infinity=False), st.just(-0.0)
)
odd = st.one_of(st.booleans(), st.none(), st.sampled_from(["NaN", "-Infinity", "x", "[", "\\", '"']))
nested = st.recursive(st.one_of(numbers, odd), lambda inner: st.lists(inner, max_size=3), max_leaves=12)


@st.composite
def regular(draw):
    """Nested lists of one shape, now and then with something amiss in one place."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    leaf = draw(st.sampled_from([numbers, st.integers(-9, 9), st.floats(-9, 9)]))

    def fill(sizes):
        if not sizes:
            return draw(leaf)
        return [fill(sizes[1:]) for _ in range(sizes[0])]

    value = fill(shape)
    if draw(st.booleans()):
        row = value
        while isinstance(row[-1], list):
            row = row[-1]
        row[-1] = draw(st.one_of(odd, numbers.map(lambda x: [x]), st.just([])))
    return value


tensors = st.one_of(regular(), nested)


def read_by_orjson(text):
    return validate(ForwardRequest, from_json(text), by_name=False)


def outcome(read, text):
    try:
        request = read(text)
    except AttentionError as fault:
        return type(fault), fault.to_problem()
    return request.model_dump(exclude={"query", "key", "mask"}), *(
        None if x is None else (x.dtype, x.shape, type(x), x.tobytes())
        for x in (request.query, request.key, request.mask)
    )


@settings(max_examples=200, deadline=None)
@given(query=tensors, key=tensors, mask=tensors, heads=nested, indent=st.sampled_from([None, 1]))
def test_both_readers_agree(query, key, mask, heads, indent):
    body = {"query": query, "key": key, "mask": mask, "select": {"heads": heads}, "return": ["output"]}
    for named in (body, {"query": query}, {"query": query, "mask": mask}):
        text = json.dumps(named, indent=indent).encode()
        assert outcome(lambda t: from_body(ForwardRequest, t, JSON, "request"), text) == outcome(read_by_orjson, text)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[1]", b"1", b'\xef\xbb\xbf{"query": [1.0]}', b'{"query": [1.0]} x', b'{"query": [NaN]}',
        b'{"query": [1e999]}', b'{"query": [01]}', b'{"query": [1.]}', b'{"query": [+1]}', b'{"query": [-]}',
        b'{"query": [1.0], "query": [2.0]}', b'{"query": [1.0], "select": {"heads": [0], "heads": [1]}}',
        b'{"query": [123456789012345678901234567890]}', b'{"query": [18446744073709551615, 1]}',
        b'{"query": [-0, 1]}', b'{"query": [-0.0, 1e-320]}', b'{"query": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"query": [[1, 2], [3, [4]]]}', b'{"query": [[1, 2], [[3], 4]], "version": "\\u005b["}',
        b'{"query": [[1, 2], [3, [4]]], "version": "["}', b'{"query": [1.0], "version": "\xff"}',
        b'{"\\u0071uery": [1.0]}', b'{"query": {"dtype": "float32", "shape": [2], "data": [1, 2]}}',
        b'{"query": [1.0], "query\\u0000": [2.0]}',
    ],
)  # fmt: skip
def test_both_readers_agree_on_odd_texts(text):
    assert outcome(lambda t: from_body(ForwardRequest, t, JSON, "request"), text) == outcome(read_by_orjson, text)


def test_numbers_of_tensors_become_arrays_without_lists():
    data = read_json(
        b'{"query": [[1, 2.5]], "key": [[1, 2]], "return": ["output"], "wrt": ["query"]}', RawGradientsRequest
    )
    assert [(type(data[name]), data[name].dtype) for name in ("query", "key")] == [
        (Untyped, np.float64),
        (Untyped, np.int64),
    ]
    assert data["return"] == ["output"]
    assert isinstance(read_json(b'{"states": [[0.5]], "stored": [[0.5]]}', HopfieldRequest)["stored"], Untyped)


@pytest.mark.parametrize("item", ["0", '"["', "[]", '{"a": [[0]]}'])
def test_a_list_that_is_no_tensor_has_an_end(item):
    few, many = (f'{{"query": [[1.0]], "edits": [{", ".join([item] * count)}]}}'.encode() for count in (9, 65_537))
    assert read_json(few, ForwardRequest)["edits"] == json.loads(few)["edits"]
    with pytest.raises(InvalidRequest) as refusal:
        read_json(many, ForwardRequest)
    assert refusal.value.param == "edits"


@pytest.mark.parametrize("more", ["", '"version": "[["', r'"version": "\n"', '"edits": [3, [4]]'])
def test_a_large_text_is_looked_through_to_its_end(more):
    text = b" " * 2**20 + b'{"query": [[1.0, 2.5]],' + b" " * 2**21 + (more or '"version": "v"').encode() + b"}"
    data = read_json(memoryview(text), ForwardRequest)
    assert np.array_equal(data["query"], [[1.0, 2.5]])
    assert {name: data[name] for name in data if name != "query"} == {
        name: value for name, value in json.loads(text).items() if name != "query"
    }


def test_among_very_many_names_an_unknown_one_is_reported():
    names = ", ".join(f'"f{index}": 0' for index in range(100))
    with pytest.raises(InvalidRequest) as refusal:
        read_json(f'{{"query": [[1.0]], {names}}}'.encode(), ForwardRequest)
    assert refusal.value.param == "f0"
    again = ", ".join(['"average_heads": true'] * 100)
    assert read_json(f'{{"query": [[1.0]], {again}}}'.encode(), ForwardRequest)["average_heads"] is True


def test_the_tensors_of_a_map_become_arrays():
    data = read_json(b'{"parameters": {"score.weight": [[1, 2.5]], "odd": [[1], 2]}}', RawGradientsRequest)
    assert isinstance(data["parameters"]["score.weight"], Untyped)
    assert data["parameters"]["odd"] == [[1], 2]


def test_a_name_with_a_zero_character_has_its_own_tensor():
    data = read_json(b'{"parameters": {"a": [[1.0]], "a\\u0000b": [[2.0]]}}', RawGradientsRequest)
    assert data["parameters"] == {"a": [[1.0]], "a\0b": [[2.0]]}


@pytest.mark.parametrize(
    ("text", "advises"),
    [
        (b'{"query": [NaN]}', True), (b'{"query": [-Infinity]}', True), (b'{"query": [Infinity]}', True),
        (b'{"query": [1,]}', False), (b'{"query": "NaN", 3}', False), (b'{"query": [nan]}', False), (b"{", False),
    ],
)  # fmt: skip
def test_advice_about_nan_is_given_for_nan_only(text, advises):
    with pytest.raises(Unreadable) as refusal:
        from_body(ForwardRequest, text, JSON, "request")
    assert ("as strings" in refusal.value.detail) is advises


def test_the_sizes_of_a_text_are_upper_bounds():
    size = measure_text(b'{"a": [[1, 2], [3, "x,"]], "b": {}}')
    assert size.characters == 35
    assert size.items >= 7
    assert size.lists == 5
    assert size.quotes >= 6
    assert size.parsed_bytes > 35


@pytest.mark.parametrize("item", [b"[]", b"{}", b"1", b'""'])
def test_a_text_of_very_many_values_is_refused_before_it_is_parsed(item, monkeypatch):
    most = 2000 if item in {b"1", b'""'} else 500
    monkeypatch.setattr(json_reading, "MAX_ITEMS", 2000)
    monkeypatch.setattr(json_reading, "MAX_LISTS", 500)
    text = b'{"query": [' + b",".join([item] * (most + 1)) + b"]}"
    with pytest.raises(BodyTooLarge, match=str(most)):
        check_text(measure_text(text))


@pytest.mark.slow
def test_very_many_values_that_are_no_numbers_are_refused():
    text = b'{"query": [[1.0]], "mask": [' + b",".join([b"true"] * (MAX_OBJECTS + 1)) + b"]}"
    with pytest.raises(BodyTooLarge, match="base64"):
        read_json(text, ForwardRequest, measure_text(text))


@pytest.mark.parametrize("field", ["query", "spec", "unknown"])
@pytest.mark.parametrize("name", ["", '"unknown":1,"unknown":2,'], ids=["simdjson", "orjson"])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_lists_and_objects_nest_as_deep_as_the_limit(field, name, opening, closing):
    def text(depth):
        return f'{{{name}"{field}":{opening * (depth - 1)}1{closing * (depth - 1)}}}'.encode()

    assert read_json(text(MAX_DEPTH), ForwardRequest)[field] is not None
    for depth in (MAX_DEPTH + 1, 1_000, 1_024, 1_025, 100_000):
        with pytest.raises(Unreadable, match="the body nests lists and objects more than 256 levels deep") as refusal:
            read_json(text(depth), ForwardRequest)
        assert refusal.value.facts == {"limit": MAX_DEPTH}
