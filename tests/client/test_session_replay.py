"""Sessions of both clients: the numbers of one forward pass, whatever happens to the server meanwhile."""

import asyncio
import inspect
import logging
import time
from contextlib import suppress

import httpx
import numpy as np
import pytest

from attention_client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    InvalidRequest,
    LengthMismatch,
    SessionGone,
    SessionNotFound,
)
from attention_client.calls.session_calls import Sessions
from attention_client.sessions.live_session import Session
from attention_service.runtime.sessions import live_sessions
from tests.conftest import live_server

MODULE = "replayed"
CONFIG = {"d_model": 8, "num_heads": 2, "spec": {"masks": [{"name": "causal"}]}}
X = np.random.default_rng(0).standard_normal((1, 24, 8)).astype(np.float32)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


class Server:
    """A server that can be stopped and started again with the same modules, behind one address."""

    def __init__(self, folder):
        self.folder = folder
        self.running = None
        self.port = 0
        self.lost = []
        """Paths whose next reply is lost on the way."""
        self.paths = []
        self.start()

    def start(self):
        self.running = live_server(self.folder)
        self.port = httpx.URL(self.running.__enter__()).port

    def stop(self):
        self.running.__exit__(None, None, None)

    def restart(self):
        self.stop()
        self.start()

    def routed(self, request):
        request.url = request.url.copy_with(port=self.port)
        self.paths.append(request.url.path)

    def arrive(self, request):
        """Lose the reply of a request, if it is one of those."""
        part = next((part for part in self.lost if request.url.path.endswith(part)), None)
        if part is not None:
            self.lost.remove(part)
            raise httpx.ReadError("lost", request=request)


class Blocking(httpx.HTTPTransport):
    def __init__(self, server):
        super().__init__()
        self.server = server

    def handle_request(self, request):
        self.server.routed(request)
        response = super().handle_request(request)
        response.read()
        self.server.arrive(request)
        return response


class Awaited(httpx.AsyncHTTPTransport):
    def __init__(self, server):
        super().__init__()
        self.server = server

    async def handle_async_request(self, request):
        self.server.routed(request)
        response = await super().handle_async_request(request)
        await response.aread()
        self.server.arrive(request)
        return response


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("replayed"))
    yield server
    server.stop()


@pytest.fixture
def server(shared):
    shared.lost.clear()
    shared.paths.clear()
    return shared


@pytest.fixture
def client(server):
    with Client("http://127.0.0.1:9", transport=Blocking(server)) as client:
        client.modules.create(MODULE, CONFIG, seed=0)
        yield client


@pytest.fixture
def whole(client):
    return client.forward(MODULE, X).output


def outputs(session, start, stop):
    return np.concatenate([session.step(X[:, at : at + 1]).output for at in range(start, stop)], 1)


# ── replay ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_open_whose_reply_was_lost_is_repeated(server, client, whole):
    server.lost.append("/sessions")
    with client.sessions.open(MODULE) as session:
        np.testing.assert_allclose(session.step(X[:, :5]).output, whole[:, :5], **CLOSE)
    assert not server.lost
    assert [path.endswith("/sessions") for path in server.paths].count(True) == 2


def test_a_step_is_replayed_whose_reply_was_lost_and_cannot_come_again(server, client, monkeypatch):
    with client.sessions.open(MODULE, policy={"name": "window_sinks", "window": 4}) as session:
        expected = outputs(session, 0, 12)
    monkeypatch.setattr(live_sessions, "_KEPT_BYTES", 0)  # so that every reply is too large
    with client.sessions.open(MODULE, policy={"name": "window_sinks", "window": 4}) as session:
        found = [outputs(session, 0, 9)]
        server.lost.append("/step")
        found.append(outputs(session, 9, 12))
        assert session.replays == 1
    np.testing.assert_allclose(np.concatenate(found, 1), expected, **CLOSE)


@pytest.mark.long
def test_decoding_goes_on_after_restarts(server, client, whole, caplog):
    with client.sessions.open(MODULE) as session:
        found = [session.step(X[:, :5]).output, outputs(session, 5, 9)]
        server.restart()
        with caplog.at_level(logging.WARNING, "attention_client"):
            found.append(outputs(session, 9, 12))
        fork = session.fork(length=10)
        server.restart()
        found.append(outputs(session, 12, 24))
        np.testing.assert_allclose(np.concatenate(found, 1), whole, **CLOSE)
        np.testing.assert_allclose(outputs(fork, 10, 24), whole[:, 10:], **CLOSE)
        assert (session.replays, fork.replays, session.length, fork.length) == (2, 1, 24, 24)
        fork.close()
    assert "restarted" in caplog.text
    assert "replayed 9 tokens" in caplog.text
    replayed = [path for path in server.paths if path.endswith("/step")]
    assert len(replayed) == 1 + 4 + (1 + 1 + 3) + (1 + 1 + 12) + (1 + 1 + 14)  # each replay is a 410 and one large step


@pytest.mark.slow
async def test_an_awaited_session_goes_on_too(server, client, whole):
    async with AsyncClient("http://127.0.0.1:9", transport=Awaited(server)) as own:
        async with own.sessions.open(MODULE, keep_bytes=100, spill=True) as session:
            found = [(await session.step(X[:, at : at + 1])).output for at in range(12)]
            await asyncio.to_thread(server.restart)
            found += [(await session.step(X[:, at : at + 1])).output for at in range(12, 24)]
            assert session.replays == 1
        opened = await own.sessions.open(MODULE)
        await opened.close()
        with pytest.raises(SessionGone):
            await own.sessions.get(opened.id)
    np.testing.assert_allclose(np.concatenate(found, 1), whole, **CLOSE)


def test_truncated_reordered_edited_and_replaced_pasts_come_back(server, client):
    def decode(session, crash):
        session.step(np.concatenate([X[:, :6], X[:, 6:12]]))
        session.truncate(4)
        crash()
        session.step(np.stack([X[0, 4:6], X[0, 1:3]]), edits=[{"tap": "v", "heads": [1], "scale": 0.5}])
        crash()
        session.reorder([1, 1, 0])
        session.step(X[:, 6:9].reshape(3, 1, 8), key=X[:, 9:12].reshape(3, 1, 8))
        crash()
        found = [session.step(X[:, 9:12].reshape(3, 1, 8)).output]
        held = session.cache()
        session.replace_cache(held.past_key[:, :, 2:] * 0.5, held.past_value[:, :, 2:])
        crash()
        return [*found, session.step(X[:, 12:15].reshape(3, 1, 8)).output]

    with client.sessions.open(MODULE, sequences=2) as steady, client.sessions.open(MODULE, sequences=2) as crashing:
        expected = decode(steady, lambda: None)
        found = decode(crashing, lambda: forget(client, crashing))
        assert (crashing.replays, crashing.length, crashing.sequences) == (4, steady.length, 3)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, **CLOSE)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_any_course_of_a_session_comes_back(client, seed):
    """Two sessions go the same random way; one of them is lost again and again."""
    rng = np.random.default_rng(seed)
    spill = bool(rng.integers(2))
    steady = client.sessions.open(MODULE, sequences=2)
    losing = client.sessions.open(MODULE, sequences=2, keep_bytes=300 if spill else 2**20, spill=spill)
    for _ in range(25):
        kind, count = rng.choice(["step", "step", "edited", "truncate", "reorder", "fork", "lose"]), rng.integers(1, 4)
        more = rng.standard_normal((steady.sequences, count, 8)).astype(np.float32)
        length, rows = int(rng.integers(0, steady.length + 1)), rng.integers(0, steady.sequences, 2).tolist()
        if kind == "lose":
            forget(client, losing)
            continue
        if kind == "fork":
            forks = [each.fork(length) for each in (steady, losing)]
            steady.close()
            losing.close()
            steady, losing = forks
        for each in (steady, losing):
            if kind == "step":
                each.step(more, return_=["lse"])
            elif kind == "edited":
                each.step(more, edits=[{"tap": "k", "heads": [0], "scale": 0.5}])
            elif kind == "truncate":
                each.truncate(length)
            elif kind == "reorder":
                each.reorder(rows)
    forget(client, losing)
    held, expected = losing.cache(), steady.cache()
    assert (losing.length, losing.sequences) == (steady.length, steady.sequences)
    np.testing.assert_allclose(held.past_key, expected.past_key, **CLOSE)
    np.testing.assert_allclose(held.past_value, expected.past_value, **CLOSE)
    steady.close()
    losing.close()


def forget(client, session):
    """Let the server have lost a session: its id is now one that no server knows."""
    with suppress(SessionNotFound):
        client.sessions.delete(session.id)
    session._flow.id = "0" * 8


@pytest.mark.parametrize(
    "policy",
    [{"name": "heavy_hitters", "heavy": 3, "window": 2}, {"name": "snap_kv", "keep": 3, "window": 2, "kernel": 3}],
)
def test_a_policy_drops_the_same_tokens_again(client, policy):
    def decode(session, lose):
        session.step(X[:, :9])
        session.step(X[:, 9:12])
        lose()
        outputs(session, 12, 15)
        lose()
        return session.cache().past_key, session.info().held, session.length

    with client.sessions.open(MODULE, policy=policy) as steady, client.sessions.open(MODULE, policy=policy) as losing:
        expected = decode(steady, lambda: None)
        found = decode(losing, lambda: forget(client, losing))
    assert found[1:] == expected[1:]
    assert found[1] < found[2] == 15
    np.testing.assert_allclose(found[0], expected[0], **CLOSE)


def test_a_session_from_a_past_begins_with_it_again(server, client, whole):
    with client.sessions.open(MODULE) as first:
        first.step(X[:, :10])
        held = first.cache()
    session = client.sessions.open(MODULE, past_key=held.past_key, past_value=held.past_value)
    session.step(X[:, 10:12])
    forget(client, session)
    np.testing.assert_allclose(
        session.weights(X[:, 12:13]).weights, client.weights(MODULE, X).weights[:, :, 12:13, :13], **CLOSE
    )
    np.testing.assert_allclose(outputs(session, 12, 14), whole[:, 12:14], **CLOSE)
    session.close()


@pytest.mark.slow
def test_expiry_is_not_noticed(client, whole):
    with client.sessions.open(MODULE, ttl_s=0.4) as session:
        session.step(X[:, :10])
        time.sleep(0.6)
        np.testing.assert_allclose(outputs(session, 10, 12), whole[:, 10:12], **CLOSE)
        assert session.replays >= 1


@pytest.mark.slow
def test_eviction_is_not_noticed(tmp_path, whole):
    with (
        live_server(tmp_path, memory_budget=2**22, session_share=0.05) as url,
        Client(url) as client,
    ):
        client.modules.create(MODULE, CONFIG, seed=0)
        sessions = [client.sessions.open(MODULE, sequences=4) for _ in range(40)]
        rows = np.repeat(X, 4, axis=0)
        for session in sessions:
            session.step(rows[:, :10])
        ends = [session.step(rows[:, 10:12]).output for session in sessions]
        for output in ends:
            np.testing.assert_allclose(output, np.repeat(whole[:, 10:12], 4, axis=0), **CLOSE)
        assert sum(session.replays for session in sessions) > 10


# ── lost replies ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_whose_reply_was_lost_is_appended_once(server, client, whole):
    with client.sessions.open(MODULE) as session:
        session.step(X[:, :5])
        server.lost += ["/step", "/fork", "/truncate"]
        found = outputs(session, 5, 9)
        fork = session.fork()
        fork.truncate(8)
        assert (server.lost, session.length, fork.length, session.replays) == ([], 9, 8, 0)
        np.testing.assert_allclose(found, whole[:, 5:9], **CLOSE)
        np.testing.assert_allclose(outputs(fork, 8, 10), whole[:, 8:10], **CLOSE)
        fork.close()


def test_after_a_lost_reorder_the_past_is_computed_again(server, client):
    with client.sessions.open(MODULE, sequences=2) as session:
        session.step(np.concatenate([X[:, :6], X[:, 6:12]]))
        expected = session.fork()
        expected.reorder([1, 1])
        server.lost.append("/reorder")
        session.reorder([1, 1])
        assert session.replays == 1
        for each in (session, expected):
            each.step(X[:, 12:14].reshape(2, 1, 8))
        np.testing.assert_allclose(session.cache().past_key, expected.cache().past_key, **CLOSE)
        expected.close()


def test_a_plain_step_is_repeated_only_under_a_name(server, client):
    session = client.sessions.create(MODULE).session
    server.lost.append("/step")
    with pytest.raises(ConnectionFailed):
        client.sessions.step(session, X[:, :1])
    assert client.sessions.get(session).length == 1
    server.lost.append("/step")
    assert client.sessions.step(session, X[:, :1], step="mine", at=1).length == 2
    client.sessions.delete(session)


# ── what cannot be replayed ──────────────────────────────────────────────────────────────────────────────────────────


def test_what_cannot_be_replayed_says_why(client):
    session = client.sessions.open(MODULE)
    client.sessions.delete(session.id)
    with pytest.raises(SessionGone) as caught:
        session.step(X[:, :1])
    assert caught.value.facts["reason"] == "deleted"
    session.close()
    small = client.sessions.open(MODULE, keep_bytes=64)
    small.step(X[:, :9])
    forget(client, small)
    with pytest.raises(SessionGone, match="keep_bytes=64"):
        small.step(X[:, :1])
    source = client.sessions.open(MODULE)
    other = client.sessions.open(MODULE, from_={"session": source.id})
    forget(client, other)
    with pytest.raises(SessionGone, match="another session"):
        other.info()
    client.modules.create("changing", CONFIG, seed=1)
    changing = client.sessions.open("changing")
    changing.step(X[:, :1])
    parameters = {one.name: client.modules.parameter("changing", one.name).value * 2
                  for one in client.modules.parameters("changing").parameters}  # fmt: skip
    client.modules.replace_parameters("changing", parameters)
    assert changing.step(X[:, :1]).length == 2
    forget(client, changing)
    with pytest.raises(SessionGone, match="module has changed"):
        changing.step(X[:, :1])
    client.modules.delete("changing")


def test_another_writer_is_noticed_and_bad_arguments_send_nothing(server, client):
    with client.sessions.open(MODULE) as session:
        session.step(X[:, :2])
        client.sessions.step(session.id, X[:, :1])
        with pytest.raises(LengthMismatch) as caught:
            session.step(X[:, :1])
        assert (caught.value.facts["expected"], caught.value.facts["actual"]) == (2, 3)
        server.paths.clear()
        with pytest.raises(InvalidRequest, match="past_key"):
            session.step(X[:, :1], past_key=X)
        with pytest.raises(TypeError, match="nonsense"):
            session.step(X[:, :1], nonsense=1)
        assert (session.length, server.paths) == (2, [])


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_steps_on_a_stream_survive_its_end(tmp_path, whole):
    with live_server(tmp_path) as url, Client(url) as client:
        client.modules.create(MODULE, CONFIG, seed=0)
        with client.sessions.open(MODULE) as session, session.stream() as stream:
            found = [outputs(session, 0, 4)]
            stream._connection.socket.close()
            found.append(outputs(session, 4, 8))
            forget(client, session)
            found.append(outputs(session, 8, 24))
            np.testing.assert_allclose(np.concatenate(found, 1), whole, **CLOSE)
            assert session.replays == 1


# ── form ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["step", "weights", "attribution", "effects", "gradients"])
def test_a_session_takes_the_arguments_of_the_calls_about_its_id(name):
    mine, other = (dict(inspect.signature(getattr(owner, name)).parameters) for owner in (Session, Sessions))
    for beside in {"id", "at", "step"} & other.keys():
        del other[beside]
    assert mine == other
