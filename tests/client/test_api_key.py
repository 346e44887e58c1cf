"""The API key: sent with every request and every handshake, and never shown."""

import copy
import logging
import pickle

import httpx
import pytest
from pydantic import SecretStr

from attention_client import AsyncClient, Client, Unauthorized
from attention_client.connection_settings import KEY_VARIABLE
from tests.client.cli.command_line import invoke
from tests.client.service import URL, Played, ask, both

KEY = "attn_0123456789-secret"


@pytest.mark.parametrize("given", [KEY, SecretStr(KEY)])
def test_it_goes_with_every_request(kind, given):
    played = Played()
    both(kind, URL, lambda client: client.server.info(), transport=played.transport, api_key=given)
    assert played.requests[0].headers["authorization"] == f"Bearer {KEY}"


def test_the_environment_names_it_and_an_argument_wins(kind, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    sent = []
    for options in ({}, {"api_key": "other"}, {"headers": {"Authorization": "Basic x"}}):
        played = Played()
        both(kind, URL, lambda client: client.server.info(), transport=played.transport, **options)
        sent.append(played.requests[0].headers["authorization"])
    assert sent == [f"Bearer {KEY}", "Bearer other", "Basic x"]


def test_none_is_sent_without_one():
    played = Played()
    ask("sync", played, "server_info")
    assert "authorization" not in played.requests[0].headers


def test_a_client_of_ones_own_has_its_own_authentication(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    played = Played()
    with httpx.Client(base_url=URL, transport=played.transport) as http:
        Client(http=http).server.info()
        with pytest.raises(ValueError, match="api_key: cannot be combined with http"):
            Client(http=http, api_key=KEY)
    assert "authorization" not in played.requests[0].headers


@pytest.mark.parametrize("wrong", ["two words", "line\nbreak", "ключ"])
def test_one_that_no_header_can_carry_is_refused_without_showing_it(wrong):
    with pytest.raises(ValueError, match="api_key: expected only visible ASCII") as caught:
        Client(URL, api_key=wrong)
    assert wrong not in str(caught.value)


def test_nothing_shows_it(caplog):
    caplog.set_level(logging.DEBUG)
    refusal = httpx.Response(401, json={"code": "unauthorized", "detail": "no"})
    with Client(URL, api_key=KEY, transport=Played(refusal).transport) as client, pytest.raises(Unauthorized) as caught:
        client.server.info()
    with Client(URL, api_key=KEY) as client:
        settings = client.stream_settings()
        patient = client.with_options(timeout=5)
        shown = [repr(caught.value), repr(client), str(client.settings), repr(settings), str(patient.settings)]
        stream = client.sessions.stream()
        shown += [repr(stream), str(vars(stream)), caplog.text]
    assert settings.headers["authorization"] == f"Bearer {KEY}"
    assert not [text for text in shown if KEY in text]


async def test_a_stream_sends_it_and_does_not_log_it(caplog, server):
    caplog.set_level(logging.DEBUG)
    with Client(server, api_key=KEY) as client, client.sessions.stream():
        pass
    async with AsyncClient(server, api_key=KEY) as client, client.sessions.stream():
        pass
    assert KEY not in caplog.text


def test_a_pickle_of_a_connection_has_none():
    connection = pytest.importorskip("attention_client.torch.connection").Connection
    with Client(URL, api_key=KEY) as client:
        here = connection(client)
        assert KEY.encode() not in pickle.dumps(here)
        assert copy.deepcopy(here).client() is client
        assert KEY not in repr(here)


def test_the_command_reads_the_environment(monkeypatch):
    played = Played()
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr("attention_client.client.httpx.Client", lambda **more: _playing(played, more))
    result = invoke(["--url", URL, "--retries", "0", "info"])
    assert result.exit_code == 0
    assert played.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert KEY not in result.output


_httpx_client = httpx.Client


def _playing(played, more):
    return _httpx_client(**{**more, "transport": played.transport})
