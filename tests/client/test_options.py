"""Settings of one call, of a copy of a client, and what an answer tells about its request."""

import logging

import httpx
import pytest

from attention_client import Client, ConnectionFailed
from tests.client.service import URL, X, ask


def test_a_call_has_settings_of_its_own(kind, played):
    reply = ask(kind, played, "forward", "demo", X, timeout=2.5, headers={"X-Team": "blue"})
    (request,) = played.requests
    assert request.headers["X-Team"] == "blue"
    assert 2 < float(request.headers["Prefer"].removeprefix("wait=")) <= 2.5
    assert reply.output is not None


def test_without_a_timeout_no_deadline_is_sent(kind, played):
    ask(kind, played, "get_module", "demo", timeout=None)
    assert "Prefer" not in played.requests[0].headers


def answering(request):
    return httpx.Response(200, json={"status": "live", "modules": 0}, headers={"X-Request-ID": "a1"})


def test_a_copy_adds_its_headers_and_leaves_the_connections_open():
    seen = []

    def handler(request):
        seen.append(dict(request.headers))
        return answering(request)

    with Client(URL, transport=httpx.MockTransport(handler), headers={"X-One": "1"}) as client:
        with client.with_options(headers={"X-Two": "2"}, timeout=5) as other:
            other.server.live()
        client.server.live()
    assert (seen[0]["x-one"], seen[0]["x-two"]) == ("1", "2")
    assert float(seen[0]["prefer"].removeprefix("wait=")) <= 5 < float(seen[1]["prefer"].removeprefix("wait="))
    assert "x-two" not in seen[1]


def test_retries_of_one_call():
    tries = []

    def handler(request):
        tries.append(request)
        raise httpx.ConnectError("no")

    client = Client(URL, transport=httpx.MockTransport(handler), retries=2)
    with pytest.raises(ConnectionFailed):
        client.server.info(retries=0)
    assert len(tries) == 1


def test_an_unknown_setting_is_refused():
    client = Client(URL, transport=httpx.MockTransport(answering))
    with pytest.raises(TypeError, match="the options of a call are timeout, retries, headers"):
        client.server.live(tries=3)
    for timeout in (0, 1e9, float("inf"), float("nan")):  # more milliseconds than a socket counts
        with pytest.raises(ValueError, match="timeout"):
            client.with_options(timeout=timeout)


def test_a_reply_carries_its_requests_id_beside_its_fields():
    client = Client(URL, transport=httpx.MockTransport(answering))
    reply = client.server.live()
    assert reply.request_id == "a1"
    assert reply == type(reply)(status="live", modules=0)
    assert reply.model_dump() == {"status": "live", "modules": 0, "modules_left_out": 0}


def test_a_call_is_logged_in_one_line_on_the_level_debug(caplog):
    client = Client(URL, transport=httpx.MockTransport(answering))
    with caplog.at_level(logging.INFO, "attention_client"):
        client.server.live()
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "attention_client"):
        client.server.live()
    (record,) = caplog.records
    assert "GET /health/live 200" in record.getMessage()
    assert record.getMessage().endswith("request_id=a1 attempts=1")
