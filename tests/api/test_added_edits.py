"""Edits that add, of modules and raw attention over HTTP: in both bodies, in every request with edits."""

import numpy as np
import pytest

CONFIG = {"d_model": 24, "num_heads": 4, "num_kv_heads": 2, "spec": {"masks": [{"name": "causal"}]}}


@pytest.fixture
def x(rng):
    return rng.normal(size=(2, 6, 24)).astype(np.float32)


@pytest.fixture
def module(client):
    client.modules.create("added", CONFIG, seed=3)
    return "added"


def test_a_vector_is_added_to_the_output_of_the_listed_queries(client, module, x, rng):
    vector = rng.normal(size=24).astype(np.float32)
    plain = client.forward(module, x).output
    edited = client.forward(module, x, edits=[{"tap": "output", "queries": [1, 4], "add": vector}]).output
    expected = plain.copy()
    expected[:, [1, 4]] += vector
    np.testing.assert_allclose(edited, expected, atol=1e-6)


def test_a_number_of_json_is_added(client, http, module, x):
    sent = {"query": x.tolist(), "edits": [{"tap": "output", "add": 0.5}]}
    reply = http.post(f"/v1/modules/{module}/forward", json=sent)
    np.testing.assert_allclose(reply.json()["output"], client.forward(module, x).output + 0.5, atol=1e-6)


def test_what_is_added_to_the_context_passes_through_the_projection(client, module, x, rng):
    vector = rng.normal(size=(4, 1, 6)).astype(np.float32)
    o = client.modules.parameter(module, "o_proj.weight").value
    plain = client.forward(module, x).output
    edited = client.forward(module, x, edits=[{"tap": "context", "add": vector}]).output
    np.testing.assert_allclose(edited - plain, np.broadcast_to(o @ vector.reshape(24), plain.shape), atol=1e-5)


def test_gradients_are_those_at_the_sum(client, module, x):
    edits = [{"tap": "scores", "heads": [1], "keys": [0], "add": 2.0}]
    found = client.gradients(module, x, wrt=["query", "scores"], edits=edits, check=True)
    assert all(each.passed for each in found.check.values())


def test_an_effect_is_that_of_a_forward_with_the_sum(client, module, x, rng):
    add = rng.normal(size=(4, 1, 6)).astype(np.float32)
    found = client.effects(module, x, sweep={"tap": "q", "over": ["heads"], "add": add}, return_differences=True)
    plain = client.forward(module, x).output
    for head in range(4):
        edited = client.forward(module, x, edits=[{"tap": "q", "heads": [head], "add": add[[head]]}]).output
        np.testing.assert_allclose(found.differences[:, head], edited - plain, atol=2e-6)


@pytest.mark.parametrize(
    ("edit", "param", "code"),
    [
        ({"tap": "output", "add": [0.0] * 23}, "edits.0.add", "shape_mismatch"),
        ({"tap": "q", "add": ["NaN"]}, "edits.0.add", "invalid_request"),
        ({"tap": "q", "add": "Infinity"}, "edits.0.add", "invalid_request"),
        ({"tap": "q", "add": 1e39}, "edits.0.add", "invalid_request"),
        ({"tap": "q", "add": 1.0, "set": 0.0}, "edits.0.add", "invalid_request"),
        ({"tap": "q", "heads": [1, 1], "add": [[[1.0]], [[2.0]]]}, "edits.0.heads", "invalid_request"),
    ],
)
def test_what_cannot_be_added_is_refused_by_its_field(http, module, x, edit, param, code):
    problem = http.post(f"/v1/modules/{module}/forward", json={"query": x.tolist(), "edits": [edit]}).json()
    assert (problem["status"], problem["param"], problem["code"]) == (422, param, code)
