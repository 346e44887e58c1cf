"""The field ``attention`` below an API that answers as vLLM's does, with results over a real socket, and over HTTP."""

import asyncio
import json
import os
import threading
import time
from pathlib import Path

import anyio
import httpx
import numpy as np
import pytest
import uvicorn

from attention_client import Client
from attention_contract.errors import AttentionError, InvalidRequest
from attention_vllm.door.attention_door import AttentionDoor
from attention_vllm.result_channel import SOCKETS, ResultChannel, packed, read_message
from attention_vllm.serve_command import socket_folder

PROMPT, TOKENS = [5, 6, 7], [11, 12, 13]
LOOK = {"layers": [0], "weights": True, "statistics": ["entropy"]}


class FakeServe:
    """Answers completions as vLLM does; a worker sends the attention of each token before it."""

    def __init__(self):
        self.channel = ResultChannel()
        self.bodies: list[dict] = []
        self.refused = None
        """The problem by which the worker refuses."""
        self.lost: set[int] = set()
        """Positions whose attention does not come."""
        self.gone = False
        """True once a caller was seen to leave."""
        self.endless = False
        self.media_type = None

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        self.media_type = dict(scope["headers"]).get(b"content-type")
        body = json.loads((await receive())["body"])
        self.bodies.append(body)
        given = body.get("vllm_xargs", {}).get("attention")
        ask = None if given is None else json.loads(given)
        if ask is not None and self.refused is not None:
            await self.put({"id": ask["id"], "refused": self.refused}, ask)
        if self.endless:
            self.gone = (await receive())["type"] == "http.disconnect"
            return
        if ask is not None and ask.get("taps"):
            context = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
            message = {"id": ask["id"], "first": 0, "stop": 3, "layers": [{"layer": 0, "context": context}]}
            await self.put(message, ask)
        streams = bool(body.get("stream"))
        kind = b"text/event-stream" if streams else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "kv_transfer_params": None}
        for at, token in enumerate(TOKENS):
            position = len(PROMPT) + at
            if ask is not None and position not in self.lost:
                await self.put({"id": ask["id"], "position": position, "layers": [layer(position)]}, ask)
            if streams:
                choice = {"index": 0, "text": f" {token}", "token_ids": [token], "stop_reason": None}
                choice |= {"prompt_token_ids": PROMPT} if not at else {}
                event = b"data: " + json.dumps(head | {"choices": [choice], "usage": None}).encode() + b"\n\n"
                for part in (event[:9], event[9:]):  # as a proxy may cut them
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        if streams:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
            return
        choice = {
            "index": 0, "text": " 11 12 13", "finish_reason": "length", "token_ids": TOKENS, "stop_reason": None,
            "prompt_token_ids": PROMPT, "logprobs": None,
        }  # fmt: skip
        usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "more": 1}
        whole = json.dumps(head | {"choices": [choice], "usage": usage}).encode()
        await send({"type": "http.response.body", "body": whole, "more_body": False})

    async def put(self, message, ask):
        await asyncio.to_thread(self.channel.put, message, ask["reply_to"])


def layer(position):
    weights = np.full((2, position), 1 / position, np.float32)
    entropy = np.array([np.log(position), np.nan], np.float32)
    return {"layer": 0, "statistics": {"entropy": entropy}, "weights": weights}


@pytest.fixture
def serve(tmp_path, monkeypatch):
    monkeypatch.setenv(SOCKETS, str(tmp_path))
    made = FakeServe()
    yield made
    made.channel.close()


@pytest.fixture
def url(serve):
    server = uvicorn.Server(uvicorn.Config(AttentionDoor(serve), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def hold(tokens):
    assert [(token.position, token.id) for token in tokens] == [(3, 11), (4, 12), (5, 13)]
    for token in tokens:
        (fields,) = token.layers
        told, exact = (np.float32(x) for x in (fields.weights, fields.statistics.entropy)), layer(token.position)
        np.testing.assert_array_equal(next(told), exact["weights"])
        np.testing.assert_array_equal(next(told), exact["statistics"]["entropy"])


def test_the_client_reads_replies_and_streams(url, serve):
    with Client(url) as client:
        reply = client.models.generate("m", PROMPT, attention=LOOK)
        hold(reply.choices[0].attention)
        assert reply.usage.total_tokens == 6
        pieces = list(client.models.stream("m", PROMPT, attention=LOOK))
    hold([token for piece in pieces for token in piece.choices[0].attention])
    assert [piece.choices[0].text for piece in pieces] == [" 11", " 12", " 13"]
    assert all("attention" not in body and body["return_token_ids"] for body in serve.bodies)


def test_the_client_reads_taps_of_a_whole_text(url, serve):
    with Client(url) as client:
        reply = client.models.forward("m", tokens=PROMPT, return_=["context"], layers=[0], top_k=0)
    assert (serve.bodies[0]["model"], serve.media_type) == ("m", b"application/json")
    assert reply.labels.ids == PROMPT
    np.testing.assert_array_equal(reply.layers[0].context, np.arange(24).reshape(2, 3, 4))


def test_edits_bring_a_salt_of_their_own_and_the_same_edits_the_same(url, serve):
    edit, other = ({"edits": {"0": [{"tap": "context", "set": number}]}} for number in (0, 1))
    with Client(url) as client:
        for look in (LOOK, edit, edit, other):
            client.models.generate("m", PROMPT, attention=look)
    salts = [body.get("cache_salt") for body in serve.bodies]
    assert salts[0] is None
    assert salts[1] == salts[2] != salts[3]
    asks = [json.loads(body["vllm_xargs"]["attention"]) for body in serve.bodies]
    assert [ask.get("cache_salt") for ask in asks] == salts


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_that_refuses_ends_the_request_by_its_error(url, serve, stream):
    serve.refused = InvalidRequest.at("attention.layers", "expected layers among 0, 1").to_problem()
    serve.endless = True
    answer = httpx.post(
        f"{url}/v1/completions", json={"model": "m", "prompt": PROMPT, "attention": LOOK, "stream": stream}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "attention.layers"
    deadline = time.monotonic() + 5
    while not serve.gone and time.monotonic() < deadline:
        time.sleep(0.01)
    assert serve.gone, "vLLM goes on generating"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"attention": {"top_k": -1}}, "attention.top_k"),
        ({"attention": {"keep": True}}, "attention.keep"),
        ({"attention": {}, "n": 2}, "n"),
        ({"attention": {}, "echo": True}, "echo"),
        ({"attention": {}, "prompt": ["a", "b"]}, "prompt"),
        ({"attention": {}, "alone": True}, "alone"),
        ({"attention": {}, "vllm_xargs": {"attention": "{}"}}, "vllm_xargs"),
    ],
)
def test_a_field_that_is_not_answered_never_reaches_vllm(url, serve, fields, param):
    answer = httpx.post(f"{url}/v1/completions", json={"model": "m", "prompt": PROMPT} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert serve.bodies == []


def test_other_requests_pass_as_they_are(url, serve):
    body = {"model": "m", "prompt": PROMPT, "user": None}
    answer = httpx.post(f"{url}/v1/completions", json=body)
    assert serve.bodies == [body]
    assert "kv_transfer_params" in answer.json()


def test_attention_that_does_not_come_is_an_error_and_never_left_out(serve, monkeypatch):
    monkeypatch.setattr("attention_vllm.door.result_inbox._PATIENCE_S", 0.1)
    serve.lost = {4}
    sent = []

    async def ask():
        body = json.dumps({"model": "m", "prompt": PROMPT, "attention": LOOK}).encode()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            return messages.pop() if messages else await asyncio.sleep(3600)

        async def send(message):
            sent.append(message)

        door = AttentionDoor(serve)
        await door(scope, receive, send)
        await door({"type": "lifespan"}, receive_nothing, send)

    async def receive_nothing():
        return {}

    anyio.run(ask)
    assert sent[0]["status"] == 500
    assert "position 4" in json.loads(sent[1]["body"])["error"]["message"]


def test_messages_are_read_back_with_their_arrays(tmp_path):
    message = {"id": "a", "position": 3, "layers": [layer(3), {"layer": 1, "keys": np.arange(6).reshape(2, 3)}]}
    path = tmp_path / "messages"
    path.write_bytes(packed(message) * 2)
    with path.open("rb") as source:
        for again in (read_message(source), read_message(source)):
            assert again["position"] == 3
            np.testing.assert_array_equal(again["layers"][0]["weights"], layer(3)["weights"])
            np.testing.assert_array_equal(again["layers"][1]["keys"], np.arange(6).reshape(2, 3))
        assert read_message(source) is None


def test_a_refusal_is_the_clients_own_error(url, serve):
    serve.refused = InvalidRequest.at("attention.heads", "7 is out of range").to_problem()
    with Client(url) as client, pytest.raises(AttentionError) as caught:
        client.models.generate("m", PROMPT, attention=LOOK)
    assert caught.value.param == "attention.heads"


def test_a_body_is_read_after_vllm_has_checked_the_key():
    sent = []

    async def guarded(scope, receive, send):
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no", "more_body": False})

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        sent.append(message)

    async def ask():
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await AttentionDoor(guarded)(scope, receive, send)

    anyio.run(ask)
    assert [each.get("status", each.get("body")) for each in sent] == [401, b"no"]


def test_the_folder_of_sockets_is_removed_in_the_end(monkeypatch):
    monkeypatch.delenv(SOCKETS, raising=False)
    with socket_folder():
        folder = Path(os.environ[SOCKETS])
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    monkeypatch.setenv(SOCKETS, str(Path.cwd()))
    with socket_folder():
        assert os.environ[SOCKETS] == str(Path.cwd())
    assert Path.cwd().exists()
