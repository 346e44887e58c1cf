"""Sound inputs of each target, from the examples of the contract, and a mutation that keeps JSON well formed."""

import copy
import gzip
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from backports import zstd

from attention_contract import wire
from attention_contract.frames import to_frame
from attention_contract.operations import OPERATIONS
from attention_contract.schemas.sessions import SessionStep, StepsRequest
from attention_contract.validation import validate
from tools.fuzz.targets import MODELS

ODD: Final[list[Any]] = [
    None, True, False, -1, 0, 1, 2, 2**31, 2**63, 2**64, -(2**63), 10**30, 1e308, -1e-320, 0.5, "", "NaN", "Infinity",
    "-Infinity", "x" * 300, "\u0000", "\ud800", "é\U0001f600", "[" * 300, '{"masks": [{"name": "causal"}]}',
    "materialized", "parameters", [], [[]], [[], [1]], [1, [2]], [0, 5], [True], ["NaN"], [None], ["query"], {},
    {"name": "any", "of": []}, {"name": "nothing"}, {"shape": [1]}, {"dtype": "float16", "shape": [1], "data": [1e6]},
    {"dtype": "bfloat16", "shape": [2, 2], "base64": "AACAPwAAgD8="}, {"dtype": "int64", "shape": [], "data": [5]},
    {"dtype": "float32", "shape": [2**62], "data": []}, {"dtype": "float32", "shape": [0, 2**62], "data": []},
    {"dtype": "float64", "shape": [-1], "base64": ""}, {"dtype": "bool", "shape": [2], "data": [True, False]},
    {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, [[1.0, 0.0], [0.0, 1.0]], [[True, False], [False, True]],
]  # fmt: skip
"""Values that replace a part of a sound input."""
SPECS: Final[list[dict[str, Any]]] = [
    {},
    {
        "score": {"name": "scaled_dot", "scale": 0.5},
        "softcap": 2.0,
        "normalizer": {"name": "softmax", "temperature": 2},
    },
    {"score": {"name": "additive", "hidden": 4}, "position": {"name": "alibi"}, "method": {"name": "exact"}},
    {"position": {"name": "rope", "dim": 2, "style": "interleaved"}, "masks": [{"name": "causal"}]},
    {
        "masks": [
            {"name": "any", "of": [{"name": "sliding_window", "left": 4}, {"name": "global_tokens", "positions": [0]}]}
        ]
    },
]
_NAMES: Final = ["query", "spec", "name", "mask", "positions", "past_key", "edits.0.value", "__metadata__", "x", "x\0"]
_X: Final = np.arange(8, dtype=np.float32).reshape(1, 2, 4)


def seeds(target: str) -> list[bytes]:
    """Return sound inputs of a target."""
    return list(_SEEDS[target]())


def _requests() -> Iterator[tuple[int, Any]]:
    for operation in OPERATIONS:
        if operation.request is not None and operation.example is not None:
            yield MODELS.index(operation.request), validate(operation.request, operation.example)


def _json() -> Iterator[bytes]:
    for index, request in _requests():
        for encoding in ("list", "base64"):
            yield bytes([index]) + b"".join(wire.to_body(request, wire.JSON, "request", encoding))


def _safetensors() -> Iterator[bytes]:
    for index, request in _requests():
        yield bytes([index]) + b"".join(wire.to_body(request, wire.SAFETENSORS, "request"))


def _without_length(body: bytes) -> bytes:
    """A body without the length of its header and the padding behind it."""
    size = int.from_bytes(body[1:9], "little")
    return body[:1] + body[9 : 9 + size].rstrip() + body[9 + size :]


def _frames() -> Iterator[bytes]:
    step = SessionStep(session="7-1", query=_X, at=3, step="a")
    for message in (step, StepsRequest(steps=[step, SessionStep(session="7-2", query=_X)])):
        yield b"\x01" + bytes(to_frame(message, text=False, entry="request"))
        yield b"\x03" + str(to_frame(message, text=True, entry="request")).encode()


_SEEDS: Final = {
    "json_body": _json,
    "safetensors_body": _safetensors,
    "safetensors_header": lambda: map(_without_length, _safetensors()),
    "spec": lambda: (json.dumps(each).encode() for each in SPECS),
    "tensor": lambda: (json.dumps(each).encode() for each in ODD),
    "frame": _frames,
    "content_coding": lambda: (
        prefix + pack(data)
        for prefix, pack in ((b"\0", gzip.compress), (b"\1", zstd.compress), (b"\2", zlib.compress))
        for data in _json()
    ),
    "negotiated_headers": lambda: iter(
        [
            b"application/json;q=0.5, */*\napplication/json; charset=utf-8\nwait=1.5\n*",
            b'application/vnd.safetensors\napplication/vnd.safetensors\nrespond-async, wait=10\n"abc"',
            b"image/png, text/html;q=0.1",
        ]
    ),
}


def bend(data: bytes, rng: random.Random, names: Sequence[str] = _NAMES) -> bytes | None:
    """Replace, remove or repeat some parts of the JSON in an input; None if there is none.

    A byte before the JSON is kept. So is all that follows its last brace or bracket. ``names``: of what is added.
    """
    start = next((at for at in (0, 1) if data[at : at + 1] in {b"{", b"["}), None)
    if start is None:
        return None
    end = max(data.rfind(b"}"), data.rfind(b"]")) + 1
    try:
        value = json.loads(data[start:end])
    except (ValueError, RecursionError):
        return None
    for _ in range(rng.randint(1, 3)):
        value = _bent(value, rng, names)
    return data[:start] + json.dumps(value).encode() + data[end:]


def _odd(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(ODD))


def _bent(value: Any, rng: random.Random, names: Sequence[str]) -> Any:
    holder, key = [value], 0
    inner: Any = value
    while isinstance(inner, (dict, list)) and inner and rng.random() < 0.8:
        holder, key = inner, rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        inner = holder[key]
    action = rng.random()
    if holder[0 if isinstance(holder, list) else key] is value and inner is value:
        return _odd(rng) if action < 0.1 else value
    if action < 0.15:
        del holder[key]
    elif action < 0.3 and isinstance(holder, list):
        holder.append(copy.deepcopy(inner))
    elif action < 0.4 and isinstance(holder, dict):
        holder[rng.choice(names)] = _odd(rng)
    elif action < 0.6 and isinstance(inner, (int, float)) and not isinstance(inner, bool):
        holder[key] = rng.choice([-inner, inner * 2, inner + 1, str(inner), float(inner)])
    else:
        holder[key] = _odd(rng)
    return value
