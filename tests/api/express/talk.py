"""How the tests of express talk to a server, and what they compare of its answers.

``prefer`` makes a request go the ordinary way, and says nothing that bears on an answer here.
"""

import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import numpy as np
import safetensors.numpy
from ml_dtypes import bfloat16

from attention_contract.wire import SAFETENSORS

ORDINARY = {"prefer": "handling=lenient"}
CAUSAL = {"masks": [{"name": "causal"}]}
CONFIGS = {
    "plain": {},
    "causal": {"spec": CAUSAL},
    "aligned": {"spec": {"masks": [{"name": "causal", "align": "bottom_right"}]}},
    "grouped": {"num_kv_heads": 1, "bias": False, "spec": CAUSAL},
    "scaled": {"spec": {"score": {"name": "dot"}, "normalizer": {"name": "softmax", "temperature": 3.0}}},
    "window": {"spec": {"masks": [{"name": "sliding_window", "left": 1}], "position": {"name": "rope"}}},
    "double": {"dtype": "float64"},
    "half": {"dtype": "bfloat16"},
}


def body_of(query, request=None, **more):
    return safetensors.numpy.save({"query": query} | more, {"request": json.dumps(request or {})})


def ask(http, name, body, **headers):
    return http.post(f"/v1/modules/{name}/forward", content=body, headers={"content-type": SAFETENSORS} | headers)


def introduce(http, name, body):
    """Have express know what a body says: it learns what comes again."""
    for _ in range(2):
        answer = ask(http, name, body)
        assert answer.status_code == 200, answer.text
    return answer


def told(answer):
    """What an answer says beside its tensors, its times and what is its own: status, headers, and the rest."""
    size = int.from_bytes(answer.content[:8], "little")
    rest = json.loads(json.loads(answer.content[8 : 8 + size])["__metadata__"]["reply"])
    times = [name for name in rest["ran"] if name.endswith("_ms")]
    assert all(isinstance(rest["ran"].pop(name), float) for name in times)
    assert size % 8 == 0
    own = {"date", "content-length", "x-request-id"}
    headers = {name: value for name, value in answer.headers.items() if name not in own}
    assert own <= set(answer.headers)
    return answer.status_code, headers, rest, sorted(times)


def output_of(answer):
    size = int.from_bytes(answer.content[:8], "little")
    header = json.loads(answer.content[8 : 8 + size])
    dtype = {"F32": np.float32, "F64": np.float64, "BF16": bfloat16}[header["output"]["dtype"]]
    return np.frombuffer(answer.content[8 + size :], dtype).reshape(header["output"]["shape"])


def same(found, expected):
    assert told(found) == told(expected)
    mine, other = output_of(found), output_of(expected)
    assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
    close = {8: 1e-12, 4: 1e-5, 2: 2e-2}[mine.itemsize]
    np.testing.assert_allclose(mine.astype(np.float64), other.astype(np.float64), rtol=close, atol=close)


def inputs(rng, kind, dtype):
    x = {"query": (2, 5, 8)}
    match kind:
        case "one sequence":
            x = {"query": (5, 8)}
        case "keys":
            x |= {"key": (2, 7, 8)}
        case "keys and values":
            x |= {"key": (2, 3, 8), "value": (2, 3, 8)}
        case "values":
            x |= {"value": (2, 5, 8)}
        case "nothing":
            x = {"query": (0, 5, 8)}
        case "large":
            x = {"query": (3, 700, 8)}  # in several pieces, and sent in two
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in x.items()}


def soon(holds, seconds=20.0):
    """Whether something comes to hold."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


class Wire:
    """A connection as it is, without a library between."""

    def __init__(self, url):
        place = urlsplit(url)
        self.socket = socket.create_connection((place.hostname, place.port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._file.close()
        self.socket.close()

    def send(self, *pieces, pause=0.02):
        for piece in pieces:
            self.socket.sendall(piece)
            time.sleep(pause)

    def answer(self):
        """The next answer; None where the connection was closed instead."""
        line = self._file.readline()
        if not line:
            return None
        headers = []
        while header := self._file.readline().strip():
            name, _, value = header.decode().partition(": ")
            headers.append((name, value))
        content = self._file.read(int(dict(headers)["content-length"]))
        return httpx.Response(int(line.split()[1]), headers=headers, content=content)


def message(body, *more, name="plain", version="1.1", length=True):
    lines = [
        f"POST /v1/modules/{name}/forward HTTP/{version}",
        "host: here",
        "accept: */*",
        f"content-type: {SAFETENSORS}",
        *more,
    ]
    lines += [f"content-length: {len(body)}"] * length
    return "\r\n".join([*lines, "", ""]).encode() + body


def in_order(wire, waits, gate, bodies, answers):
    """Send two requests, the second while the first is held up, and hold both answers against what is expected."""
    gate.clear()
    waits.clear()
    wire.send(message(bodies[0]), pause=0)
    assert soon(lambda: len(waits) == 1)
    wire.send(message(bodies[1]))
    gate.set()
    for expected in answers:
        same(wire.answer(), expected)
