"""Health on a port of its own: what the server's own port answers, also while that answers nobody."""

import socket
import threading
import time
from contextlib import ExitStack
from unittest.mock import patch

import httpx
import pytest

from attention_service.api.http_limits import health_listener
from attention_service.api.http_limits.connection_limits import ConnectionLimits
from attention_service.runtime.scheduling.request_runner import RequestRunner
from tests.conftest import live_server


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    port = free_port()
    settings = {"health_port": port, "max_connections_per_address": 8}
    with live_server(tmp_path_factory.mktemp("models"), **settings) as url:
        yield url, f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("path", ["/health/live", "/health/ready"])
def test_it_answers_what_the_server_answers(urls, path):
    own, other = (httpx.get(url + path) for url in urls)
    assert own.status_code == other.status_code == 200
    assert own.json() == other.json()


def test_it_answers_nothing_else(urls):
    answer = httpx.get(f"{urls[1]}/v1")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert httpx.head(f"{urls[1]}/health/live").status_code == 200


def test_it_answers_while_the_event_loop_does_not(urls):
    began, goes_on = threading.Event(), threading.Event()

    def held(_):
        if threading.current_thread().name != "health":
            began.set()
            goes_on.wait(60)

    with patch.object(RequestRunner, "check_ready", held):
        asker = threading.Thread(target=httpx.get, args=(f"{urls[0]}/health/ready",), kwargs={"timeout": 60})
        asker.start()
        assert began.wait(60)
        try:
            assert httpx.get(f"{urls[1]}/health/live", timeout=30).status_code == 200
        finally:
            goes_on.set()
            asker.join()


def test_it_answers_when_an_address_has_all_its_connections(urls):
    with ExitStack() as stack:
        address = urls[0].removeprefix("http://").split(":")
        for _ in range(8):
            stack.enter_context(socket.create_connection((address[0], int(address[1]))))
        time.sleep(0.1)
        assert httpx.get(f"{urls[0]}/health/live").status_code == 429
        assert httpx.get(f"{urls[1]}/health/live").status_code == 200


def test_a_loop_that_does_not_turn_is_dead(urls, monkeypatch):
    monkeypatch.setattr(health_listener, "LOOP_DEAD_S", -1.0)
    answer = httpx.get(f"{urls[1]}/health/live")
    assert (answer.status_code, answer.json()["code"]) == (503, "stuck")


def test_its_connections_have_limits_too(urls):
    with patch.object(ConnectionLimits, "enter", lambda *_: health_listener.Stuck("too many")):
        assert httpx.get(f"{urls[1]}/health/live").status_code == 503
