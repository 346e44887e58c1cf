"""How often a body is copied: its messages once, into one buffer, whose memory tensors are; a reply not at all."""

import asyncio

import numpy as np
import pytest
import torch
import uvicorn
from uvicorn.server import ServerState

from attention_contract.schemas.attention import ForwardReply, ForwardRequest
from attention_contract.schemas.modules import CreateModule, ModuleConfig
from attention_contract.wire import SAFETENSORS, from_body, to_body
from attention_service.api.app import create_app
from attention_service.api.connection import Connection
from attention_service.settings import Settings

QUERY = np.random.default_rng(0).standard_normal((4, 256, 64), np.float32)
BODY = b"".join(to_body(ForwardRequest(query=QUERY), SAFETENSORS, "request"))
HEADERS = [(b"content-type", SAFETENSORS.encode())]


class Reading:
    """In the place of what reads requests: keeps them, and the buffers from which they were read."""

    def __init__(self, forms):
        self._forms = forms
        self.seen = []

    def read(self, model, body):
        request = self._forms.read(model, body)
        self.seen.append((request, body))
        return request


def exchange(tmp_path, messages, headers):
    """What was read of a body of these messages, and the pieces of the answer."""
    app = create_app(Settings(models_dir=tmp_path, calibrate=False, threads=1))
    app.state.forms = reading = Reading(app.state.forms)
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
            await engine.create(CreateModule(name="m", config=ModuleConfig(d_model=64, num_heads=4), seed=0))
            scope = {"type": "http", "method": "POST", "path": "/v1/modules/m/forward", "query_string": b""}
            await app(scope | {"headers": [*HEADERS, *headers], "http_version": "1.1"}, receive, send)

    asyncio.run(play())
    ((request, body),) = reading.seen
    return request, body, sent


def owner(piece):
    """What holds the memory of a piece that was sent."""
    held = piece.obj
    while isinstance(held, np.ndarray):
        held = held.base
    return held


@pytest.mark.parametrize("pieces", [1, 16])
@pytest.mark.parametrize("stated", [True, False])
def test_tensors_are_views_of_the_body_and_the_reply_is_the_output_itself(tmp_path, pieces, stated):
    size = -(-len(BODY) // pieces)
    messages = [BODY[at : at + size] for at in range(0, len(BODY), size)]
    headers = [(b"content-length", str(len(BODY)).encode())] if stated else []
    request, body, sent = exchange(tmp_path, messages, headers)
    received = np.frombuffer(body, np.uint8)
    assert np.shares_memory(request.query, received)
    assert np.array_equal(request.query, QUERY)
    assert np.shares_memory(received, np.frombuffer(messages[0], np.uint8)) == (pieces == 1)  # not even once
    assert isinstance(owner(sent[-1]), torch.Tensor)
    assert sent[-1].nbytes == QUERY.nbytes
    reply = from_body(ForwardReply, b"".join(sent), SAFETENSORS, "reply")
    assert reply.output.shape == QUERY.shape


class Transport(asyncio.Transport):
    """Of a connection on which nobody listens."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def write(self, data):
        self.sent.append(data)

    def writelines(self, pieces):
        self.sent.extend(pieces)

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def is_closing(self):
        return False


def test_what_the_parser_finds_reaches_the_application_as_it_is(tmp_path):
    taken = []

    async def application(scope, receive, send):
        while True:
            taken.append(await receive())
            if not taken[-1]["more_body"]:
                return

    async def play():
        config = uvicorn.Config(application, http="httptools", log_config=None)
        config.load()
        express = create_app(Settings(models_dir=tmp_path)).state.express
        connection = Connection(express, config=config, server_state=ServerState(), app_state={})
        connection.connection_made(Transport())
        connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: 160000\r\n\r\n")
        for waits in (True, True, False):
            connection.on_body(pieces[len(taken)])
            if waits:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        connection.on_body(pieces[3])
        connection.on_message_complete()
        await asyncio.sleep(0.01)

    pieces = [bytes([index]) * 40_000 for index in range(4)]
    asyncio.run(play())
    assert [message["body"] for message in taken] == [*pieces[:2], pieces[2] + pieces[3]]
    assert all(message["body"] is piece for message, piece in zip(taken[:2], pieces, strict=False))


@pytest.mark.parametrize("size", [1000, 100_000])
@pytest.mark.parametrize("after", [(), (b"}",)])
def test_what_express_answers_is_joined_where_it_is_small(tmp_path, size, after):
    async def application(scope, receive, send):
        raise NotImplementedError

    async def play():
        config = uvicorn.Config(application, http="httptools", log_config=None)
        config.load()
        express = create_app(Settings(models_dir=tmp_path)).state.express
        connection = Connection(express, config=config, server_state=ServerState(), app_state={})
        connection.connection_made(transport)
        connection.answer(200, b"\r\n", output, *after)
        await asyncio.sleep(0)

    transport, output = Transport(), memoryview(bytes(size))
    asyncio.run(play())
    assert b"".join(transport.sent).endswith(b"\r\n\r\n" + bytes(output) + b"".join(after))
    assert len(transport.sent) == 1 or any(piece is output for piece in transport.sent)
    assert (len(transport.sent) == 1) is (size == 1000)
