"""A server that stops under load: each request is answered, refused in words, or never taken."""

import signal
import socket
import threading
import time

import httpx
import numpy as np
import pytest

from attention_contract.errors import Draining, Loading
from attention_service.api.problems import render
from tests.api.processes import process

BODY = b'{"query": [[[0.5, 0.25], [1.0, -1.0]]], "num_heads": 1}'


class Caller(threading.Thread):
    """Ask on one connection, one request after the other, until the server refuses one."""

    def __init__(self, url, wait_s):
        super().__init__()
        self.url, self.wait_s = url, wait_s
        self.answers = []
        self.lost = None

    def run(self):
        address = httpx.URL(self.url)
        head = b"POST /v1/attention/forward HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = head + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        connection = socket.create_connection((address.host, address.port), timeout=30)
        with connection, connection.makefile("rb") as reader:
            while not self.answers or self.answers[-1][0] == 200:
                try:
                    connection.sendall(request)
                    answer = read_answer(reader)
                except OSError as fault:
                    self.lost = fault
                    return
                if answer is None:
                    self.lost = "closed without an answer"
                    return
                self.answers.append(answer)
                time.sleep(self.wait_s)


def read_answer(reader):
    """The status, the headers and the body of the next answer; None at the end."""
    line = reader.readline()
    if not line:
        return None
    headers = {}
    while field := reader.readline().strip():
        name, _, value = field.partition(b":")
        headers[name.lower()] = value.strip()
    return int(line.split()[1]), headers, reader.read(int(headers.get(b"content-length", b"0")))


@pytest.mark.slow
def test_no_request_is_lost_when_a_server_stops_under_load(tmp_path):
    with process(tmp_path, "--threads", "1", "--log-level", "warning") as (server, url):
        expected = httpx.post(f"{url}/v1/attention/forward", content=BODY, headers={"content-type": "application/json"})
        callers = [Caller(url, wait_s=0.04 * number) for number in range(6)]
        for caller in callers:
            caller.start()
        time.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        for caller in callers:
            caller.join(30)
        assert server.wait(30) == 0
    assert [caller.lost for caller in callers] == [None] * 6
    statuses = set()
    for status, headers, body in (answer for caller in callers for answer in caller.answers):
        statuses.add(status)
        if status == 200:
            np.testing.assert_array_equal(*(np.array(each["output"]) for each in map(loaded, (body, expected.content))))
        else:
            assert status == 503
            assert b'"code":"draining"' in body.replace(b" ", b"")
            assert headers[b"connection"] == b"close"
    assert statuses == {200, 503}


def loaded(body):
    return httpx.Response(200, content=body).json()


def test_a_server_that_stops_asks_for_another_connection():
    assert render(Draining("the server is stopping")).headers["connection"] == "close"
    assert "connection" not in render(Loading("the server starts")).headers
