"""More requests than may wait: refused without their bodies, after some patience, while health checks are answered."""

import time
from contextlib import contextmanager
from threading import Thread
from unittest.mock import patch

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from attention_service.runtime.scheduling import entrance
from attention_service.runtime.scheduling.budget import Budget
from tests.api.talk import problem, received
from tests.api.test_connection_limits import BODY, FORWARD, connected
from tests.conftest import live_server

LARGE = 2**20
JSON = {"content-type": "application/json"}


def head(length):
    """The head of a request of raw attention."""
    lines = b"Host: 127.0.0.1", b"Content-Type: application/json", b"Content-Length: %d" % length
    return b"\r\n".join([b"POST %s HTTP/1.1" % FORWARD.encode(), *lines, b"", b""])


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a server of its own, whose queue these tests fill."""
    with live_server(tmp_path_factory.mktemp("models"), max_queue=3) as address:
        yield address


@contextmanager
def full(patience):
    """Have the queue full, and requests wait at the entrance for so many seconds."""
    with patch.multiple(Budget, is_full=True, open_slots=0), patch.object(entrance, "PATIENCE_S", patience):
        yield


def test_a_refusal_needs_no_byte_of_the_body_and_the_connection_goes_on(url):
    with connected(url) as raw:
        with full(0.1):
            began = time.monotonic()
            raw.sendall(head(length=LARGE))
            answer = received(raw)
            assert time.monotonic() - began >= 0.05  # half of the patience at least, see ``RequestEntrance.wait``
        assert answer.startswith("HTTP/1.1 429 ")
        assert "retry-after: 1\r\n" in answer.lower()
        assert '"code":"overloaded"' in answer.replace(" ", "")
        assert '"limit":3' in answer.replace(" ", "")
        raw.sendall(b" " * LARGE + head(len(BODY)) + BODY)
        assert "HTTP/1.1 " in (following := received(raw))
        assert "429" not in following.splitlines()[0]


def test_a_whole_request_is_refused_as_a_problem_and_counted(url):
    def counted():
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return [
            float(line.split()[1]) for line in lines if line.startswith('attention_refusals_total{code="overloaded"')
        ]

    before = counted()
    with full(0.01):
        refused = httpx.post(url + FORWARD, content=BODY, headers=JSON)
    assert refused.status_code == 429
    assert problem(refused)["code"] == "overloaded"
    assert counted() == [before[0] + 1]


def test_reads_are_answered_while_requests_wait(url):
    with full(5), connected(url) as raw:
        raw.sendall(head(len(BODY)) + BODY)
        for path in ("/health/live", "/health/ready", "/v1", "/v1/modules"):
            assert httpx.get(url + path).status_code == 200


def test_who_waits_is_answered_once_there_is_memory(url):
    answers = []

    def ask():
        answers.append(
            httpx.post(url + FORWARD, json={"query": [[1.0, 0.0]], "key": [[1.0, 0.0]], "value": [[2.0, 3.0]]})
        )

    first, second = Thread(target=ask), Thread(target=ask)
    with full(20):
        first.start()
        time.sleep(0.2)
        assert answers == []
    second.start()
    for each in (first, second):
        each.join(timeout=10)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert all(answer.json()["output"] == [[2.0, 3.0]] for answer in answers), answers[0].text
    log = httpx.get(f"{url}/metrics").text
    assert 'phase="queue"' in log


def test_who_hangs_up_in_line_is_not_begun(url):
    begin, begun = HttpToolsProtocol._start_asgi_task, []

    def spied(line, cycle, app):
        begun.append(cycle.scope["path"])
        begin(line, cycle, app)

    with patch.object(HttpToolsProtocol, "_start_asgi_task", spied):
        with full(20):
            with connected(url) as raw:
                raw.sendall(head(len(BODY)) + BODY)
                time.sleep(0.1)
            time.sleep(0.1)
        httpx.post(f"{url}/v1/attention/weights", content=BODY, headers=JSON)
        assert begun == ["/v1/attention/weights"]
