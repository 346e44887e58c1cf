"""Names, labels and parts of recordings."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from attention_contract.descriptions import described
from attention_contract.errors import InvalidRequest, Unreadable
from attention_contract.recording_tensors import AXES, place_of, take, take_pooled, taken_numbers
from attention_contract.schemas.attention import Tap, Taps
from attention_contract.schemas.recordings import EXAMPLE_RECORDING, RecordingFile, RecordingQuery, read_facts
from attention_contract.validation import validate
from attention_contract.wire import SAFETENSORS, from_body, to_body

LETTERS = {"Lq": "queries", "Lk": "keys", "H": "heads", "Hkv": "heads", "D": "width", "Dv": "width", "d_model": "width"}


@pytest.mark.parametrize("tap", Tap.__args__)
def test_the_dimensions_of_a_tap_are_those_of_a_forward_reply(tap):
    shape = described(Taps)[tap].description.partition("``")[2].partition("``")[0]
    assert AXES[tap] == tuple(LETTERS[letter] for letter in shape.strip("[]").split(", ")[1:])


@pytest.mark.parametrize(
    ("name", "layer", "kind", "keys"),
    [
        ("layers.0.weights", "layers.0", "weights", "layers"),
        ("encoder.11.hidden", "encoder.11", "hidden", "encoder"),
        ("decoder.3.cross.masked_scores", "decoder.3.cross", "masked_scores", "encoder"),
        ("decoder.embeddings", "decoder", "embeddings", "decoder"),
    ],
)
def test_a_name_says_its_place(name, layer, kind, keys):
    place = place_of(name)
    assert (place.layer, place.kind, place.key_stack) == (layer, kind, keys)


OTHERS = ["", "weights", "layers.weights", "layers.0", "layers.-1.weights", "layers.0.weights.0", "other.0.q"]
OTHERS += ["layers.0.cross.hidden", "layers.0.nonsense", "layers.00000.q", "layers.0.weights\n", "../layers.0.weights"]


@pytest.mark.parametrize("name", [*OTHERS, "layers.0.embeddings"])
def test_other_names_have_no_place(name):
    assert place_of(name) is None


def chosen(size):
    listed = st.lists(st.integers(0, size - 1), min_size=1, max_size=6)
    bound = st.none() | st.integers(0, size + 2)
    return st.none() | listed | st.tuples(bound, bound)


def text(choice):
    if isinstance(choice, tuple):
        return ":".join("" if bound is None else str(bound) for bound in choice)
    return None if choice is None else ",".join(map(str, choice))


@given(st.data(), st.tuples(*[st.integers(1, 5)] * 3))
def test_a_part_is_what_numpy_takes(data, shape):
    array = np.arange(np.prod(shape)).reshape(shape)
    choices = [data.draw(chosen(size)) for size in shape]
    query = RecordingQuery(layer="0", **dict(zip(("heads", "queries", "keys"), map(text, choices), strict=True)))
    expected = array
    for axis, choice in enumerate(choices):
        if isinstance(choice, tuple):
            expected = expected[(slice(None),) * axis + (slice(*choice),)]
        elif choice is not None:
            expected = expected.take(choice, axis)
    indices = query.indices("layers.0.weights", shape)
    np.testing.assert_array_equal(take(array, indices), expected)
    with TemporaryDirectory() as folder:
        save_file({"weights": array}, path := Path(folder) / "one")
        with safe_open(path, framework="np") as file:  # whose slices take fewer ranges than numpy does
            part = file.get_slice("weights")
            np.testing.assert_array_equal(take(part, indices), expected)
            pool = data.draw(st.integers(2, 6))
            pooled = take_pooled(part, indices, pool)
    for head, *square in np.ndindex(pooled.shape):
        rows, columns = (slice(at * pool, (at + 1) * pool) for at in square)
        assert pooled[head, *square] == expected[head, rows, columns].max()
    heads, *sides = expected.shape
    assert pooled.shape == (heads, *(-(-side // pool) for side in sides))
    # What is held: the part twice, or the pooled part twice and one strip, which is all queries of so small a tensor.
    assert taken_numbers(indices, None) == 2 * expected.size
    assert taken_numbers(indices, pool) == 2 * pooled.size + 2 * sides[0] * sides[1]


def test_a_layer_and_a_tensor_make_a_name():
    names = [
        RecordingQuery(**given).tensor_name()
        for given in ({}, {"layer": "3"}, {"layer": "decoder.1.cross", "tensor": "q"}, {"tensor": "layers.embeddings"})
    ]
    assert names == [None, "layers.3.weights", "decoder.1.cross.q", "layers.embeddings"]


def test_an_index_that_is_not_there_is_named():
    with pytest.raises(InvalidRequest, match="expected 0 to 1") as caught:
        RecordingQuery(layer="0", heads="0,2").indices("layers.0.weights", (2, 3, 3))
    assert (caught.value.param, caught.value.facts) == ("heads", {"size": 2, "actual": 2})


def test_only_weights_and_scores_are_pooled():
    with pytest.raises(InvalidRequest, match="dimensions heads, queries, width") as caught:
        RecordingQuery(layer="0", tensor="q", pool=2).indices("layers.0.q", (2, 3, 4))
    assert caught.value.param == "pool"


def test_strips_of_a_long_tensor_are_pooled_like_the_whole(monkeypatch):
    monkeypatch.setattr("attention_contract.recording_tensors._STRIP", 64)
    array = np.random.default_rng(0).random((2, 21, 10), np.float32)
    found = take_pooled(array, ([1, 0], slice(0, 21), slice(0, 10)), 3)
    padded = np.pad(array[::-1], ((0, 0), (0, 0), (0, 2)))
    np.testing.assert_array_equal(found, padded.reshape(2, 7, 3, 4, 3).max((2, 4)))


def test_numbers_without_a_dtype_become_float32_and_others_stay():
    recording = validate(RecordingFile, EXAMPLE_RECORDING)
    assert recording.layers["0.weights"].dtype == np.float32
    doubles = EXAMPLE_RECORDING | {"layers": {"0.weights": np.eye(2)[None]}}
    assert validate(RecordingFile, doubles).layers["0.weights"].dtype == np.float64


def test_key_value_heads_divide_the_heads():
    heads = [{"name": "layers.0", "heads": list("abcd")}]
    for many, fits in ((4, True), (2, True), (1, True), (3, False), (8, False)):
        facts = EXAMPLE_RECORDING | {"attentions": heads, "layers": {"0.k": np.zeros((many, 2, 3), np.float32)}}
        if fits:
            validate(RecordingFile, facts)
        else:
            with pytest.raises(InvalidRequest, match=r"layers\.0\.k"):
                validate(RecordingFile, facts)


def test_the_file_has_an_entry_of_its_own_and_needs_no_other():
    recording = validate(RecordingFile, EXAMPLE_RECORDING)
    body = b"".join(to_body(recording, SAFETENSORS, "request"))
    assert b'"recording":' in body
    assert b'"request":' not in body
    again = from_body(RecordingFile, body, SAFETENSORS, "reply")
    assert again.model_dump(exclude={"layers"}) == recording.model_dump(exclude={"layers"})
    np.testing.assert_array_equal(again.layers["0.weights"], recording.layers["0.weights"])


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"format": 2}'])
def test_facts_that_cannot_be_read_are_refused(text):
    with pytest.raises(Unreadable, match="recording"):
        read_facts(text, [])
