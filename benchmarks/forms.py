"""The forms in which servers take a query and give the output."""

import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from attention_contract.schemas.attention import ForwardReply, ForwardRequest
from attention_contract.wire import JSON, SAFETENSORS, from_body, to_body
from benchmarks.workloads import Floats

BYTES = "application/octet-stream"
HEADER_LENGTH = "Inference-Header-Content-Length"
Header = Callable[[str], str | None]
"""A header of the answer by its name."""


@dataclass(frozen=True)
class Request:
    """Body and headers of a POST request."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Form:
    """One way to ask."""

    name: str
    text: bool
    """True if numbers are sent as text."""
    write: Callable[[Floats], Request]
    read: Callable[[bytes, Header, tuple[int, ...]], NDArray[np.floating]]
    """The output, from the body, the headers and the shape that is expected."""


def raw(path: str, content_type: str = BYTES) -> Form:
    """Float32 as it lies in memory; both sides know the shape."""
    return Form(
        "raw", False,
        lambda query: Request(path, {"Content-Type": content_type}, query.tobytes()),
        lambda body, header, shape: np.frombuffer(body, np.float32).reshape(shape),
    )  # fmt: skip


def json_lists(path: str, given: str = "query", gotten: str | None = "output") -> Form:
    """An object with one member of nested lists; the same, or bare lists where ``gotten`` is None, come back."""

    def read(body: bytes, header: Header, shape: tuple[int, ...]) -> NDArray[np.floating]:
        reply = orjson.loads(body)
        return np.array(reply if gotten is None else reply[gotten])

    return Form("JSON", True, lambda query: Request(path, {"Content-Type": JSON}, _dumped({given: query})), read)


def base64(path: str) -> Form:
    """Float32 as base64 in a JSON object; raw bytes come back."""

    def write(query: Floats) -> Request:
        return Request(path, {"Content-Type": JSON}, _dumped({"query": b64encode(query.tobytes()).decode()}))

    return Form("base64", False, write, raw(path).read)


def ours(module: str, media_type: str) -> Form:
    """A forward request of this project."""
    headers = {"Content-Type": media_type, "Accept": media_type}
    path = f"/v1/modules/{module}/forward"

    def write(query: Floats) -> Request:
        return Request(path, headers, b"".join(to_body(ForwardRequest(query=query), media_type, "request")))

    def read(body: bytes, header: Header, shape: tuple[int, ...]) -> NDArray[np.floating]:
        return np.asarray(from_body(ForwardReply, body, media_type, "reply").output)

    return Form("JSON" if media_type == JSON else "safetensors", media_type == JSON, write, read)


def v2_json(model: str) -> Form:
    """The Open Inference Protocol, with tensors as flat lists."""

    def write(query: Floats) -> Request:
        tensor = _described(query) | {"data": query.reshape(-1)}
        return Request(_infer(model), {"Content-Type": JSON}, _dumped({"inputs": [tensor]}))

    def read(body: bytes, header: Header, shape: tuple[int, ...]) -> NDArray[np.floating]:
        reply = orjson.loads(body)["outputs"][0]
        return np.array(reply["data"]).reshape(reply["shape"])

    return Form("V2 JSON", True, write, read)


def v2_binary(model: str) -> Form:
    """The Open Inference Protocol, with tensors as bytes after the JSON text."""

    def write(query: Floats) -> Request:
        tensor = _described(query) | {"parameters": {"binary_data_size": query.nbytes}}
        output = {"name": "output", "parameters": {"binary_data": True}}
        text = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
        headers = {"Content-Type": BYTES, HEADER_LENGTH: str(len(text))}
        return Request(_infer(model), headers, text + query.tobytes())

    def read(body: bytes, header: Header, shape: tuple[int, ...]) -> NDArray[np.floating]:
        size = int(header(HEADER_LENGTH) or 0)
        return np.frombuffer(body[size:], np.float32).reshape(orjson.loads(body[:size])["outputs"][0]["shape"])

    return Form("V2 binary", False, write, read)


def _infer(model: str) -> str:
    return f"/v2/models/{model}/infer"


def _described(query: Floats) -> dict[str, object]:
    return {"name": "query", "shape": list(query.shape), "datatype": "FP32"}


def _dumped(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


__all__ = ["JSON", "SAFETENSORS", "Form", "Request", "base64", "json_lists", "ours", "raw", "v2_binary", "v2_json"]
