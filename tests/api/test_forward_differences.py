"""``compare`` of a forward pass: the taps after the edits minus those of a second request without them."""

import numpy as np
import pytest

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Taps

TAPS = [*Taps.model_fields]
EDITS = {
    "weights": [{"tap": "weights", "heads": [1], "queries": [0, 2], "set": 0, "renormalize": True}],
    "scores": [{"tap": "scores", "heads": [0], "keys": [1], "scale": -2}],
    "keys and output": [{"tap": "k", "heads": [0], "keys": [1], "set": 0.5}, {"tap": "output", "scale": 2}],
    "nothing": [],
}
CAUSAL = {"masks": [{"name": "causal"}]}


def assert_differences(edited, plain, taps=TAPS):
    """Hold every returned tap against the same tap of a request without the edits."""
    for tap in taps:
        one, other, found = (getattr(reply, tap) for reply in (edited, plain, edited.differences))
        expected = np.zeros(one.shape)
        np.subtract(one, other, out=expected, where=one != other)
        np.testing.assert_allclose(found, expected, atol=2e-6, err_msg=tap)
        assert found.dtype == one.dtype, tap


@pytest.mark.parametrize("edits", EDITS)
def test_every_tap_of_raw_attention_differs_by_what_two_requests_give(client, rng, edits):
    q, k = rng.normal(size=(2, 2, 4, 5, 8)).astype(np.float32)
    body = {"spec": CAUSAL, "return_": TAPS, "kernel": "materialized"}
    edited = client.attention.forward(q, k[:, :2], **body, edits=EDITS[edits], compare="unedited")
    assert_differences(edited, client.attention.forward(q, k[:, :2], **body))
    changed = np.abs(edited.differences.output).max() > 1e-3
    assert changed == bool(EDITS[edits])
    assert "differences" not in client.attention.forward(q, edits=EDITS[edits]).model_dump(exclude_unset=True)


def test_queries_and_heads_that_no_edit_reaches_differ_by_nothing(client, rng):
    q = rng.normal(size=(3, 70, 16)).astype(np.float32)
    edit = {"tap": "weights", "heads": [1], "queries": [4], "set": 0}
    found = client.attention.forward(q, edits=[edit], compare="unedited", return_=["output", "weights"]).differences
    for x in (found.output, found.weights):
        assert np.argwhere(x.any(-1)).tolist() == [[1, 4]]


def test_a_module_and_a_selection(client, rng):
    client.modules.create("compared", {"d_model": 24, "num_heads": 4, "num_kv_heads": 2, "spec": CAUSAL}, seed=3)
    x = rng.normal(size=(2, 6, 24)).astype(np.float32)
    taps = ["output", "weights", "context", "k"]
    body = {"return_": taps, "select": {"heads": [3, 1], "queries": [5, 2]}, "average_heads": True}
    edits = [{"tap": "v", "heads": [1], "set": 0}, {"tap": "scores", "keys": [0], "set": 2.0}]
    edited = client.forward("compared", x, **body, edits=edits, compare="unedited")
    assert_differences(edited, client.forward("compared", x, **body), taps)
    plain = client.forward("compared", x, **body, edits=edits)
    np.testing.assert_array_equal(edited.output, plain.output)
    projections = 2 * 2 * 6 * 24 * (24 + 12 + 12)
    assert edited.ran.flops == 2 * plain.ran.flops - projections
    assert edited.ran.peak_bytes > plain.ran.peak_bytes
    assert edited.ran.predicted_ms > plain.ran.predicted_ms


def test_a_step_of_a_session_caches_what_the_edits_made(client, rng):
    client.modules.create("stepped", {"d_model": 16, "num_heads": 2, "spec": CAUSAL}, seed=1)
    first, second = rng.normal(size=(2, 1, 3, 16)).astype(np.float32)
    edit = {"tap": "k", "keys": [3], "set": 0.25}
    with client.sessions.open("stepped") as session, client.sessions.open("stepped") as twin:
        session.step(first)
        twin.step(first)
        plain = twin.step(second)
        edited = session.step(second, edits=[edit], compare="unedited")
        assert_differences(edited, plain, ["output"])
        assert edited.length == 6
        cached = client.sessions.cache(session.id).past_key
        np.testing.assert_array_equal(cached[..., 3, :], np.full_like(cached[..., 3, :], 0.25))


def test_an_approximation_is_compared_by_its_own_method(client, rng):
    q = rng.normal(size=(1, 2, 7, 8)).astype(np.float32)
    body = {"spec": {"method": {"name": "linear"}}}
    edited = client.attention.forward(q, **body, edits=[{"tap": "v", "heads": [1], "scale": 3}], compare="unedited")
    assert_differences(edited, client.attention.forward(q, **body), ["output"])
    assert not edited.differences.output[0, 0].any()


def test_only_what_is_known_is_compared_with(client):
    with pytest.raises(InvalidRequest) as refused:
        client.attention.forward(np.ones((2, 2)), compare="patched")
    assert refused.value.param == "compare"
