"""The limits of one caller: rates, requests at a time, and what it keeps on the server."""

import itertools
import json
import time
from collections import deque
from contextlib import ExitStack, contextmanager
from threading import Thread
from types import SimpleNamespace
from unittest.mock import patch

import httpx
import numpy as np
import pytest

from attention_client import Client
from attention_contract.errors import CallerLimit
from attention_contract.schemas.attention import Ran, RawForwardRequest, Select
from attention_contract.schemas.recordings import EXAMPLE_RECORDING
from attention_contract.schemas.server import CallerLimits
from attention_contract.wire import SAFETENSORS, to_body
from attention_service.api.access import quotas as module
from attention_service.api.access.api_keys import create_key, read_keys
from attention_service.api.access.key_commands import keys as keys_command
from attention_service.api.access.quotas import Quotas
from attention_service.runtime.callers import Caller
from attention_service.runtime.request_timing import RequestTiming
from tests.conftest import eventually, live_server

FORWARD = "/v1/attention/forward"
BODY = {"query": [[1.0, 0.0]], "key": [[1.0, 0.0]], "value": [[2.0, 3.0]]}
CAUSAL = {"d_model": 8, "num_heads": 2, "spec": {"masks": [{"name": "causal"}]}}
TENSORS = {"content-type": SAFETENSORS}


def long(length):
    """The body of a request that computes for a while."""
    query = np.zeros((1, 8, length, 16), np.float32)
    request = RawForwardRequest(query=query, key=query, value=query, return_=["weights"], select=Select(queries=[0]))
    return b"".join(to_body(request, SAFETENSORS, "request"))


@pytest.fixture
def clock(monkeypatch):
    """A clock that only a test moves."""
    times = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: times[0])
    return times


@contextmanager
def clock_stopped():
    """No rate gives anything back, however long the requests take."""
    now = time.monotonic()
    with patch.object(module, "time", SimpleNamespace(monotonic=lambda: now)):
        yield


def limited(**limits):
    return Caller("a", limits=CallerLimits(**limits))


def ran(compute_ms, batch):
    return Ran.model_construct(compute_ms=compute_ms, batch=batch)


def test_requests_are_refused_beyond_two_seconds_of_their_rate_until_it_has_given_back(clock):
    quotas, caller = Quotas(), limited(requests_per_s=5)
    for _ in range(10):
        quotas.enter(caller)
        quotas.leave(caller, RequestTiming())
    with pytest.raises(CallerLimit, match="requests_per_s of 'a' is 5") as refusal:
        quotas.enter(caller)
    assert refusal.value.retry_after == 1
    clock[0] += 0.2
    quotas.enter(caller)
    with pytest.raises(CallerLimit):
        quotas.enter(caller)


def test_a_slow_rate_lets_one_request_through_and_tells_when_the_next_one_may_come(clock):
    quotas, caller = Quotas(), limited(requests_per_s=0.1)
    quotas.enter(caller)
    with pytest.raises(CallerLimit) as refusal:
        quotas.enter(caller)
    assert refusal.value.retry_after == 10
    clock[0] += 10
    quotas.enter(caller)


@pytest.mark.parametrize(
    ("limits", "timing"),
    [
        ({"bytes_per_s": 100}, RequestTiming(bytes=1000)),
        ({"device_ms_per_s": 100}, RequestTiming(runs=[ran(1600.0, 2), ran(200.0, 1)])),
    ],
    ids=["bytes", "device"],
)
def test_who_used_too_much_waits_until_the_rate_has_given_it_back(clock, limits, timing):
    quotas, caller = Quotas(), limited(**limits)
    quotas.enter(caller)
    quotas.leave(caller, timing)
    with pytest.raises(CallerLimit) as refusal:
        quotas.enter(caller)
    assert refusal.value.retry_after == 8
    clock[0] += 8
    quotas.enter(caller)


def test_each_caller_has_a_rate_of_its_own_and_few_are_remembered(clock):
    quotas = Quotas()
    for number in range(6000):
        clock[0] += 0.1
        caller = Caller(str(number), limits=CallerLimits(requests_per_s=0.001))
        quotas.enter(caller)
        quotas.leave(caller, RequestTiming())
    assert len(quotas._uses) < 5000


@contextmanager
def keyed(folder, **limits):
    """A client with a key that may do everything within limits, and another without limits."""
    made = [
        create_key(folder, "narrow", ["infer", "inspect", "manage", "metrics"], CallerLimits(**limits)),
        create_key(folder, "wide", ["infer", "inspect", "manage", "metrics"]),
    ]
    with live_server(folder, require_keys=True) as url, ExitStack() as open_clients:
        clients = [httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30) for key in made]
        for client in clients:
            open_clients.enter_context(client)
        yield *clients, made[0], url


def refused(answer, limit, most):
    assert answer.status_code == 429, answer.text
    problem = answer.json()
    assert problem["code"] == "caller_limit"
    assert limit in problem["detail"]
    assert problem["limit"] == most < problem["actual"]
    assert int(answer.headers["retry-after"]) >= 1
    return True


def test_a_key_beyond_its_rate_is_refused_before_its_body_is_read_and_others_are_not(tmp_path):
    with keyed(tmp_path, requests_per_s=2) as (narrow, wide, key, url):
        with clock_stopped():
            answers = [narrow.post(FORWARD, json=BODY) for _ in range(6)]
            assert [answer.status_code for answer in answers] == [200] * 4 + [429] * 2
            assert refused(answers[-1], "requests_per_s", 2)
            unread = narrow.post(FORWARD, content=b"{", headers={"content-type": "application/json"})
            assert refused(unread, "requests_per_s", 2)
        assert wide.post(FORWARD, json=BODY).status_code == 200
        assert narrow.get("/health/live").status_code == 200
        counted = wide.get("/metrics").text
        assert 'attention_problems_total{caller="narrow",code="caller_limit"}' in counted
        assert "requests_per_s" not in wide.get("/v1").json()["limits"]["caller"]
        with Client(url, api_key=key) as client:  # which waits, and asks again
            assert client.server.info().limits.caller.requests_per_s == 2


@pytest.mark.slow
def test_requests_at_a_time_are_limited(tmp_path):
    body = long(4000)
    with keyed(tmp_path, concurrent=2) as (narrow, *_):
        found = []

        def ask():
            found.append(narrow.post(FORWARD, content=body, headers=TENSORS).status_code)

        threads = [Thread(target=ask, daemon=True) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(set(found)) == [200, 429]
        assert narrow.post(FORWARD, json=BODY).status_code == 200


def test_modules_sessions_pages_and_recordings_are_limited(tmp_path):
    module = {"config": CAUSAL, "seed": 0}
    with keyed(tmp_path, modules=1, sessions=2, session_bytes=100_000) as (narrow, wide, *_):
        assert narrow.post("/v1/modules", json=module | {"name": "mine"}).status_code == 201
        assert refused(narrow.post("/v1/modules", json=module | {"name": "more"}), "modules", 1)
        assert narrow.post("/v1/modules", json=module | {"name": "mine"}).status_code in {200, 201}  # the same again
        assert wide.post("/v1/modules", json=module | {"name": "more"}).status_code == 201
        assert narrow.delete("/v1/modules/mine").status_code == 204
        assert narrow.post("/v1/modules", json=module | {"name": "mine"}).status_code == 201
        opened = [narrow.post("/v1/modules/more/sessions", json={}).json()["session"] for _ in range(2)]
        assert refused(narrow.post("/v1/modules/more/sessions", json={}), "sessions", 2)
        assert wide.post("/v1/modules/more/sessions", json={}).status_code == 201
        step = {"query": [[[0.5] * 8] * 4000]}
        assert refused(narrow.post(f"/v1/sessions/{opened[0]}/step", json=step), "session_bytes", 100_000)
        assert narrow.post(f"/v1/sessions/{opened[0]}/step", json={"query": [[[0.5] * 8]]}).status_code == 200


def test_recordings_of_a_key_are_limited(tmp_path):
    key = create_key(tmp_path, "narrow", ["infer", "inspect"], CallerLimits(recordings_bytes=1))
    with live_server(tmp_path, require_keys=True) as url:
        refused(httpx.post(f"{url}/v1/recordings", json=EXAMPLE_RECORDING, headers={"Authorization": f"Bearer {key}"}),
                "recordings_bytes", 1)  # fmt: skip


def test_messages_of_a_stream_count_as_requests(tmp_path):
    with live_server(tmp_path, caller_requests_per_s=4) as url, Client(url, retries=0) as client:
        client.modules.create("m", CAUSAL, seed=0)
        info, steps = client.sessions.create("m"), itertools.repeat(np.full((1, 1, 8), 0.5, np.float32), 20)
        with clock_stopped(), client.sessions.stream() as stream, pytest.raises(CallerLimit):
            deque(stream.step(info.session, query) for query in steps)


def test_one_of_several_keys_may_have_half_of_what_there_is(tmp_path):
    first = create_key(tmp_path, "first", ["infer"])
    with live_server(tmp_path, require_keys=True, memory_budget=2**28, max_queue=64, max_sessions=10) as url:

        def limits(key):
            answer = httpx.get(f"{url}/v1", headers={"Authorization": f"Bearer {key}"})
            return answer.json()["limits"]["caller"]

        assert limits(first) == {}
        second = create_key(tmp_path, "second", ["infer"], CallerLimits(sessions=9))
        eventually(lambda: limits(first))
        half = {"concurrent": 32, "session_bytes": 2**26, "sessions": 5}
        assert limits(first) == half
        assert limits(second) == half | {"sessions": 9}


def test_without_keys_every_address_has_the_limits_of_the_settings(tmp_path):
    with live_server(tmp_path, caller_requests_per_s=1, caller_bytes_per_s="1MiB") as url, clock_stopped():
        assert httpx.get(f"{url}/v1").json()["limits"]["caller"] == {"requests_per_s": 1, "bytes_per_s": 2**20}
        answers = [httpx.post(url + FORWARD, json=BODY) for _ in range(3)]
        assert refused(answers[-1], "requests_per_s", 1)


def test_the_command_gives_a_key_limits_of_its_own(tmp_path, capsys):
    made = ["create", "ci", "--models-dir", str(tmp_path), "--limit", "requests_per_s=2.5", "--limit", "sessions=3"]
    assert keys_command(made) == 0
    assert read_keys(tmp_path)[0].limits == CallerLimits(requests_per_s=2.5, sessions=3)
    assert json.loads((tmp_path / "keys.json").read_text())["keys"][0]["limits"] == {
        "requests_per_s": 2.5,
        "sessions": 3,
    }
    for wrong in ("speed=3", "sessions=many", "sessions=-1", "sessions"):
        assert keys_command(["create", "x", "--models-dir", str(tmp_path), "--limit", wrong]) == 2
        assert "NAME=VALUE" in capsys.readouterr().err


@pytest.mark.slow
def test_a_request_that_is_predicted_to_take_too_long_is_refused_with_both_times(tmp_path):
    with live_server(tmp_path, max_predicted_s=0.01) as url:
        answer = httpx.post(url + FORWARD, content=long(4000), headers=TENSORS)
        assert answer.status_code == 422
        problem = answer.json()
        assert problem["code"] == "too_long"
        assert problem["limit_s"] == 0.01 < problem["predicted_s"]
        assert httpx.post(url + FORWARD, json=BODY).status_code == 200
        assert httpx.get(f"{url}/v1").json()["limits"]["max_predicted_s"] == 0.01


@pytest.mark.slow
def test_a_request_without_a_preference_has_the_time_of_the_setting(tmp_path):
    with live_server(tmp_path, default_wait_s=0.2) as url:
        answer = httpx.post(url + FORWARD, content=long(20_000), headers=TENSORS)
        assert (answer.status_code, answer.json()["code"]) == (503, "deadline_exceeded")
        assert httpx.post(url + FORWARD, json=BODY).status_code == 200


def test_no_caller_has_to_wait_longer_than_the_package_of_openai_waits(clock):
    openai_client = pytest.importorskip("openai")._base_client
    quotas, caller = Quotas(), limited(requests_per_s=0.001)
    quotas.enter(caller)
    with pytest.raises(CallerLimit) as refusal:
        quotas.enter(caller)
    assert refusal.value.retry_after == openai_client.MAX_RETRY_AFTER_DELAY
