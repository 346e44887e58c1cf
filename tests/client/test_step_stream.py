"""The client's streams of steps: replies find their step, faults are the client's errors."""

import asyncio
import time

import ml_dtypes
import numpy as np
import pytest

from attention_client import AsyncClient, Client, ConnectionFailed, DeadlineExceeded, SessionNotFound, UnexpectedReply
from attention_contract.errors import BodyTooLarge, Draining
from attention_contract.schemas.sessions import StepReply
from attention_service.runtime.scheduling.request_runner import RequestRunner
from attention_service.runtime.sessions.live_sessions import LiveSessions
from tests.client.service import RAN

MODULE = "step-stream"
CONFIG = {"d_model": 8, "num_heads": 2, "spec": {"masks": [{"name": "causal"}]}}
X = np.random.default_rng(0).standard_normal((1, 12, 8)).astype(np.float32)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture
def client(client):
    client.modules.create(MODULE, CONFIG, seed=0)
    return client


@pytest.fixture
def slow(monkeypatch):
    """Let the step of each session take as many hundredths of a second as its id says."""

    async def step(self, id, request, deadline=None):  # noqa: A002
        await asyncio.sleep(int(id) / 100)
        return StepReply(session=id, length=int(request.query[0, 0]), output=request.query, ran=RAN)

    monkeypatch.setattr(LiveSessions, "step", step)


@pytest.mark.parametrize("media_type", ["safetensors", "json"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_tensors_keep_their_dtype_in_both_forms(client, server, media_type, dtype):
    with Client(server, media_type=media_type) as own, own.sessions.stream() as stream:
        session = own.sessions.create(MODULE).session
        output = stream.step(session, X.astype(dtype)).output
        many = stream.step_many([{"session": session, "query": X.astype(dtype)}, {"session": "none", "query": X}])
        own.sessions.delete(session)
    assert output.dtype == many.steps[0].output.dtype == dtype
    output += 1  # replies are writable
    assert many.steps[1].code == "session_not_found"


async def test_many_tasks_share_a_connection(client, server):
    whole = client.forward(MODULE, X).output

    async def decode(session, stream):
        async with session, session.stream(stream):
            return np.concatenate([(await session.step(X[:, at : at + 1])).output for at in range(12)], 1)

    async with AsyncClient(server) as own, own.sessions.stream() as stream:
        sessions = [await own.sessions.open(MODULE) for _ in range(8)]
        outputs = await asyncio.gather(*(decode(session, stream) for session in sessions))
    for output in outputs:
        np.testing.assert_allclose(output, whole, **CLOSE)


async def test_replies_find_their_step_in_whatever_order_they_come(server, slow):
    async with AsyncClient(server) as own, own.sessions.stream() as stream:
        replies = await asyncio.gather(*(stream.step(str(10 - at % 10), [[float(at)]]) for at in range(40)))
    assert [reply.length for reply in replies] == list(range(40))


@pytest.mark.slow
async def test_a_step_that_is_late_does_not_take_the_reply_of_the_next(server, slow):
    async with AsyncClient(server) as own, own.sessions.stream() as stream:
        with pytest.raises(DeadlineExceeded):
            await stream.step("20", [[1.0]], timeout=0.05)
        assert (await stream.step("20", [[2.0]])).length == 2
    with Client(server) as own, own.sessions.stream() as stream:
        with pytest.raises(DeadlineExceeded):
            stream.step("20", [[1.0]], timeout=0.05)
        assert stream.step("20", [[2.0]]).length == 2


async def test_faults_are_those_of_a_request(client, server):
    async with AsyncClient(server) as own, own.sessions.stream() as stream:
        with pytest.raises(SessionNotFound) as caught:
            await stream.step("nobody", X)
    assert caught.value.request_id.endswith("/1")
    with client.sessions.stream() as stream:
        with pytest.raises(SessionNotFound):
            stream.step("nobody", X)
        with pytest.raises(BodyTooLarge, match="Send it as a request"):
            stream.step("nobody", np.zeros((1, 2**19 + 1, 8), np.float32))


async def test_a_server_that_is_not_there_or_takes_no_work_is_reported(server, monkeypatch):
    nowhere = Client("http://127.0.0.1:9").sessions.stream()
    with pytest.raises(ConnectionFailed) as caught:
        nowhere.step("s", X)
    assert caught.value.facts["sent"] is False

    async def ask(url):
        async with AsyncClient(url) as own:
            await own.sessions.stream().step("s", X)

    with pytest.raises(ConnectionFailed):
        await ask("http://127.0.0.1:9")
    with pytest.raises(UnexpectedReply, match="answered 403"):
        await ask(f"{server}/elsewhere")

    def refuse(self):
        raise Draining("stopping")

    monkeypatch.setattr(RequestRunner, "check_ready", refuse)
    with pytest.raises(Draining):
        await ask(server)


async def test_a_broken_connection_fails_what_waits_and_is_opened_again(client, server, slow):
    started = time.monotonic()
    async with AsyncClient(server) as own, own.sessions.stream() as stream:
        waiting = [asyncio.ensure_future(stream.step("6000", [[1.0]])) for _ in range(3)]
        await asyncio.sleep(0.1)
        stream._link.connection.transport.abort()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        reply = await stream.step("1", [[5.0]])
    assert [type(result) for result in results] == [ConnectionFailed] * 3
    assert all(result.facts["sent"] for result in results)
    assert reply.length == 5
    assert time.monotonic() - started < 30
