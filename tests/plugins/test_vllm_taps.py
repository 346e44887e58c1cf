"""Taps of whole texts: read by passes in chunks and on ranks, and answered as a forward request."""

import asyncio
import json

import anyio
import numpy as np
import pytest
import torch
from tests.plugins.fake_vllm import HEADS, KV_HEADS, FakeEngine, attended, facts_of

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardReply
from attention_vllm.asks import read_ask
from attention_vllm.bound_asks import KnownModel, bind_ask
from attention_vllm.door.attention_door import AttentionDoor
from attention_vllm.door.forward_replies import joined_parts
from attention_vllm.door.result_inbox import AwaitedResults
from attention_vllm.rank_heads import RankHeads
from attention_vllm.result_channel import SOCKETS, ResultChannel

ASK = {"attention": {"layers": [1, 0], "statistics": []}, "taps": ["weights", "context", "output"]}
LENGTH = 9


def passes(ranks=1):
    """The taps of a text that is read in two passes, and the engine of each rank."""
    awaited, engines = AwaitedResults("a"), []
    for rank in range(ranks):
        engine = FakeEngine(facts_of(), share=RankHeads.of(rank, ranks, KV_HEADS))
        engine.add("a", [*range(LENGTH)])
        engine.texts["a"].ask = {"id": "a"} | ASK
        engine.add("b", [*range(4)])
        for text in engine.texts.values():
            engine.grow(text)
        engine.projections = []
        for part in ({"a": (0, 5), "b": (0, 4)}, {"a": (5, LENGTH)}):
            for message in engine.run(part)["a"]:
                assert "refused" not in message, message
                awaited.add(message)
            engine.projections.append({layer: x[slice(*engine.starts["a"])] for layer, x in engine.projected.items()})
        engines.append(engine)
    return anyio.run(awaited.take_text, LENGTH), engines


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_taps_of_chunks_and_ranks_are_those_of_the_whole_text(ranks):
    parts, engines = passes(ranks)
    assert [part[:2] for part in parts] == [(0, 5), (5, LENGTH)]
    layers = joined_parts(parts)
    assert [each["layer"] for each in layers] == [1, 0]
    for fields in layers:
        layer, text = fields["layer"], engines[0].texts["a"]
        q = engines[0].queries("a", layer, 0, LENGTH)
        weights, context = attended(facts_of(), q, text.k[layer][:, :LENGTH], text.v[layer][:, :LENGTH], 0)
        np.testing.assert_allclose(fields["weights"], weights, atol=1e-5)
        np.testing.assert_allclose(fields["context"], context, atol=1e-5)
        outputs = torch.cat([part[layer] for part in engines[0].projections])
        np.testing.assert_array_equal(fields["output"], outputs)


def test_parts_of_a_text_that_is_computed_again_are_told_once():
    awaited = AwaitedResults("a")
    layer = [{"layer": 0, "output": np.zeros((2, 3))}]
    for first, stop in ((0, 2), (2, 4), (0, 3), (3, 5)):
        awaited.add({"id": "a", "first": first, "stop": stop, "layers": layer})
    assert [part[:2] for part in anyio.run(awaited.take_text, 5)] == [(0, 3), (3, 5)]


@pytest.mark.parametrize(
    ("ask", "model", "param"),
    [
        ({"taps": ["mlp"]}, {}, "taps.0"),
        ({"taps": ["context"], "attention": {}}, {}, "taps"),
        ({"taps": ["output"]}, {"outputs": "compiled graphs hide it"}, "return"),
        ({"taps": ["weights"]}, {"length": 4096}, "return"),
    ],
)
def test_taps_that_are_not_read_are_refused_by_their_field(ask, model, param):
    length = model.pop("length", 5)
    known = KnownModel({0: facts_of(), 1: facts_of()}, **({"outputs": {0: 6, 1: 6}} | model))
    with pytest.raises(InvalidRequest) as caught:
        bind_ask(read_ask({"id": "a"} | ASK | ask), known, [*range(length)], length + 1)
    assert caught.value.param == param


def answered(body, monkeypatch, tmp_path, told=True):
    """The status and reply of a forward request below an API that answers as vLLM's does; and what it was sent."""
    monkeypatch.setenv(SOCKETS, str(tmp_path))
    monkeypatch.setattr("attention_vllm.door.result_inbox._PATIENCE_S", 0.5)
    channel, sent, seen = ResultChannel(), [], []

    async def serve(scope, receive, send):
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        seen.append((scope["path"], json.loads(message["body"])))
        ask = json.loads(seen[0][1]["vllm_xargs"]["attention"])
        fields = {"layer": 0, "context": np.arange(24.0).reshape(HEADS, 3, 2).astype(np.float32)}
        parts = [(0, 2), (2, 3)] if told else [(0, 2)]
        for first, stop in parts:
            own = fields | {"context": fields["context"][:, first:stop]}
            message = {"id": ask["id"], "first": first, "stop": stop, "layers": [own]}
            await asyncio.to_thread(channel.put, message, ask["reply_to"])
        reply = {"choices": [{"index": 0, "prompt_token_ids": [5, 6, 7], "token_ids": [8]}], "usage": {}}
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps(reply).encode()})

    async def ask():
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive():
            return messages.pop() if messages else await asyncio.sleep(3600)

        async def send(message):
            sent.append(message)

        door = AttentionDoor(serve)
        scope = {"type": "http", "method": "POST", "path": "/v1/models/org/m/forward", "headers": []}
        await door(scope, receive, send)
        await door._inbox.close()

    anyio.run(ask)
    channel.close()
    return sent[0]["status"], json.loads(sent[1]["body"]), seen


def test_a_forward_request_is_a_completion_of_one_token(monkeypatch, tmp_path):
    body = {"tokens": [5, 6, 7], "return": ["context"], "layers": [0], "top_k": 0}
    status, reply, ((path, request),) = answered(body, monkeypatch, tmp_path)
    assert (status, path) == (200, "/v1/completions")
    assert (request["model"], request["prompt"], request["max_tokens"]) == ("org/m", [5, 6, 7], 1)
    assert request["cache_salt"] == json.loads(request["vllm_xargs"]["attention"])["cache_salt"]
    answer = ModelForwardReply.model_validate(reply)
    assert answer.labels.ids == [5, 6, 7]
    np.testing.assert_array_equal(answer.layers[0].context, np.arange(24.0).reshape(HEADS, 3, 2))


def test_taps_that_do_not_come_are_an_error(monkeypatch, tmp_path):
    body = {"tokens": [5, 6, 7], "return": ["context"], "top_k": 0}
    status, reply, _ = answered(body, monkeypatch, tmp_path, told=False)
    assert status == 500
    assert "3 tokens" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"return": ["hidden"]}, "return.0"),
        ({"return": []}, "return"),
        ({"top_k": 5}, "top_k"),
        ({"edits": {"0": [{"tap": "context", "set": 0}]}}, "edits"),
        ({"select": {"heads": [0]}}, "select"),
        ({"tokens": [[5], [6]]}, "tokens"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_fields_of_a_forward_request_that_are_not_answered_never_reach_vllm(monkeypatch, tmp_path, fields, param):
    body = {"tokens": [5, 6, 7], "return": ["context"], "top_k": 0} | fields
    status, reply, seen = answered(body, monkeypatch, tmp_path)
    assert (status, reply["error"]["param"], seen) == (400, param, [])
