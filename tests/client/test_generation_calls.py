"""Generation by the client: whole and streamed, blocking and awaited, and the errors of either."""

import httpx
import pytest

from attention_client import AsyncClient, Client
from attention_contract.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, Unavailable
from attention_contract.schemas.openai import ChatCompletion, ChatCompletionChunk, Completion

HEAD = {"id": "x", "created": 1, "model": "net"}
WHOLE = HEAD | {
    "object": "text_completion",
    "choices": [{"index": 0, "text": "sat", "finish_reason": "stop", "logprobs": None}],
}
CHAT = HEAD | {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}}],
}
MESSAGES = [{"role": "user", "content": "Hello"}]


def events(*objects, done=True):
    import json

    lines = [f"data: {json.dumps(each)}\n\n" for each in objects]
    return "".join(lines) + ("data: [DONE]\n\n" if done else "")


def piece(text, **more):
    return HEAD | {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": None} | more]}


class Played:
    """A server that answers with these responses in turn, and remembers the requests."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []

    def __call__(self, request):
        import json

        self.requests.append((request.url.path, json.loads(request.content)))
        return self.answers.pop(0)

    def client(self, kind=Client):
        return kind("http://service.test", transport=httpx.MockTransport(self))


def streamed(text):
    return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})


def failed(status, **error):
    problem = {"message": "no", "type": "server_error", "param": None, "code": "error"} | error
    return httpx.Response(status, json={"error": problem}, headers={"retry-after": "0"})


def test_a_text_and_a_conversation_have_each_their_operation():
    played = Played(httpx.Response(200, json=WHOLE), httpx.Response(200, json=CHAT))
    client = played.client()
    text = client.models.generate("net", "the cat", max_tokens=4, attention={"layers": [0], "top_k": 1}, timeout=5)
    chat = client.models.chat("net", MESSAGES, temperature=0)
    assert isinstance(text, Completion)
    assert isinstance(chat, ChatCompletion)
    assert (text.choices[0].text, chat.choices[0].text) == ("sat", "Hi")
    path, sent = played.requests[0]
    assert path == "/v1/completions"
    assert sent | {"attention": None} == {"model": "net", "prompt": "the cat", "max_tokens": 4, "attention": None}
    assert sent["attention"].items() >= {"layers": [0], "top_k": 1}.items()
    assert played.requests[1] == ("/v1/chat/completions", {"model": "net", "messages": MESSAGES, "temperature": 0.0})


def test_pieces_come_one_by_one():
    played = Played(streamed(events(piece("a"), piece("b", finish_reason="length"))))
    pieces = played.client().models.stream("net", "the", temperature=0)
    first = next(pieces)
    assert isinstance(first, Completion)
    assert [first.choices[0].text, *(each.choices[0].text for each in pieces)] == ["a", "b"]
    assert played.requests[0][1]["stream"] is True


async def test_the_awaited_client_has_the_same():
    chunk = HEAD | {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "Hi"}}]}
    played = Played(httpx.Response(200, json=CHAT), streamed(events(chunk)))
    client = played.client(AsyncClient)
    assert (await client.models.chat("net", MESSAGES)).choices[0].text == "Hi"
    pieces = [each async for each in client.models.stream_chat("net", MESSAGES)]
    assert isinstance(pieces[0], ChatCompletionChunk)
    assert pieces[0].choices[0].text == "Hi"


def test_errors_are_those_of_the_service():
    with pytest.raises(ModelNotFound) as refusal:
        Played(failed(404, code="model_not_found", param="model")).client().models.generate("net", "a")
    assert (refusal.value.param, refusal.value.detail.partition(";")[0]) == ("model", "no")
    with pytest.raises(InvalidRequest):
        next(Played(failed(400, code="invalid_request")).client().models.stream("net", "a"))


def test_what_is_transient_before_the_first_piece_is_repeated():
    played = Played(failed(503, code="model_ended"), streamed(events(piece("a"))))
    assert [each.choices[0].text for each in played.client().models.stream("net", "a")] == ["a"]


async def test_an_error_in_between_is_raised_where_it_comes():
    error = {"error": {"message": "late", "type": "server_error", "param": None, "code": "deadline_exceeded"}}
    pieces = Played(streamed(events(piece("a"), error))).client().models.stream("net", "a")
    assert next(pieces).choices[0].text == "a"
    with pytest.raises(DeadlineExceeded, match="late"):
        next(pieces)
    awaited = Played(*[failed(503, code="unavailable")] * 2).client(AsyncClient).models.stream("net", "a", retries=1)
    with pytest.raises(Unavailable):
        await anext(awaited)
