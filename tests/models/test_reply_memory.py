"""The memory that a model's process shares with its server: replies are right, and pages are counted and freed."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import numpy as np
import psutil
import pytest
import torch
from tests.conftest import eventually, live_server

from attention_client import Client
from attention_contract.errors import InvalidTensor, Unreadable
from attention_contract.schemas.model_requests import LayerTaps, ModelForwardReply
from attention_contract.tensor_files import from_pieces, from_safetensors, to_safetensors
from attention_service.models.folders.model_catalogue import PROCESS_BYTES
from attention_service.models.reply_memory import ReplyMemory, ReplySpace
from attention_service.models.server import reply_memories

MIB = 2**20
LARGE = "needs 20 large 4"
NUMBERS = np.arange(MIB, dtype=np.float32)


@pytest.fixture
def freed():
    return []


@pytest.fixture
def memory(freed):
    return ReplyMemory(lambda: freed.append(True))


def pages(memory):
    """Return the bytes that the system has given to the file."""
    return os.fstat(memory.file).st_blocks * 512


def test_pieces_are_left_where_they_are_made_copied_or_sent(memory, freed):
    space = ReplySpace(memory.file)
    space.open(4 * MIB)
    made = space.empty((2, MIB // 8), torch.float32)
    assert made is not None
    made.copy_(torch.arange(MIB // 4).view(2, -1))
    pieces = [b"head", memoryview(made.numpy().reshape(-1).view(np.uint8)), bytes(range(256)) * 1024, b"tail"]
    places, inline = space.leave(pieces)
    assert inline == [b"head", b"tail"]
    assert memory.is_free
    found = memory.pieces(places, memoryview(b"headtail"))
    assert [bytes(piece) for piece in found] == [bytes(piece) for piece in pieces]
    assert not memory.is_free
    assert 5 * MIB / 4 <= memory.bytes <= 2 * MIB
    assert not freed
    del found
    assert memory.is_free
    assert freed == [True]


def test_a_memory_that_is_used_up_leaves_the_rest_to_the_pipe(memory):
    space = ReplySpace(memory.file)
    space.open(MIB)
    assert space.empty((MIB // 4 + 1,), torch.float32) is None
    assert space.empty((8,), torch.float32) is None  # a small one
    assert space.empty((MIB // 2,), torch.uint8) is not None
    piece = bytes(MIB)
    assert space.leave([piece])[1] == [piece]


def test_the_first_reply_of_a_process_may_need_no_memory(memory):
    """A question about costs needs none."""
    space = ReplySpace(memory.file)
    space.open(0)
    assert space.empty((MIB,), torch.float32) is None


def test_without_a_memory_all_goes_through_the_pipe():
    space, piece = ReplySpace(None), bytes(MIB)
    space.open(MIB)
    assert space.empty((MIB,), torch.uint8) is None
    assert space.leave([b"head", piece]) == ([(4, -1), (MIB, -1)], [b"head", piece])


def test_a_reply_without_large_pieces_leaves_the_memory_free(memory):
    """The process may not even have opened it, as for a reply of a pass that is shared."""
    found = memory.pieces([(4, -1), (2, -1)], memoryview(b"headok"))
    assert [bytes(piece) for piece in found] == [b"head", b"ok"]
    assert memory.is_free


def test_pages_are_freed_and_come_back(memory):
    space = ReplySpace(memory.file)
    for value in (1, 2):
        space.open(2 * MIB)
        made = space.empty((2 * MIB,), torch.uint8)
        made.fill_(value)
        assert pages(memory) == 2 * MIB
        assert memory.bytes == 0
        memory.pieces(*space.leave([made.numpy().data])[:1], memoryview(b""))
        assert memory.bytes == pages(memory) == 2 * MIB
        memory.cut(MIB)
        assert memory.bytes == pages(memory) == MIB
        memory.cut(0)
        assert memory.bytes == pages(memory) == 0
        del made


def test_the_pages_of_a_reply_that_never_came_are_freed(memory):
    space = ReplySpace(memory.file)
    for kept in (0, MIB):
        space.open(2 * MIB)
        if kept:
            made = space.empty((kept,), torch.uint8)
            memory.pieces(*space.leave([made.numpy().data])[:1], memoryview(b""))
        space.open(2 * MIB)
        space.empty((2 * MIB,), torch.uint8).fill_(1)
        memory.forget()
        assert memory.bytes == pages(memory) == kept


def test_a_model_is_read_from_its_pieces():
    taps = LayerTaps(layer=3, q=NUMBERS.reshape(1, 2, -1), k=np.ones((1, 1, 1), np.float64))
    pieces = to_safetensors(taps, "reply")
    read = from_pieces(pieces, "reply", LayerTaps)
    assert to_safetensors(read, "reply") == pieces
    assert to_safetensors(from_safetensors(b"".join(pieces), "reply", LayerTaps), "reply") == pieces
    with pytest.raises(InvalidTensor, match="takes"):
        from_pieces([pieces[0], pieces[1], pieces[2][:-4]], "reply", LayerTaps)
    with pytest.raises(Unreadable):
        from_pieces([pieces[0][:-1], *pieces[1:]], "reply", LayerTaps)


# ── over HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def served(stand_ins, repository, monkeypatch):
    monkeypatch.setattr(reply_memories, "_KEEP_S", 60.0)
    with live_server(repository, model_prefix_bytes=0) as url:
        yield url


def is_right(reply):
    np.testing.assert_array_equal(reply.layers[0].q[0, 0], NUMBERS)
    np.testing.assert_array_equal(reply.layers[0].k[0, 0], NUMBERS + 1)


def kept(client):
    return client.models.get("one").bytes - client.kept_nothing


@pytest.fixture
def client(served):
    with Client(served) as client:
        client.models.load("one")
        client.kept_nothing = client.models.get("one").bytes
        yield client


@pytest.mark.sampled(media_type=1)
@pytest.mark.parametrize("media_type", ["safetensors", "json"])
def test_large_replies_are_right_in_every_form(served, client, media_type):
    with Client(served, media_type=media_type) as other:
        for _ in range(3):
            is_right(other.models.forward("one", LARGE))


@pytest.mark.slow
def test_what_is_kept_for_the_next_reply_counts_once(client):
    for _ in range(3):
        is_right(client.models.forward("one", LARGE))
        eventually(lambda: kept(client) == 8 * MIB)
    client.models.forward("one", "needs 5")  # fewer pages than that are left to it
    eventually(lambda: kept(client) == 5 * MIB)


@pytest.mark.slow
def test_what_is_kept_is_given_back_soon(client, monkeypatch):
    monkeypatch.setattr(reply_memories, "_KEEP_S", 0.2)
    is_right(client.models.forward("one", LARGE))
    eventually(lambda: kept(client) == 0)
    is_right(client.models.forward("one", LARGE))


@pytest.mark.slow
def test_replies_that_nobody_reads_yet_keep_their_memory(client):
    with ExitStack() as stack:
        slow = []
        for _ in range(5):  # more callers than there are memories
            own = stack.enter_context(httpx.Client(base_url=client.settings["base_url"], timeout=60))
            body = {"text": LARGE, "encoding": "base64"}
            accept = {"accept": "application/vnd.safetensors"}
            slow.append(stack.enter_context(own.stream("POST", "/v1/models/one/forward", json=body, headers=accept)))
        for _ in range(2):
            is_right(client.models.forward("one", LARGE))
        assert kept(client) == 0  # those are in use, and count as replies
        for response in slow:
            is_right(from_safetensors(response.read(), "reply", ModelForwardReply))
    eventually(lambda: kept(client) >= 16 * MIB)


@pytest.mark.slow
def test_many_at_once_are_right(client):
    with ThreadPoolExecutor(6) as pool:
        for reply in pool.map(lambda _: client.models.forward("one", LARGE), range(18)):
            is_right(reply)


@pytest.mark.slow
def test_what_is_kept_gives_way_before_a_model_does(stand_ins, repository, monkeypatch):
    monkeypatch.setattr(reply_memories, "_KEEP_S", 60.0)
    with (
        live_server(repository, model_prefix_bytes=0, memory_budget=2 * PROCESS_BYTES + 60 * MIB) as url,
        Client(url) as client,
    ):
        client.models.forward("one", "needs 90 large 40")
        eventually(lambda: client.models.get("one").bytes > PROCESS_BYTES + 80 * MIB)
        client.models.load("org/two")
        assert client.models.get("one").state == "resident"
        assert client.models.get("one").bytes < PROCESS_BYTES + MIB


@pytest.mark.sampled(fault=1)
@pytest.mark.parametrize("fault", [AttributeError, OSError])
def test_a_system_without_such_memory_uses_the_pipe(stand_ins, repository, monkeypatch, fault):
    def missing(*_):
        raise fault

    monkeypatch.setattr("os.memfd_create", missing)
    with live_server(repository, model_prefix_bytes=0) as url, Client(url) as client:
        is_right(client.models.forward("one", LARGE))
        assert client.models.get("one").bytes < PROCESS_BYTES + MIB


@pytest.mark.slow
def test_a_large_request_leaves_little(client):
    def held(images=()):
        process = psutil.Process(int(client.models.forward("one", "a text", images=images or None).ran.architecture))
        return process.memory_info().rss - process.memory_info().shared

    before = held()
    held([bytes(18 * MIB)])
    assert held() < before + 65 * MIB


def test_a_model_that_ends_gives_its_memory_up(client):
    def held():
        links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
        return sum("attention-reply" in os.readlink(link) for link in links if os.path.lexists(link))

    before = held()
    for _ in range(2):
        is_right(client.models.forward("one", LARGE))
        client.models.unload("one")
        assert held() == before - reply_memories.COUNT
