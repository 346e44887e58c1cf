"""Requests that ask for much in few bytes, and such as are large themselves."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attention_contract.wire import JSON, SAFETENSORS

FORWARD = "/v1/attention/forward"
COMPLEXITY = "/v1/attention/complexity"


@dataclass(frozen=True)
class Demand:
    """One request as it goes over the wire."""

    name: str
    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> bytes:
        """Head and body."""
        headers = {"Host": "127.0.0.1", "Content-Length": str(len(self.body)), "Content-Type": JSON} | dict(
            self.headers
        )
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


def demanding() -> Iterator[Demand]:
    """All requests."""
    yield from _masks()
    yield from _accounts()
    yield from _lists()
    yield from _heads()


def drawn(count: int, of: int, size: int = 1, seed: int = 0) -> list[dict[str, Any]]:
    """Return this many masks of random blocks."""
    return [{"name": "random_blocks", "size": size, "count": of, "seed": seed + index} for index in range(count)]


def union(masks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One mask that allows what any of them does."""
    chunks = [masks[start : start + 15] for start in range(0, len(masks), 15)]
    return [{"name": "any", "of": [{"name": "any", "of": chunk} for chunk in chunks]}]


def _masks() -> Iterator[Demand]:
    marks = [{"name": "global_tokens", "positions": list(range(7 * index, 2**16, 16))} for index in range(4)]
    packed = [{"name": "documents", "lengths": [index + 1] * 4096} for index in range(4)]
    strides = [{"name": "strided", "stride": stride, "local": 1} for stride in (7, 11, 13, 17, 19, 23, 29, 31, 37, 41)]
    fixed = [{"name": "fixed", "stride": stride, "summary": 2} for stride in (7, 11, 13, 17, 19, 23, 29, 31, 37, 41)]
    windows = [{"name": "sliding_window", "left": 10 * index, "right": index} for index in range(1, 60)]
    specs = {
        "a window": [{"name": "sliding_window", "left": 128, "right": 0}],
        "16 draws of 64": union(drawn(16, 64)),
        "40 draws of 64": union(drawn(40, 64)),
        "40 draws of 64, blocks of 16": union(drawn(40, 64, 16)),
        "4 × 4,096 marks": marks[:4],
        "4 × 4,096 documents": packed,
        "10 strides": union(strides),
        "10 fixed strides": union(fixed),
        "59 windows": union(windows),
    }
    for length in (8, 200, 3000):
        for name, masks in specs.items():
            yield _tensors(f"forward, {length} tokens, {name}", FORWARD, length, spec={"masks": masks})
    for length in (200, 3000):
        for question in ("gradients", "weights"):
            for name in ("16 draws of 64", "40 draws of 64", "10 strides"):
                options = {"return_weights": False} if question == "weights" else {}
                path = f"/v1/attention/{question}"
                yield _tensors(
                    f"{question}, {length} tokens, {name}", path, length, spec={"masks": specs[name]}, **options
                )


def _tensors(name: str, path: str, length: int, **rest: Any) -> Demand:
    """Raw attention with one head of width 2."""
    shape, header = [1, 1, length, 2], {}
    size = 8 * length
    header["query"] = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    header["__metadata__"] = {"request": json.dumps(rest)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = np.random.default_rng(0).normal(size=2 * length).astype(np.float32).tobytes()
    return Demand(name, "POST", path, len(text).to_bytes(8, "little") + text + data, {"Content-Type": SAFETENSORS})


def _accounts() -> Iterator[Demand]:
    raw = {"num_heads": 8, "head_dim": 64}
    windows = [{"spec": {"masks": [{"name": "sliding_window", "left": 2**each, "right": 0}]}} for each in range(16)]
    sweep = {"values": [2**each for each in range(4, 20)]}
    yield _json("complexity, one length", COMPLEXITY, shape={"queries": 1024}, **raw)
    yield _json("complexity, 16 windows", COMPLEXITY, shape={"queries": 1024}, compare=windows, **raw)
    yield _json(
        "complexity, 16 windows, 16 lengths", COMPLEXITY, shape={"queries": 8}, compare=windows, sweep=sweep, **raw
    )
    yield _json(
        "complexity, 256 lengths", COMPLEXITY, shape={"queries": 8}, sweep={"values": list(range(1000, 1256))}, **raw
    )
    spec = {"masks": union(drawn(16, 64))}
    yield _json("complexity, 16 draws of 64", COMPLEXITY, shape={"queries": 1024}, spec=spec, **raw)


def _lists() -> Iterator[Demand]:
    half, query = 2**19 - 100, [[1.0, 0.0]]
    yield _json("a megabyte of heads", FORWARD, query=query, select={"heads": [0] * (half // 2)})
    yield _json("a megabyte of taps", FORWARD, query=query, **{"return": ["q"] * (half // 3)})
    yield _json("a megabyte of unknown fields", FORWARD, query=query, **{f"f{index}": 0 for index in range(half // 7)})
    yield _json("a megabyte of wrong heads", FORWARD, query=query, select={"heads": ["x"] * (half // 3)})
    yield _json("a megabyte of wrong edits", FORWARD, query=query, edits=[{"tap": "q", "heads": ["x"] * 900}] * 256)
    yield _json("a megabyte of numbers", FORWARD, query=[[0.5] * 1000] * 200)
    yield _json("a megabyte of rows of one", FORWARD, query=[[0]] * (half // 3))
    yield _json("a megabyte of text for numbers", FORWARD, query=[["NaN"] * 100] * 1000)
    yield _json("a megabyte of ragged rows", FORWARD, query=[[0]] * (half // 3) + [[0, 0]])
    yield _json("13 megabytes of numbers", FORWARD, query=[[0.5] * 1000] * 3200, key=[[0.5] * 1000], value=[[0.5]])
    yield _json("13 megabytes of taps", FORWARD, query=query, **{"return": ["q"] * (2**24 // 5)})
    yield Demand("half a million brackets", "POST", FORWARD, b'{"query": ' + b"[" * half)
    many = {f"f{index}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for index in range(100_000)}
    text = json.dumps(many).encode()
    header = len(text).to_bytes(8, "little") + text
    yield Demand("100,000 tensors of nothing", "POST", FORWARD, header, {"Content-Type": SAFETENSORS})
    yield _json("20,000 sequences with offsets", FORWARD, query=[[[[1.0, 0.0]]]] * 20_000, offsets=list(range(20_000)),
                spec={"masks": [{"name": "causal"}]})  # fmt: skip


def _heads() -> Iterator[Demand]:
    body = b'{"query": [[1.0, 0.0]]}'
    for count in (100, 2000):
        named = {f"X-{index}": "y" for index in range(count)}
        yield Demand(f"{count:,} headers", "POST", FORWARD, body, named)
    yield Demand("16 KB of Accept", "POST", FORWARD, body, {"Accept": ", ".join(["a/b;q=0.1"] * 1400)})
    yield Demand("60 KB of path", "GET", "/v1/modules/" + "a" * 60_000)
    yield Demand(
        "60 KB of query", "GET", "/v1/modules/m/parameters/p?" + "&".join(f"{index:x}" for index in range(12_000))
    )
    yield Demand("the metrics", "GET", "/metrics")
    yield Demand("the description", "GET", "/openapi.json")
    yield Demand("the variants", "GET", "/v1/variants")
    yield Demand("the hardware", "GET", "/v1/complexity/hardware")


def _json(name: str, path: str, **body: Any) -> Demand:
    return Demand(name, "POST", path, json.dumps(body, separators=(",", ":")).encode())
