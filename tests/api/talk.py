"""How the tests of this folder talk to the live server: plain HTTP, as from any language."""

import socket
from typing import Any

import httpx


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """The reply to a request that must succeed."""
    answer = http.post(path, json=body)
    assert answer.status_code < 300, answer.text
    return answer.json()


def refuse(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """The problem document of a request that must be refused."""
    answer = http.post(path, json=body)
    return problem(answer)


def received(connection: socket.socket) -> str:
    """One answer as it came over a connection, whole: its head and its body may come one after the other."""
    came = b""
    while b"\r\n\r\n" not in came:
        came += connection.recv(65536) or _gone()
    head, _, body = came.partition(b"\r\n\r\n")
    (length,) = (int(line[15:]) for line in head.lower().splitlines() if line.startswith(b"content-length:"))
    while len(body) < length:
        body += connection.recv(65536) or _gone()
    return f"{head.decode()}\r\n\r\n{body.decode()}"


def _gone() -> bytes:
    raise ConnectionResetError("the server hung up")


def problem(answer: httpx.Response) -> dict[str, Any]:
    """The problem document of an answer, its form checked."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    document = answer.json()
    assert document["status"] == answer.status_code
    assert document["request_id"] == answer.headers["x-request-id"]
    assert {"type", "title", "detail", "code"} <= set(document)
    return document
