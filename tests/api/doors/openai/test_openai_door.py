"""OpenAI's API over plain HTTP: the form of events and errors, callers who leave, deadlines, limits, recordings."""

import json
import socket

import httpx
import numpy as np
import psutil
import pytest

from attention_client import AsyncClient, Client
from tests.conftest import eventually

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns, if another test of this process imported it
LONG = {"model": "talker", "prompt": "Hello", "max_tokens": 1900, "stream": True}
SHORT = {"model": "talker", "prompt": "Hello", "max_tokens": 3, "temperature": 0}


def by(key):
    return {"authorization": f"Bearer {key}"}


def metric(http, name):
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_events_are_objects_and_a_last_word(http):
    with http.stream("POST", "/v1/completions", json=SHORT | {"stream": True}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None, None, "length"]
    assert all(piece["choices"][0]["logprobs"] is None for piece in pieces)


def test_a_caller_may_ask_for_events_by_their_media_type(http):
    for accept in ("text/event-stream", "application/json", "text/event-stream, application/json;q=0.1"):
        answer = http.post("/v1/completions", json=SHORT | {"stream": True}, headers={"accept": accept})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
        assert http.post("/v1/completions", json=SHORT, headers={"accept": accept}).json()["choices"]
    refused = http.post("/v1/completions", json=SHORT, headers={"accept": "text/csv"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (406, "not_acceptable")
    assert http.post("/v1/embeddings", json={}, headers={"accept": "text/event-stream"}).status_code == 406


def test_a_caller_who_leaves_stops_the_generation(http):
    before = metric(http, "attention_generated_tokens_total")
    with http.stream("POST", "/v1/completions", json=LONG) as answer:
        next(answer.iter_lines())
    assert http.post("/v1/completions", json=SHORT).status_code == 200
    assert eventually(lambda: metric(http, "attention_in_flight_bytes") == 0)
    assert metric(http, "attention_generated_tokens_total") - before < LONG["max_tokens"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.slow
def test_what_a_caller_has_not_read_counts_until_it_is_sent(http, door, stream):
    fields = {"model": "talker", "prompt": 1500 * "a", "max_tokens": 100, "attention": {"weights": True}}
    body = json.dumps(fields | {"stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {door.key}\r\n"

    def held():
        return http.get("/v1").json()["memory"]

    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
        slow.connect(("127.0.0.1", httpx.URL(door.url).port))
        slow.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        free = eventually(lambda: (now := held())["reply_bytes"] > 2**22 and not now["in_flight_bytes"] and now)
    after = eventually(lambda: (now := held())["reply_bytes"] == 0 and now)
    assert after["free_bytes"] >= free["free_bytes"] + free["reply_bytes"]


def test_a_deadline_ends_a_generation_with_the_tokens_that_it_has(http):
    assert http.post("/v1/completions", json=SHORT).status_code == 200  # loaded
    with http.stream("POST", "/v1/completions", json=LONG, headers={"Prefer": "wait=1"}) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    assert 1 < len(pieces) < LONG["max_tokens"]
    assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == ["length"]
    whole = http.post("/v1/completions", json=LONG | {"stream": False}, headers={"Prefer": "wait=1"})
    assert whole.status_code == 200
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    assert 1 < whole.json()["usage"]["completion_tokens"] < LONG["max_tokens"]
    assert whole.json()["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token_is_an_error(http, stream):
    late = http.post("/v1/completions", json=LONG | {"stream": stream}, headers={"Prefer": "wait=0.001"})
    assert (late.status_code, late.json()["error"]["code"]) == (503, "deadline_exceeded")


def test_the_time_of_a_generation_counts_against_its_caller(door, http):
    request = SHORT | {"max_tokens": 200, "stream": True}
    answers = [http.post("/v1/completions", json=request, headers=by(door.of_little_time)) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]


def test_errors_have_the_form_of_openai_on_its_paths_alone(http):
    for path, body, status in (
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b'{"model": "talker"}', 400),
        ("/v1/chat/completions", b"[]", 400),
        ("/v1/embeddings", b'{"model": "nobody", "input": "x"}', 404),
    ):
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/json"
        assert {"message", "type", "param", "code"} <= answer.json()["error"].keys()
    assert http.get("/v1/completions").json()["error"]["code"] == "method_not_allowed"
    elsewhere = http.post("/v1/models/talker/forward", json={"texts": 1})
    assert elsewhere.headers["content-type"] == "application/problem+json"
    assert "error" not in elsewhere.json()
    beside = http.put("/v1/models", json={})  # a path of both APIs
    assert beside.headers["content-type"] == "application/problem+json"
    assert beside.json()["error"]["code"] == beside.json()["code"] == "method_not_allowed"


def test_what_would_never_fit_is_not_to_be_repeated(http):
    answer = http.post("/v1/completions", json=LONG | {"n": 100, "attention": {"weights": True}})
    assert answer.status_code == 507
    assert answer.headers["x-should-retry"] == "false"
    assert "x-should-retry" not in http.post("/v1/completions", json={}).headers


def test_tokens_are_counted(http):
    before = metric(http, "attention_generated_tokens_total")
    http.post("/v1/completions", json=SHORT | {"n": 2, "temperature": 1})
    assert metric(http, "attention_generated_tokens_total") == before + 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_kept_run_is_a_recording(door, http, stream):
    request = SHORT | {"stream": stream, "attention": {"keep": True, "weights": True}}
    answer = http.post("/v1/completions", json=request)
    objects = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if "{" in line]
    with Client(door.url, api_key=door.key) as client:
        recording = client.recordings.get(objects[-1]["recording"])
        assert len(recording.tokens["layers"]) == len("Hello") + 3
        tokens = [token for each in objects for choice in each["choices"] for token in choice["attention"]]
        row = client.recordings.read(recording.id, 1, "weights", queries=[tokens[-1]["position"] - 1]).value
    weights = tokens[-1]["layers"][1]["weights"]
    assert row[:, 0, : len(weights[0])] == pytest.approx(np.array(weights), abs=1e-5)


def test_scopes_and_limits_of_keys_hold(door, http):
    denied = http.post("/v1/completions", json=SHORT, headers=by(door.reader))
    assert (denied.status_code, denied.json()["error"]["type"]) == (403, "permission_error")
    nobody = httpx.post(f"{door.url}/v1/completions", json=SHORT)
    assert nobody.status_code == 401
    assert nobody.headers["www-authenticate"]
    assert nobody.json()["error"]["type"] == "authentication_error"
    key = by(door.one_at_a_time)
    assert http.post("/v1/completions", json=SHORT, headers=key).status_code == 200
    with http.stream("POST", "/v1/completions", json=LONG, headers=key) as answer:
        next(answer.iter_lines())
        busy = httpx.post(f"{door.url}/v1/completions", json=SHORT, headers=key)
    assert busy.json()["error"]["type"] == "rate_limit_error"
    assert busy.headers["retry-after"]


async def test_the_client_generates_whole_and_piece_by_piece(door):
    fields = {"max_tokens": 5, "temperature": 0, "attention": {"layers": [1], "top_k": 2}}
    with Client(door.url, api_key=door.key) as client:
        whole = client.models.generate("talker", "Hello", **fields)
        pieces = [*client.models.stream("talker", "Hello", **fields)]
        assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
        assert [piece.choices[0].attention[0].id for piece in pieces] == [
            each.id for each in whole.choices[0].attention
        ]
    async with AsyncClient(door.url, api_key=door.key) as client:
        messages = [{"role": "user", "content": "Hello"}]
        answer = await client.models.chat("talker", messages, **fields)
        pieces = [each async for each in client.models.stream_chat("talker", messages, **fields)]
        assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text


def test_a_model_whose_process_dies_ends_its_stream_with_an_error(http):
    """The last test: the model would be loaded anew."""
    with http.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        for process in psutil.Process().children(recursive=True):
            if "forkserver" in " ".join(process.cmdline()) and not process.children():  # those copy themselves
                process.kill()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "model_ended"


def test_a_prompt_is_read_from_where_an_earlier_text_of_its_caller_ends(http, door):
    def cached(prompt, **more):
        answer = http.post("/v1/completions", json=SHORT | {"prompt": prompt}, **more).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    begin = "".join(chr(40 + 7 * at % 60) for at in range(90))
    text, known = cached(begin)
    assert known == 0
    assert cached(begin + text + "And then?")[1] == 90 + 2  # the last token has chosen none
    assert cached(begin, headers=by(door.one_at_a_time))[1] == 0
