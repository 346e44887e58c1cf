"""Requests from inside the process: what the application sees of them, and of a caller who leaves."""

import asyncio

import pytest

from attention_contract.errors import InvalidRequest, ModelNotFound
from attention_contract.operations import get_model, model_weights
from attention_contract.wire import to_json
from attention_service.api.doors.agents.own_requests import OwnRequests

MESSAGE = {
    "headers": [(b"authorization", b"Bearer k"), (b"cookie", b"c"), (b"origin", b"https://page.test")],
    "client": ("10.0.0.7", 4711),
}


async def test_the_application_sees_the_caller_of_the_message_and_nothing_else_of_it():
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope, body=(await receive())["body"])
        await send({"type": "http.response.start", "status": 404, "headers": []})
        problem = ModelNotFound("there is none").to_problem()
        await send({"type": "http.response.body", "body": to_json(problem)})

    with pytest.raises(ModelNotFound, match="there is none"):
        await OwnRequests(app, MESSAGE).ask(model_weights, {"text": "x"}, model="tiny")
    assert (seen["method"], seen["path"], seen["client"]) == ("POST", "/v1/models/tiny/weights", ("10.0.0.7", 4711))
    assert b'"text":"x"' in seen["body"]
    names = {name for name, _ in seen["headers"]}
    assert names == {b"authorization", b"host", b"accept", b"content-type", b"content-length"}


async def test_fields_that_are_not_valid_are_not_sent():
    async def app(scope, receive, send):
        raise AssertionError

    with pytest.raises(InvalidRequest, match="layers"):
        await OwnRequests(app, MESSAGE).ask(model_weights, {"text": "x", "layers": "some"}, model="tiny")


async def test_a_caller_who_leaves_is_seen_to_disconnect():
    began, ended = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send):
        await receive()
        began.set()
        assert await receive() == {"type": "http.disconnect"}
        ended.set()

    task = asyncio.create_task(OwnRequests(app, MESSAGE).ask(get_model, model="tiny"))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 60)
