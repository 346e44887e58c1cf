"""Servers on one store: each notices the changes of the others within a second."""

from unittest.mock import patch

import httpx
import numpy as np
import pytest

from attention_client import Client
from attention_contract.schemas.server import CallerLimits
from attention_service.api.access.api_keys import KeyRing, create_key
from attention_service.api.replicas import share_of
from attention_service.runtime.services import store_follower
from attention_service.settings import Settings
from tests.conftest import eventually, live_server


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """HTTP clients of two servers on one folder."""
    models = tmp_path_factory.mktemp("shared")
    with (
        live_server(models) as one,
        live_server(models) as two,
        httpx.Client(base_url=one) as first,
        httpx.Client(base_url=two) as second,
    ):
        yield first, second


@pytest.mark.long
def test_a_change_on_one_server_is_seen_on_the_other(replicas):
    first, second = replicas
    made = first.post("/v1/modules", json={"name": "m", "config": {"d_model": 4, "num_heads": 2}, "seed": 1}).json()
    assert eventually(lambda: (got := second.get("/v1/modules/m")).status_code == 200 and got.json()) == made
    parameters = {
        f"{role}_proj.{kind}": [[0.5] * 4] * 4 if kind == "weight" else [0.0] * 4
        for role in "qkvo"
        for kind in ("weight", "bias")
    }
    changed = second.put("/v1/modules/m/parameters", json={"parameters": parameters}).json()
    assert changed["version"] != made["version"]
    eventually(lambda: first.get("/v1/modules/m").json() == changed)
    assert second.delete("/v1/modules/m").status_code == 204
    eventually(lambda: first.get("/v1/modules/m").status_code == 404)


def test_a_change_between_two_looks_is_a_conflict_and_never_lost(replicas):
    first, second = replicas
    config = {"d_model": 4, "num_heads": 2}
    made = first.post("/v1/modules", json={"name": "both", "config": config, "seed": 1})
    again = second.post("/v1/modules", json={"name": "both", "config": config, "seed": 1})
    other = second.post("/v1/modules", json={"name": "both", "config": config, "seed": 2})
    assert (made.status_code, again.json(), other.status_code) == (201, made.json(), 409)


# ── a process that knows of its siblings ─────────────────────────────────────────────────────────────────────────────

CONFIG = {"d_model": 4, "num_heads": 2, "spec": {"masks": [{"name": "causal"}]}}
TOKEN = [[[0.5, 0.0, 0.25, 1.0]]]


@pytest.fixture(scope="module")
def siblings(tmp_path_factory):
    """HTTP clients of two servers on one folder that know of each other, and look at it on demand alone."""
    models = tmp_path_factory.mktemp("siblings")
    shared = {"replicas": 2, "memory_budget": 2**30, "max_connections": 101, "caller_concurrent": 5}
    with (
        patch.object(store_follower, "FOLLOW_S", 3600),
        live_server(models, **shared) as one,
        live_server(models, **shared) as two,
        httpx.Client(base_url=one) as first,
        httpx.Client(base_url=two) as second,
    ):
        yield first, second


def test_a_sibling_knows_at_once_what_was_answered(siblings):
    first, second = siblings
    made = first.post("/v1/modules", json={"name": "new", "config": CONFIG, "seed": 1}).json()
    assert second.post("/v1/modules/new/sessions", json={}).status_code == 201
    changed = second.put("/v1/modules/new/parameters", json={"parameters": _zeros(second, "new")}).json()
    body = {"query": TOKEN, "version": changed["version"]}
    assert first.post("/v1/modules/new/forward", json=body).json()["ran"]["version"] == changed["version"]
    old = first.post("/v1/modules/new/forward", json={"query": TOKEN, "version": made["version"]})
    assert (old.status_code, old.json()["code"]) == (409, "version_mismatch")
    assert second.get("/v1/modules/other").status_code == 404


def test_a_session_of_a_sibling_is_elsewhere_or_gone(siblings):
    first, second = siblings
    first.post("/v1/modules", json={"name": "held", "config": CONFIG, "seed": 1})
    session = first.post("/v1/modules/held/sessions", json={}).json()["session"]
    gone = second.post(f"/v1/sessions/{session}/step", json={"query": TOKEN})
    assert (gone.status_code, gone.json()["reason"]) == (410, "elsewhere_or_gone")
    assert "x-session-id" in gone.json()["detail"]
    assert first.post(f"/v1/sessions/{session}/step", json={"query": TOKEN}).status_code == 200


def test_a_session_of_the_client_goes_on_in_the_process_that_is_addressed(siblings):
    first, second = siblings
    first.post("/v1/modules", json={"name": "moved", "config": CONFIG, "seed": 1})
    sent = []

    def routed(request):
        """Send the first five requests to one server and the others to its sibling, as a proxy that lost it would."""
        sent.append((request.url.path, request.headers.get("x-session-id")))
        request.url = request.url.copy_with(port=(first if len(sent) <= 5 else second).base_url.port)

    x = np.random.default_rng(0).standard_normal((1, 6, 4)).astype(np.float32)
    whole = np.array(first.post("/v1/modules/moved/forward", json={"query": x.tolist()}).json()["output"])
    with (
        httpx.Client(event_hooks={"request": [routed]}) as http,
        Client(str(first.base_url), http=http) as client,
        client.sessions.open("moved") as session,
    ):
        outputs = [session.step(x[:, i : i + 1]).output for i in range(6)]
        forked = session.fork(3)
        assert (session.replays, forked.affinity) == (1, session.affinity)
    np.testing.assert_allclose(np.concatenate(outputs, 1), whole, atol=1e-6)
    assert {affinity for _, affinity in sent} == {session.affinity}
    assert any(path.endswith("/fork") for path, _ in sent)


def test_a_stream_and_sessions_that_belong_together_share_their_affinity(siblings):
    first, _ = siblings
    first.post("/v1/modules", json={"name": "streamed", "config": CONFIG, "seed": 1})
    with Client(str(first.base_url)) as client:
        one = client.sessions.open("streamed", affinity="together")
        two = client.sessions.open("streamed", affinity="together", from_={"session": one.id})
        assert one.affinity == two.affinity == "together"
        with one.stream() as stream:
            assert stream._settings.headers["x-session-id"] == "together"
            one.step(np.array(TOKEN))
        assert "x-session-id" not in client.sessions.stream()._settings.headers
        assert client.sessions.open("streamed").affinity not in {"together", client.sessions.open("streamed").affinity}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/modules", {"name": "m", "config": CONFIG, "durable": False}, "durable"),
        ("/v1/modules/import", {"checkpoint": "none", "layer": 0, "durable": False}, "durable"),
        ("/v1/models", {"checkpoint": "tiny", "name": "mine"}, "name"),
        ("/v1/models", {"checkpoint": "tiny", "dtype": "bfloat16"}, "dtype"),
    ],
)
def test_what_one_process_alone_would_know_is_refused(siblings, path, body, param):
    refused = siblings[0].post(path, json=body)
    assert (refused.status_code, refused.json()["param"]) == (422, param)
    assert "ATTENTION_REPLICAS" in refused.json()["detail"]


def test_each_process_has_its_share_of_the_limits(siblings):
    limits = siblings[0].get("/v1").json()["limits"]
    assert (limits["memory_budget_bytes"], limits["max_connections"]) == (2**29, 51)
    assert limits["caller"]["concurrent"] == 3


def test_shares_are_no_less_than_one_and_recordings_are_counted_by_all():
    settings = Settings(
        _env_file=None, replicas=4, caller_requests_per_s=2, caller_sessions=1, caller_modules=0,
        caller_recordings_bytes=100,
    )  # fmt: skip
    share = share_of(settings)
    assert (share.caller_requests_per_s, share.caller_sessions, share.caller_modules) == (0.5, 1, 0)
    assert (share.caller_recordings_bytes, share.max_connections) == (100, 1024)
    alone = Settings(_env_file=None, caller_sessions=1)
    assert share_of(alone) is alone


def test_a_key_has_its_share_of_its_own_limits(tmp_path):
    key = create_key(tmp_path, "one", ["infer"], CallerLimits(requests_per_s=10, recordings_bytes=8))
    limits = KeyRing(tmp_path, replicas=4).find(key.encode()).caller.limits
    assert (limits.requests_per_s, limits.recordings_bytes) == (2.5, 8)


def _zeros(server, name):
    listed = server.get(f"/v1/modules/{name}/parameters").json()["parameters"]
    return {each["name"]: np.zeros(each["shape"]).tolist() for each in listed}
