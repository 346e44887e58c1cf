"""``WS /v1/sessions/stream``, by a WebSocket library that knows nothing of the project."""

import asyncio
import gc
import json
import re
import socket
import struct
import threading
import time
from contextlib import ExitStack

import httpx
import numpy as np
import pytest
import safetensors.numpy
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.streams import StreamReader
from websockets.sync.client import connect

from attention_contract.errors import Draining
from attention_contract.frames import MAX_FRAME_BYTES, MAX_UNANSWERED
from attention_contract.schemas.sessions import StepReply, StepsReply
from attention_service.runtime.scheduling.request_runner import RequestRunner
from attention_service.runtime.sessions.live_sessions import LiveSessions
from tests.api.talk import post
from tests.client.service import RAN
from tests.conftest import eventually, live_server

MODULE = "session-stream"
X = np.random.default_rng(0).standard_normal((1, 9, 8)).astype(np.float32)
WAIT_S = 60


@pytest.fixture(scope="module")
def lane(http):
    """A client of a server that has a causal module of width 8 with 2 heads."""
    make_module(http)
    return http


def make_module(http):
    config = {"d_model": 8, "num_heads": 2, "spec": {"masks": [{"name": "causal"}]}}
    post(http, "/v1/modules", name=MODULE, config=config, seed=0)


def opened(lane):
    return post(lane, f"/v1/modules/{MODULE}/sessions", ttl_s=60)["session"]


def stream(server, **options):
    return connect(f"ws{server.removeprefix('http')}/v1/sessions/stream", compression=None, max_size=None, **options)


def ask(stream, **frame):
    stream.send(json.dumps(frame))
    return json.loads(stream.recv(WAIT_S))


@pytest.fixture
def gate(monkeypatch):
    """Let steps wait until the gate is set. They note their session in ``began``, and in ``ended`` if cancelled."""
    gate = threading.Event()
    gate.began, gate.ended = [], []

    async def step(self, id, request, deadline=None):  # noqa: A002
        gate.began.append(id)
        try:
            while not gate.is_set() and not id.startswith("quick"):
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            gate.ended.append(id)
            raise
        return StepReply(session=id, length=len(gate.began), output=request.query, ran=RAN)

    monkeypatch.setattr(LiveSessions, "step", step)
    yield gate
    gate.set()


def test_steps_in_both_forms_give_the_numbers_of_one_forward_pass(lane, server):
    whole = np.array(post(lane, f"/v1/modules/{MODULE}/forward", query=X.tolist())["output"])
    session = opened(lane)
    with stream(server) as connection:
        outputs = [ask(connection, session=session, query=X[:, :4].tolist())["output"]]
        for at in range(4, 9):
            metadata = {"request": json.dumps({"session": session, "at": at})}
            connection.send(safetensors.numpy.save({"query": X[:, at : at + 1].copy()}, metadata))
            outputs.append(safetensors.numpy.load(connection.recv(WAIT_S))["output"])
    np.testing.assert_allclose(np.concatenate(outputs, 1), whole, atol=1e-5)


def test_many_steps_in_one_message_have_their_own_results(lane, server):
    ids = [opened(lane) for _ in range(3)]
    with stream(server) as connection:
        steps = [{"session": each, "query": X[0, :2].tolist()} for each in [*ids, "nobody"]]
        results = ask(connection, steps=steps)["steps"]
    assert [each.get("length") or each["code"] for each in results] == [2, 2, 2, "session_not_found"]


def test_a_fault_is_a_problem_with_its_session_and_the_connection_goes_on(lane, server):
    session = opened(lane)
    with stream(server, additional_headers={"X-Request-ID": "mine"}) as connection:
        assert connection.response.headers["x-request-id"] == "mine"
        assert "attention-version" in connection.response.headers
        unreadable = ask(connection)
        connection.send("{")
        broken = json.loads(connection.recv(WAIT_S))
        unknown = ask(connection, session="nobody", query=[[0.0] * 8])
        wrong = ask(connection, session=session, query=[[0.0] * 7], at=0)
        behind = ask(connection, session=session, query=[[0.0] * 8], at=3)
        connection.send(b"\1\0\0\0\0\0\0\0{")
        binary = connection.recv(WAIT_S)
        assert ask(connection, session=session, query=[[0.0] * 8])["length"] == 1
    codes = [each["code"] for each in (unreadable, broken, unknown, wrong, behind)]
    assert codes == ["invalid_request", "unreadable", "session_not_found", "shape_mismatch", "length_mismatch"]
    assert [each.get("session") for each in (broken, unknown, wrong, behind)] == [None, "nobody", session, session]
    assert [each["request_id"] for each in (unreadable, broken, unknown)] == ["mine/1", "mine/2", "mine/3"]
    assert (behind["expected"], behind["actual"]) == (3, 0)
    assert b"unreadable" in binary


def test_messages_beyond_the_limits_of_json_are_refused_and_the_connection_goes_on(tmp_path):
    with live_server(tmp_path, max_json_bytes=2**17) as url, stream(url) as connection:
        codes = []
        for frame in ("[" * 2**18, "[" * 2**16, json.dumps({"session": "s", "query": [0.5] * 2**14})):
            connection.send(frame)
            codes.append(json.loads(connection.recv(WAIT_S))["code"])
    assert codes == ["body_too_large", "unreadable", "session_not_found"]


def test_a_fault_of_the_server_is_a_problem_too(lane, server, monkeypatch):
    async def fail(*_):
        raise RuntimeError("oh")

    monkeypatch.setattr(LiveSessions, "step", fail)
    with stream(server) as connection:
        assert ask(connection, session="s", query=[[0.0]])["code"] == "internal_error"


def test_replies_come_when_they_are_ready_but_in_order_for_each_session(server, gate):
    with stream(server) as connection:
        for session in ("slow", "quick-1", "slow", "quick-2"):
            connection.send(json.dumps({"session": session, "query": [[0.0]]}))
        first = [json.loads(connection.recv(WAIT_S))["session"] for _ in range(2)]
        assert first == ["quick-1", "quick-2"]
        gate.set()
        rest = [json.loads(connection.recv(WAIT_S)) for _ in range(2)]
    assert [each["session"] for each in rest] == ["slow", "slow"]
    assert gate.began == ["slow", "quick-1", "slow", "quick-2"]


def test_many_steps_and_one_of_the_same_session_are_answered_in_order(server, gate, monkeypatch):
    async def steps(self, request, deadline=None):
        return StepsReply(steps=[await self.step(each.session, each) for each in request.steps])

    monkeypatch.setattr(LiveSessions, "steps", steps)
    with stream(server) as connection:
        both = [{"session": each, "query": [[0.0]]} for each in ("quick", "slow")]
        connection.send(json.dumps({"steps": both}))
        eventually(lambda: len(gate.began) == 2)
        connection.send(json.dumps({"session": "quick", "query": [[0.0]]}))
        eventually(lambda: len(gate.began) == 3)
        gate.set()
        assert "steps" in json.loads(connection.recv(WAIT_S))
        assert json.loads(connection.recv(WAIT_S))["session"] == "quick"


def test_the_server_stops_reading_after_so_many_unanswered_messages(server, gate):
    more = 3 * MAX_UNANSWERED
    with stream(server) as connection:
        for at in range(more):
            connection.send(json.dumps({"session": f"s{at}", "query": [[0.0]]}))
        eventually(lambda: len(gate.began) == MAX_UNANSWERED)
        time.sleep(0.1)
        assert len(gate.began) == MAX_UNANSWERED
        gate.set()
        assert {json.loads(connection.recv(WAIT_S))["session"] for _ in range(more)} == set(gate.began)


def test_replies_count_until_the_caller_takes_them_and_are_refused_without_memory(tmp_path, monkeypatch):
    """Replies may have half of the memory budget together."""
    output, messages, tasks = np.zeros((1, 2**18, 8), np.float32), 12, []  # 8 MiB

    async def step(self, id, request, deadline=None):  # noqa: A002
        tasks.append(id)
        while len(tasks) < messages:  # no message is read behind a reply that is not
            await asyncio.sleep(0.001)
        return StepReply(session=id, length=1, output=output, ran=RAN)

    monkeypatch.setattr(LiveSessions, "step", step)
    with live_server(tmp_path, memory_budget=2**26) as server, httpx.Client(base_url=server) as http:

        def reply_bytes():
            return float(re.search(r"^attention_reply_bytes (\S+)", http.get("/metrics").text, re.MULTILINE)[1])

        with stream(server, max_queue=1) as connection:  # takes no more from its socket while one waits to be read
            for at in range(messages):
                options = {"request": json.dumps({"session": f"s{at}"})}
                connection.send(safetensors.numpy.save({"query": output[:, :1]}, options))
            eventually(lambda: len(tasks) == messages)
            assert output.nbytes <= eventually(reply_bytes) <= 2**25
            replies = [connection.recv(WAIT_S) for _ in range(messages)]
            refused = [each for each in replies if b"no_room" in each[:999]]
            assert 0 < len(refused) < messages
            assert all(len(each) > output.nbytes for each in replies if each not in refused)
            eventually(lambda: reply_bytes() == 0)


def test_steps_of_a_caller_that_leaves_are_cancelled_and_their_memory_is_given_back(lane, server, gate):
    def body_bytes():
        return float(re.search(r"^attention_body_bytes (\S+)", lane.get("/metrics").text, re.MULTILINE)[1])

    query = np.zeros((1, 2**13, 8), np.float32)
    with stream(server) as connection:
        for session in ("a", "b"):
            connection.send(safetensors.numpy.save({"query": query}, {"request": json.dumps({"session": session})}))
        eventually(lambda: len(gate.began) == 2)
        assert body_bytes() > 2 * query.nbytes
    eventually(lambda: sorted(gate.ended) == ["a", "b"])
    eventually(lambda: body_bytes() == 0)


def test_a_message_waits_no_longer_than_its_caller(server, gate):
    with stream(server, additional_headers={"Prefer": "wait=0.1"}) as connection:
        late = ask(connection, session="s", query=[[0.0]])
    assert (late["code"], late["session"], gate.ended) == ("deadline_exceeded", "s", ["s"])


def test_a_message_that_is_too_large_ends_the_connection(server):
    with stream(server) as connection:
        # The head of a frame alone: a server that closes with unread bytes resets the connection.
        connection.socket.sendall(b"\x82\xff" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big") + bytes(4))
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv(WAIT_S)
        assert caught.value.rcvd.code == 1009


def test_a_message_that_has_not_come_whole_is_freed_with_its_connection(server):
    """Not by the collection of garbage, which comes much later."""
    gc.collect()
    gc.disable()
    try:
        with stream(server) as connection:
            size = MAX_FRAME_BYTES // 2
            connection.socket.sendall(struct.pack("!BBQ4x", 0x82, 0xFF, size) + bytes(size - 1000))
            assert eventually(lambda: unfinished_bytes() >= size - 1000)
            connection.socket.shutdown(socket.SHUT_RDWR)
        assert eventually(lambda: not unfinished_bytes())
    finally:
        gc.enable()


def unfinished_bytes():
    """Bytes of frames that have not come whole, of all connections in memory (a weak proxy has no class to ask for)."""
    return sum(len(each.buffer) for each in gc.get_objects() if type(each) is StreamReader)


def test_messages_are_counted_and_logged_like_requests(tmp_path, capfd):
    with live_server(tmp_path, log_level="info") as url, httpx.Client(base_url=url, timeout=60) as http:
        make_module(http)
        session = opened(http)
        with stream(url, additional_headers={"X-Request-ID": "counted"}) as connection:
            ask(connection, session=session, query=[[0.0] * 8])
            ask(connection, session="nobody", query=[[0.0] * 8])
            assert "attention_session_streams 1.0" in http.get("/metrics").text
        text = http.get("/metrics").text
    for status in (200, 404):
        assert f'attention_requests_total{{operation="step_session",status="{status}"}}' in text
    lines = [line for line in capfd.readouterr().err.splitlines() if "counted/" in line]
    assert len(lines) == 2
    assert all("method=WS" in line and "operation=step_session" in line for line in lines)


def test_a_server_that_takes_no_work_refuses_the_handshake(server, monkeypatch):
    def refuse(self):
        raise Draining("stopping")

    monkeypatch.setattr(RequestRunner, "check_ready", refuse)
    with pytest.raises(InvalidStatus) as caught, stream(server):
        pass
    assert caught.value.response.status_code == 503
    assert json.loads(caught.value.response.body)["code"] == "draining"


def test_a_page_of_another_host_opens_no_stream(server):
    with stream(server, additional_headers={"Origin": server}):
        pass
    with (
        pytest.raises(InvalidStatus) as caught,
        stream(server, additional_headers={"Origin": "https://elsewhere.test"}),
    ):
        pass
    assert caught.value.response.status_code == 403
    assert json.loads(caught.value.response.body)["param"] == "Origin"


def test_a_link_of_another_site_opens_no_stream(server):
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    with pytest.raises(InvalidStatus) as caught, stream(server, additional_headers=link):
        pass
    assert caught.value.response.status_code == 403


def test_a_server_that_stops_answers_what_came_and_goes_away(tmp_path, gate):
    with ExitStack() as stack:
        server = stack.enter_context(ExitStack())
        connection = stack.enter_context(stream(server.enter_context(live_server(tmp_path))))
        connection.send(json.dumps({"session": "s", "query": [[0.0]]}))
        eventually(lambda: gate.began)
        threading.Timer(0.2, gate.set).start()
        server.close()
        assert json.loads(connection.recv(WAIT_S))["session"] == "s"
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv(WAIT_S)
        assert caught.value.rcvd.code == 1001
