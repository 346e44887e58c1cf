"""``WS /v1/audio/transcriptions/stream``: the text of a sound while it comes, and what is refused."""

import asyncio
import json
import struct
from contextlib import ExitStack

import httpx
import numpy as np
import pytest
from tests.conftest import live_server
from tests.models.inputs.sounds.small_listeners import STEP, listener, spoken
from tests.models.inputs.sounds.small_sounds import RATE
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from attention_client import AsyncClient, Client
from attention_contract.errors import InvalidRequest, ModelNotFound

SAID = "abc def gab cde fga bcd"
START = {"model": "listener", "language": "en", "every_s": 0.75}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    listener(root / "listener")
    with live_server(root) as url:
        yield url


def samples_of(text):
    return (spoken(text) * 32_767).astype("<i2").tobytes()


def opened(url, **options):
    return connect(f"{url.replace('http', 'ws', 1)}/v1/audio/transcriptions/stream", max_size=None, **options)


def streamed(url, text, piece_s=0.5, **start):
    """Send a sound in pieces. Returns the events until the last."""
    samples, size = samples_of(text), 2 * round(piece_s * RATE)
    with opened(url) as stream:
        stream.send(json.dumps(START | start))
        for at in range(0, len(samples), size):
            stream.send(samples[at : at + size])
        stream.send(json.dumps({"end": True}))
        events = []
        while not events or events[-1]["type"] == "transcript.text.delta":
            events.append(json.loads(stream.recv(timeout=60)))
        return events


def test_the_whole_text_is_that_of_the_whole_sound(url):
    *events, done = streamed(url, SAID)
    assert done == {"type": "transcript.text.done", "text": SAID, "heard_s": len(SAID) * STEP}
    assert "".join(event["delta"] for event in events) == SAID
    assert len(events) > 1
    assert events[0]["heard_s"] < done["heard_s"]
    shown = ""
    for event in events[:-1]:  # nothing is told of what was said in the last half of a second
        shown += event["delta"]
        assert (len(shown) - 0.5) * STEP <= event["heard_s"] - 0.5 + 0.02
    sound = np.frombuffer(samples_of(SAID), "<i2")
    head = struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + 2 * len(sound), b"WAVE", b"fmt ", 16, 1, 1, RATE, 2 * RATE, 2, 16, b"data",
        2 * len(sound),
    )  # fmt: skip
    with httpx.Client(base_url=url, timeout=60) as http:
        files = {"file": ("a.wav", head + sound.tobytes())}
        whole = http.post("/v1/audio/transcriptions", data={"model": "listener", "language": "en"}, files=files)
    assert whole.json()["text"] == done["text"]


def test_a_sound_longer_than_the_model_hears_goes_on_in_another_window(url):
    *events, done = streamed(url, f"{SAID} efg abc dec fab gef", every_s=1.0)
    assert "".join(event["delta"] for event in events).strip() == done["text"]
    assert done["text"].startswith(SAID[:18])
    assert done["text"].endswith("gef")
    assert abs(len(done["text"].replace(" ", "")) - 32) <= 2


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (["no JSON"], "request"),
        ([b"\0\0"], "model"),
        ([json.dumps(START | {"rate": 7})], "rate"),
        ([json.dumps(START | {"frames": 0})], "frames"),
        ([json.dumps(START | {"other": 1})], "other"),
        ([json.dumps(START), b"\0"], "samples"),
        ([json.dumps(START), b""], "samples"),
        ([json.dumps(START), bytes(2 * 31 * RATE)], "samples"),
        ([json.dumps(START), json.dumps({"end": False})], "end"),
        ([json.dumps(START | {"language": "fr"}), bytes(2 * RATE)], "language"),
        ([json.dumps(START | {"model": "none"}), bytes(2 * RATE)], "model"),
    ],
)
def test_what_cannot_be_heard_is_named_and_ends_the_stream(url, messages, param):
    with opened(url) as stream:
        for message in messages:
            stream.send(message)
        event = json.loads(stream.recv(timeout=60))
        assert event["type"] == "error"
        assert event["error"]["param"] == param, event
        with pytest.raises(ConnectionClosed) as closed:
            stream.recv(timeout=60)
        assert closed.value.rcvd.code == 1008


def test_a_browser_s_subprotocol_is_accepted(url):
    """Pages send their key as a second one, and close connections whose server takes none of those offered."""
    with opened(url, subprotocols=["attention.v1", "attention.key.k"]) as stream:
        assert stream.subprotocol == "attention.v1"


def test_streams_have_a_number_for_each_caller(url):
    with ExitStack() as streams:
        for _ in range(8):
            streams.enter_context(opened(url))
        with pytest.raises(InvalidStatus, match="429"), opened(url):
            pass
    with opened(url) as again:
        again.send(json.dumps(START))


def pieces_of(text, piece_s=0.5):
    sound, size = spoken(text), round(piece_s * RATE)
    return [sound[at : at + size] for at in range(0, len(sound), size)]


def test_the_client_sends_pieces_and_yields_the_text(url):
    pieces = pieces_of(SAID)
    with Client(url) as client:
        *events, done = client.models.stream_sound("listener", pieces, language="en", every_s=0.75)
    assert (done.type, done.text) == ("transcript.text.done", SAID)
    assert "".join(event.delta for event in events) == SAID

    async def awaited():
        async def microphone():
            for piece in pieces:
                await asyncio.sleep(0)
                yield (piece * 32_767).astype(np.int16)

        async with AsyncClient(url) as client:
            found = client.models.stream_sound("listener", microphone(), language="en", every_s=0.75)
            return [event async for event in found]

    assert asyncio.run(awaited())[-1] == done


def test_the_client_raises_what_the_server_refuses_and_what_the_source_raises(url):
    def broken():
        yield from pieces_of("abc")
        raise OSError("the microphone is gone")

    with Client(url) as client:
        with pytest.raises(ModelNotFound):
            [*client.models.stream_sound("nobody", pieces_of("abc"))]
        with pytest.raises(InvalidRequest, match="every_s"):
            client.models.stream_sound("listener", [], every_s=0)
        for piece in (np.zeros((2, 4)), np.array([np.nan]), np.zeros(4, np.int64)):
            with pytest.raises(InvalidRequest, match="pieces"):
                [*client.models.stream_sound("listener", [piece])]
        with pytest.raises(OSError, match="microphone"):
            [*client.models.stream_sound("listener", broken(), language="en")]
        first = next(client.models.stream_sound("listener", iter(pieces_of(SAID)), language="en", every_s=0.75))
        assert first.delta  # who leaves early closes the connection
