"""Similarity over HTTP: recordings and tensors of a request against formulas in numpy, and what is refused."""

import numpy as np
import pytest

from attention_client import InvalidRequest, InvalidTensor, RecordingNotFound, ShapeMismatch
from attention_contract.errors import AttentionError
from tests.api.talk import post, refuse
from tests.core.inspection.test_similarity_measures import cka, divergence

TOKENS = 6


def stored(client, seed, text="a b c d e f", **more):
    """The arrays and the id of a recording with two layers of two heads."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for layer in (0, 1):
        arrays[f"layers.{layer}.weights"] = rng.dirichlet(np.ones(TOKENS), (2, TOKENS)).astype(np.float32)
        arrays[f"layers.{layer}.context"] = rng.normal(size=(2, TOKENS, 3)).astype(np.float16)
        arrays[f"layers.{layer}.k"] = rng.normal(size=(1, TOKENS, 4)).astype(np.float32)
        arrays[f"layers.{layer}.hidden"] = rng.normal(size=(TOKENS, 5 + layer))
    arrays |= more
    recording = {
        "model": f"similarity {seed}", "text": text, "created": "2026-01-02T03:04:05Z",
        "tokens": {"layers": text.split()},
        "attentions": [{"name": f"layers.{layer}", "heads": [f"L{layer}H0", f"L{layer}H1"]} for layer in (0, 1)],
        "layers": {name.removeprefix("layers."): array for name, array in arrays.items()},
    }  # fmt: skip
    made = client.recordings.create(recording)
    return {name: array.astype(float) for name, array in arrays.items()}, made.id


def of(arrays, kind):
    """Every head or layer of one kind, in order."""
    found = [arrays[f"layers.{layer}.{kind}"] for layer in (0, 1)]
    return found if kind == "hidden" else [head for array in found for head in array]


def pairs(measure, a, b):
    return [[measure(x, y) for y in b] for x in a]


def test_every_pair_of_recorded_heads_has_its_divergence(client):
    arrays, id_ = stored(client, 1)
    reply = client.recordings.similarity(id_)
    heads = of(arrays, "weights")
    np.testing.assert_allclose(reply.values, pairs(divergence, heads, heads), rtol=1e-9, atol=1e-15)
    assert (reply.measure, reply.id, reply.with_, reply.tokens) == ("jensen_shannon", id_, id_, TOKENS)
    assert [(part.layer, part.head) for part in reply.rows] == [
        (f"layers.{i}", f"L{i}H{h}") for i in (0, 1) for h in (0, 1)
    ]
    assert reply.columns == reply.rows
    assert (reply.ran.kernel, reply.ran.dtype) == ("tiles", "float64")
    assert min(reply.ran.flops, reply.ran.predicted_ms, reply.ran.peak_bytes) > 0


@pytest.mark.parametrize("tensor", ["weights", "context", "k", "hidden"])
def test_two_recordings_of_the_same_tokens_are_compared(client, tensor):
    (mine, first), (others, second) = stored(client, 1), stored(client, 2)
    reply = client.recordings.similarity(first, tensor=tensor, with_=second)
    measure = divergence if tensor == "weights" else cka
    np.testing.assert_allclose(reply.values, pairs(measure, of(mine, tensor), of(others, tensor)), rtol=1e-6)
    labels = {"weights": ["L0H0", "L0H1"], "context": ["L0H0", "L0H1"], "k": ["0"], "hidden": [None]}[tensor]
    assert [part.head for part in reply.columns if part.layer == "layers.0"] == labels
    assert (reply.id, reply.with_) == (first, second)


def test_layers_are_chosen_on_both_sides(client):
    (mine, first), (others, second) = stored(client, 1), stored(client, 2)
    reply = client.recordings.similarity(first, layers=["layers.1"], with_=second, with_layers=["layers.1", "layers.0"])
    expected = pairs(divergence, mine["layers.1.weights"], [*others["layers.1.weights"], *others["layers.0.weights"]])
    np.testing.assert_allclose(reply.values, expected, rtol=1e-9)
    assert [part.layer for part in reply.columns] == ["layers.1", "layers.1", "layers.0", "layers.0"]
    same = client.recordings.similarity(first, layers=["layers.0"], with_=second)
    assert {part.layer for part in (*same.rows, *same.columns)} == {"layers.0"}


def test_tensors_of_a_request_are_compared(client, rng):
    a, b = rng.dirichlet(np.ones(5), (3, 4)).astype(np.float32), rng.dirichlet(np.ones(5), (2, 4)).astype(np.float32)
    np.testing.assert_allclose(client.attention.similarity(a, b).values, pairs(divergence, a, b), rtol=1e-5)
    assert client.attention.similarity(a[0], b).values.shape == (1, 2)
    x, y = rng.normal(size=(2, 9, 4)), rng.normal(size=(9, 7))
    reply = client.attention.similarity(x, y, measure="cka")
    np.testing.assert_allclose(reply.values, pairs(cka, x, [y]), rtol=1e-9)
    own = client.attention.similarity(x, measure="cka").values
    np.testing.assert_allclose(own.diagonal(), 1)


def test_a_reply_in_json_is_lists(http, client):
    found = post(http, "/v1/attention/similarity", a=[[[1, 0]], [[0, 1]]])
    np.testing.assert_allclose(found["values"], [[0, np.log(2)], [np.log(2), 0]])
    _, id_ = stored(client, 1)
    recorded = post(http, f"/v1/recordings/{id_}/similarity", tensor="hidden")
    assert recorded["rows"] == [{"layer": "layers.0"}, {"layer": "layers.1"}]
    assert recorded["with"] == id_


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tensor": "output"}, "tensor", "holds no output; it has context, hidden, k, weights"),
        ({"tensor": "scores"}, "tensor", "'weights'"),
        ({"layers": ["layers.2"]}, "layers", "no weights of 'layers.2' is recorded"),
        ({"with_layers": ["layers.0"]}, "with_layers", "send with"),
        ({"with": "no id"}, "with", "pattern"),
    ],
)
def test_what_is_not_recorded_is_refused_by_its_field(client, http, fields, param, says):
    _, id_ = stored(client, 1)
    found = refuse(http, f"/v1/recordings/{id_}/similarity", **fields)
    assert (found["status"], found["param"]) == (422, param)
    assert says in found["detail"]


def test_another_recording_must_exist_and_have_the_same_tokens(client):
    _, id_ = stored(client, 1)
    with pytest.raises(RecordingNotFound) as missing:
        client.recordings.similarity(id_, with_="0" * 32)
    assert missing.value.param == "with"
    with pytest.raises(RecordingNotFound) as first:
        client.recordings.similarity("0" * 32)
    assert first.value.param == "id"
    _, other = stored(client, 3, text="a b c d e g")
    with pytest.raises(InvalidRequest, match="other tokens") as different:
        client.recordings.similarity(id_, with_=other)
    assert different.value.param == "with"


def test_recorded_numbers_without_a_similarity_are_refused(client):
    _, id_ = stored(client, 4, **{"layers.0.hidden": np.full((TOKENS, 5), np.nan)})
    with pytest.raises(InvalidRequest, match="finite features in the recorded hidden") as refused:
        client.recordings.similarity(id_, tensor="hidden")
    assert refused.value.param == "tensor"


@pytest.mark.parametrize(
    ("a", "b", "measure", "error", "says"),
    [
        (np.ones(3), None, "cka", ShapeMismatch, r"a: expected \[heads"),
        (np.ones((0, 2, 3)), None, "jensen_shannon", ShapeMismatch, r"a: expected \[heads"),
        (np.ones((2, 0)), None, "cka", ShapeMismatch, r"a: expected \[heads"),
        (
            np.ones((2, 3)),
            np.ones((2, 4)),
            "jensen_shannon",
            ShapeMismatch,
            "b: expected weights of 2 queries and 3 keys",
        ),
        (np.ones((2, 3)), np.ones((4, 3)), "cka", ShapeMismatch, "b: expected features of 2 tokens"),
        (-np.ones((2, 3)), None, "jensen_shannon", InvalidTensor, "finite and not negative"),
        (np.full((2, 3), np.inf), None, "cka", InvalidTensor, "finite features"),
    ],
)
def test_tensors_that_cannot_be_compared_are_refused(client, a, b, measure, error, says):
    with pytest.raises(error, match=says) as refused:
        client.attention.similarity(a, b, measure=measure)
    assert isinstance(refused.value, AttentionError)
    assert refused.value.param in {"a", "b"}
