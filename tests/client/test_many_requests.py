"""Many requests by one method, and raw responses."""

import asyncio
import threading
import time

import httpx
import numpy as np
import pytest

from attention_client import Client, InvalidTensor, NotFound
from attention_client.array_likes import as_array, plain
from attention_contract.schemas.server import Health
from tests.client.service import URL, both


class Counted:
    """A played server that counts the requests it works on at once; one for a name with ``bad`` is not found."""

    def __init__(self):
        self.now = self.most = self.all = 0
        self.lock = threading.Lock()

    def begin(self):
        with self.lock:
            self.now += 1
            self.all += 1
            self.most = max(self.most, self.now)

    def end(self, request):
        with self.lock:
            self.now -= 1
        if "bad" in request.url.path:
            return httpx.Response(404, json={"code": "not_found", "detail": request.url.path, "status": 404},
                                  headers={"content-type": "application/problem+json"})  # fmt: skip
        return httpx.Response(200, json={"name": request.url.path.split("/")[3], "version": "v", "parameters": []})

    def blocking(self, request):
        self.begin()
        time.sleep(0.01)
        return self.end(request)

    async def awaited(self, request):
        self.begin()
        await asyncio.sleep(0.01)
        return self.end(request)


def mapped(kind, server, names, mistaken=(), **settings):
    requests = [*mistaken, *({"name": name} for name in names)]
    transport = httpx.MockTransport(server.blocking if kind == "sync" else server.awaited)

    def ask(client):
        return client.map(client.modules.parameters, iter(requests), **settings)

    return both(kind, URL, ask, transport=transport, retries=0)


def test_replies_come_in_order_and_few_calls_run_at_once(kind):
    server = Counted()
    names = [f"m{number}" for number in range(20)]
    replies = mapped(kind, server, names, concurrency=4, progress=True)
    assert [reply.name for reply in replies] == names
    assert 1 < server.most <= 4


def test_the_first_error_ends_it_and_nothing_more_is_begun(kind):
    server = Counted()
    with pytest.raises(NotFound, match="bad1"):
        mapped(kind, server, ["a", "bad1", *(f"m{number}" for number in range(50))], concurrency=2)
    assert server.all < 10


def test_errors_stand_in_the_place_of_their_replies(kind):
    replies = mapped(kind, Counted(), ["a", "bad", "b"], errors="return")
    assert [type(reply).__name__ for reply in replies] == ["ParameterList", "NotFound", "ParameterList"]


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"errors": "ignore"}])
def test_settings_that_make_no_sense_are_refused(kind, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        mapped(kind, Counted(), ["a"], **wrong)


def test_a_mistake_in_a_request_is_raised_as_it_is(kind):
    server = Counted()
    with pytest.raises(TypeError, match="must be a mapping"):
        mapped(kind, server, [], concurrency=2, mistaken=[7, {"name": "a"}])


def test_a_raw_response_has_status_headers_body_and_reply():
    body = b'{"status": "live", "modules": 0}'
    answer = httpx.Response(200, content=body, headers={"content-type": "application/json", "X-Request-ID": "r"})
    client = Client(URL, transport=httpx.MockTransport(lambda request: answer))
    raw = client.raw(client.server.live)
    assert (raw.status, raw.headers["x-request-id"], raw.body) == (200, "r", body)
    assert isinstance(raw.reply, Health)
    with pytest.raises(TypeError, match="makes a call"):
        client.raw(lambda: 1)


class OnlyDlpack:
    """An array that speaks nothing but DLPack, on the host or on a device that does not exist here."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, **settings):
        if self.device[0] != 1:
            raise BufferError("no such device")
        return self.array.__dlpack__(**settings)

    def __dlpack_device__(self):
        return self.device


class OnDevice(OnlyDlpack):
    """The same, with a copy to the host as CuPy has it."""

    def get(self):
        return self.array


def test_arrays_of_other_libraries_come_by_dlpack():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    taken = as_array(OnlyDlpack(array))
    assert np.shares_memory(taken, array)
    np.testing.assert_array_equal(plain([OnlyDlpack(array)]), array[None])
    assert as_array(OnDevice(array, (2, 0))) is array
    with pytest.raises(InvalidTensor, match="cannot be copied to the host"):
        as_array(OnlyDlpack(array, (2, 0)))
