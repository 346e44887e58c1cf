"""Copies of a request's body: one, into one buffer, whose memory tensors are. Copies of a reply: one, in parts,
or none if the server takes views."""

import asyncio
from unittest.mock import patch

import numpy as np
import pytest

from attention_contract.schemas.attention import ForwardReply, ForwardRequest
from attention_contract.schemas.modules import CreateModule, ModuleConfig
from attention_contract.wire import SAFETENSORS, from_body, to_body
from attention_service.api.app import create_app
from attention_service.api.bodies import request_body
from attention_service.api.http_limits.connection_limits import BODY_VIEWS
from attention_service.settings import Settings

QUERY = np.random.default_rng(0).standard_normal((4, 512, 64), np.float32)
BODY = b"".join(to_body(ForwardRequest(query=QUERY), SAFETENSORS, "request"))
HEADERS = [(b"content-type", SAFETENSORS.encode())]


def exchange(tmp_path, messages, headers, extensions):
    """What was read of a body of these messages, and the pieces of the answer."""
    app = create_app(Settings(models_dir=tmp_path, calibrate=False, threads=1))
    seen = []

    def noted(model, body, *how):
        request = from_body(model, body, *how)
        seen.append((request, body))
        return request

    coming = [{"type": "http.request", "body": body, "more_body": True} for body in messages]
    coming[-1]["more_body"] = False
    sent = []

    async def receive():
        return coming.pop(0) if coming else await asyncio.get_running_loop().create_future()

    async def send(message):
        sent.append(message.get("body", b""))

    async def play():
        async with app.router.lifespan_context(app):
            engine = app.state.engine
            while engine.state == "loading":
                await asyncio.sleep(0.01)
            await engine.modules.create(CreateModule(name="m", config=ModuleConfig(d_model=64, num_heads=4), seed=0))
            scope = {"type": "http", "method": "POST", "path": "/v1/modules/m/forward", "query_string": b""}
            scope |= {"headers": [*HEADERS, *headers], "http_version": "1.1", "extensions": extensions}
            await app(scope, receive, send)

    with patch.object(request_body, "from_body", noted):
        asyncio.run(play())
    ((request, body),) = seen
    return request, body, sent


@pytest.mark.sampled(pieces=1, stated=1, views=1)
@pytest.mark.parametrize(("pieces", "stated", "views"), [(1, True, True), (16, True, False), (16, False, False)])
def test_tensors_are_views_of_the_body_and_the_reply_is_sent_in_parts(tmp_path, pieces, stated, views):
    size = -(-len(BODY) // pieces)
    messages = [BODY[at : at + size] for at in range(0, len(BODY), size)]
    headers = [(b"content-length", str(len(BODY)).encode())] if stated else []
    request, body, sent = exchange(tmp_path, messages, headers, {BODY_VIEWS: {}} if views else {})
    received = np.frombuffer(body, np.uint8)
    assert np.shares_memory(request.query, received)
    assert np.array_equal(request.query, QUERY)
    assert np.shares_memory(received, np.frombuffer(messages[0], np.uint8)) == (pieces == 1)  # not even once
    assert {type(piece) for piece in sent} == ({bytes, memoryview} if views else {bytes})
    assert max(map(len, sent)) < QUERY.nbytes  # the whole reply is never copied at once
    assert len(sent[-2]) == 2**16  # what uvicorn may hold when the response has ended
    reply = from_body(ForwardReply, b"".join(sent), SAFETENSORS, "reply")
    assert reply.output.shape == QUERY.shape
