"""The requests of a call, its repeats and its deadline."""

import socket
import threading
import time
from contextlib import suppress

import httpx
import numpy as np
import pytest

from attention_client import (
    Client,
    ConnectionFailed,
    DeadlineExceeded,
    Draining,
    Loading,
    Overloaded,
    UnexpectedReply,
    retry,
)
from attention_contract import errors
from attention_contract.operations import OPERATIONS
from attention_contract.wire import JSON, SAFETENSORS
from tests.client.service import EXAMPLES, Played, X, ask, both
from tests.client.tcp import read_request, stubborn


def refusal(error, **headers):
    """The answer that carries an error."""
    fault = error("for the test")
    headers = {"content-type": errors.PROBLEM_MEDIA_TYPE, **{k.replace("_", "-"): v for k, v in headers.items()}}
    return httpx.Response(fault.status, json=fault.to_problem(), headers=headers)


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("media_type", "expected"), [("safetensors", SAFETENSORS), ("json", JSON)])
def test_tensors_travel_in_the_form_that_was_chosen(kind, played, media_type, expected):
    ask(kind, played, "forward", "demo", X, media_type=media_type, headers={"Authorization": "Bearer secret"})
    headers = played.requests[0].headers
    assert headers["content-type"] == headers["accept"] == expected
    assert headers["content-length"] == str(len(played.requests[0].content))
    assert "transfer-encoding" not in headers
    assert headers["authorization"] == "Bearer secret"
    assert headers["user-agent"].startswith("attention-client/")


def test_operations_without_tensors_speak_json(kind, played):
    ask(kind, played, "complexity", "demo", 4)
    assert played.requests[0].headers["content-type"] == played.requests[0].headers["accept"] == JSON


def test_a_version_guards_a_deletion(kind, played):
    assert ask(kind, played, "delete_module", "demo", "abc") is None
    assert played.requests[0].headers["if-match"] == '"abc"'


def test_names_are_quoted_into_the_path(kind, played):
    played.first = [httpx.Response(404)]
    with pytest.raises(errors.NotFound):
        ask(kind, played, "get_module", "a%b ?")
    assert played.requests[0].url.raw_path == b"/v1/modules/a%25b%20%3F"


def test_the_environment_names_the_server(monkeypatch, played):
    monkeypatch.setenv("ATTENTION_URL", "http://elsewhere.test/prefix/")
    nobody = httpx.MockTransport(lambda request: httpx.Response(404))
    with Client(transport=nobody) as client, pytest.raises(errors.NotFound) as caught:
        client.server.info()
    assert "http://elsewhere.test/prefix/v1 " in caught.value.detail


# ── retries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        httpx.RemoteProtocolError("closed"),
        refusal(errors.Overloaded),
        refusal(errors.Loading),
        refusal(errors.Draining),
        httpx.Response(503, html="<h1>proxy</h1>"),
        httpx.Response(502, html="<h1>proxy</h1>"),
        httpx.Response(500, text="Internal Server Error"),
    ],
    ids=str,
)
def test_a_transient_failure_is_tried_again_with_the_same_body(kind, failure):
    played = Played(failure, failure)
    ask(kind, played, "forward", "demo", X)
    assert len(played.requests) == 3
    assert len({request.content for request in played.requests}) == 1


LASTING = [error for error in errors.error_classes().values() if error.status not in {0, 429, 503}]
LASTING.append(errors.DeadlineExceeded)


@pytest.mark.parametrize("error", LASTING, ids=lambda error: error.code)
def test_a_lasting_failure_is_raised_at_once(kind, error):
    played = Played(refusal(error))
    with pytest.raises(error) as caught:
        ask(kind, played, "forward", "demo", X)
    assert type(caught.value) is error
    assert len(played.requests) == 1


def test_the_last_failure_is_raised_when_the_retries_are_used_up(kind):
    played = Played(*[refusal(errors.Loading)] * 5)
    with pytest.raises(Loading):
        ask(kind, played, "server_info", retries=2)
    assert len(played.requests) == 3


def test_a_server_that_comes_back_is_waited_for(kind, monkeypatch):
    """The waits add up to 30 seconds at least, whatever the server asks for, and end before the default timeout."""
    monkeypatch.undo()
    for failure in (
        ConnectionFailed("refused", sent=False),
        Loading("soon", retry_after=1),
        Draining("restarting", retry_after=5),
        errors.Unavailable("a proxy's 503"),
    ):
        attempts, waits = retry.Attempts(OPERATIONS[0], 60.0, None), []
        with suppress(type(failure)):
            waits.extend(attempts.wait_after(failure) for _ in range(1000))
        assert 30 <= sum(waits) < 50


@pytest.mark.sampled(kind=1)
def test_a_server_that_restarts_answers_in_the_end(kind):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()

    def serve():
        time.sleep(0.3)
        with socket.create_server(address) as listener:
            connection, _ = listener.accept()
            with connection:
                read_request(connection)
                connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    both(kind, f"http://127.0.0.1:{address[1]}", lambda client: client.modules.delete("demo"))
    thread.join(5)


@pytest.mark.parametrize(
    ("failure", "error"),
    [(httpx.ReadError("reset"), ConnectionFailed), (httpx.Response(502, text="reset"), UnexpectedReply)],
)
def test_a_request_that_breaks_its_connections_is_not_repeated_for_long(kind, failure, error):
    played = Played(*[failure] * 20)
    with pytest.raises(error, match="reset"):
        ask(kind, played, "forward", "demo", X)
    assert len(played.requests) == 1 + retry.MAX_BREAKS


def test_repeats_are_logged(kind, caplog, capsys):
    ask(kind, Played(refusal(errors.Loading)), "server_info")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("attention_client", "WARNING")
    assert "server_info: for the test; trying again in" in record.getMessage()
    assert capsys.readouterr().out == ""


@pytest.mark.sampled
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize(
    "failure", [httpx.ReadError("reset"), httpx.Response(500, text="reset")], ids=["broken", "500"]
)
def test_only_what_is_safe_to_repeat_is_repeated_after_a_lost_reply(operation, failure):
    args, kwargs, _ = EXAMPLES[operation.name]
    played = Played(failure)
    if operation.safe_to_repeat or "step" in kwargs:  # a step with a name is appended once
        ask("sync", played, operation.name, *args, **kwargs)
        assert len(played.requests) == 2
    else:
        with pytest.raises((ConnectionFailed, UnexpectedReply), match="reset"):
            ask("sync", played, operation.name, *args, **kwargs)
        assert len(played.requests) == 1


def test_what_is_not_safe_to_repeat_is_repeated_where_it_was_never_sent(kind):
    played = Played(httpx.ConnectError("refused"), refusal(errors.Draining))
    ask(kind, played, "delete_module", "demo")
    assert len(played.requests) == 3


def test_readiness_is_answered_as_it_is(kind):
    played = Played(refusal(errors.Draining, retry_after="5"))
    with pytest.raises(Draining):
        ask(kind, played, "health_ready")
    assert len(played.requests) == 1


@pytest.mark.parametrize("fault", [httpx.LocalProtocolError("bad header"), httpx.UnsupportedProtocol("no scheme")])
def test_what_cannot_be_sent_is_not_tried_again(kind, fault):
    played = Played(fault)
    with pytest.raises(errors.InvalidRequest, match=f"cannot be sent: {fault}") as caught:
        ask(kind, played, "server_info")
    assert "sent" not in caught.value.facts
    assert len(played.requests) == 1


def test_a_broken_encoding_is_reported_with_the_status_that_came(kind):
    played = Played()
    headers = {"content-encoding": "gzip"}
    played.transport = httpx.MockTransport(
        lambda request: httpx.Response(404, headers=headers, stream=httpx.ByteStream(b"no gzip"))
    )
    with pytest.raises(UnexpectedReply, match="encoding is broken") as caught:
        ask(kind, played, "server_info")
    assert caught.value.facts["answered"] == 404


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seconds", ["0", "0.2"])
def test_retry_after_is_waited_for(kind, seconds, monkeypatch):
    monkeypatch.setattr(retry, "WAIT_INITIAL", 20.0)  # only the time asked for counts
    monkeypatch.setattr(retry, "WAIT_MAX", 20.0)
    played = Played(refusal(errors.Overloaded, retry_after=seconds))
    started = time.monotonic()
    ask(kind, played, "server_info")
    assert float(seconds) <= time.monotonic() - started < float(seconds) + 10


@pytest.mark.parametrize("value", ["soon", [1], {}, None, -5])
def test_a_time_to_wait_that_is_none_is_passed_over(kind, value):
    fault = errors.Overloaded("for the test", retry_after=value)
    played = Played(httpx.Response(429, json=fault.to_problem(), headers={"content-type": errors.PROBLEM_MEDIA_TYPE}))
    assert ask(kind, played, "server_info").name == "attention-service"
    assert len(played.requests) == 2


def test_a_retry_after_beyond_the_deadline_is_not_waited_for(kind):
    played = Played(refusal(errors.Overloaded, retry_after="30"))
    started = time.monotonic()
    with pytest.raises(Overloaded) as caught:
        ask(kind, played, "server_info", timeout=20)
    assert time.monotonic() - started < 10
    assert caught.value.facts["retry_after"] == 30


def test_retry_after_may_be_a_date(kind):
    played = Played(refusal(errors.Overloaded, retry_after="Fri, 31 Dec 2999 23:59:59 GMT"))
    with pytest.raises(Overloaded) as caught:
        ask(kind, played, "server_info")
    assert caught.value.facts["retry_after"] > 1e9


@pytest.mark.sampled(kind=1)
def test_the_deadline_holds_over_all_attempts(kind, monkeypatch):
    monkeypatch.setattr(retry, "WAIT_MAX", 4.0)
    played = Played(*[refusal(errors.Loading)] * 1000)
    started = time.monotonic()
    with pytest.raises((DeadlineExceeded, Loading)):
        ask(kind, played, "server_info", timeout=0.3, retries=1000)
    assert time.monotonic() - started < 30
    assert len(played.requests) > 1


def silence(connection, over):
    over.wait(20)


def trickle(connection, over):
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n")
    while not over.wait(0.02):
        connection.sendall(b" ")


def slow_reader(connection, over):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    while not over.wait(0.02):
        connection.recv(4096)


@pytest.mark.sampled
@pytest.mark.parametrize("talk", [silence, trickle, slow_reader])
def test_the_deadline_holds_against_a_server_that_is_slow(kind, talk):
    with stubborn(talk) as url:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"/forward did not end within 0\.4 s"):
            both(kind, url, lambda client: client.forward("demo", np.zeros((1, 2**22), np.float32)), timeout=0.4)
        assert time.monotonic() - started < 10


def test_the_deadline_names_the_request_and_the_load_that_may_come_first(kind):
    with stubborn(silence) as url, pytest.raises(DeadlineExceeded) as late:
        both(kind, url, lambda client: client.models.forward("tiny", "the cat"), timeout=0.2)
    assert late.value.detail.startswith("POST /v1/models/{model}/forward did not end within 0.2 s")
    assert "GET /v1/models/{model} tells its state and progress" in late.value.detail
    assert "model_forward" not in late.value.detail
