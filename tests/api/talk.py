"""How the tests of this folder talk to the live server: plain HTTP, as from any language."""

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


def problem(answer: httpx.Response) -> dict[str, Any]:
    """The problem document of an answer, its form checked."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    document = answer.json()
    assert document["status"] == answer.status_code
    assert document["request_id"] == answer.headers["x-request-id"]
    assert {"type", "title", "detail", "code"} <= set(document)
    return document
