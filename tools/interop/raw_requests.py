"""Raw requests of the protocol, for a server of any make that has the model ``demo``.

It has an input ``query`` (FP32, ``[-1, 8]``), an optional one ``key`` of the same form, and an output ``output``.
"""

import gzip
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
LENGTH = "Inference-Header-Content-Length"
INFER = "/v2/models/demo/infer"


@dataclass(frozen=True)
class RawRequest:
    """One request, and a name for the tables."""

    name: str
    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


def tensor(**more: Any) -> dict[str, Any]:
    return {"name": "query", "shape": [3, 8], "datatype": "FP32", "data": X.reshape(-1).tolist()} | more


def binary(
    size: object = 96, data: bytes = X.tobytes(), length: object = None, **more: Any
) -> tuple[bytes, dict[str, str]]:
    described = {"name": "query", "shape": [3, 8], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [described]} | more).encode()
    return head + data, {LENGTH: str(len(head) if length is None else length)}


def envelopes() -> dict[str, Any]:
    """Envelopes in JSON, by name."""
    one = [tensor()]
    output = {"name": "output"}
    return {
        "one input": {"inputs": one},
        "nested data": {"inputs": [tensor(data=X.tolist())]},
        "two inputs": {"inputs": [*one, tensor(name="key")]},
        "an id": {"id": "a1", "inputs": one},
        "a numeric id": {"id": 7, "inputs": one},
        "model_name in the body": {"model_name": "demo", "inputs": one},
        "an output": {"inputs": one, "outputs": [output]},
        "an empty list of outputs": {"inputs": one, "outputs": []},
        "a binary output": {"inputs": one, "outputs": [output | {"parameters": {"binary_data": True}}]},
        "binary_data_output": {"inputs": one, "parameters": {"binary_data_output": True}},
        "an unknown output": {"inputs": one, "outputs": [{"name": "nothing"}]},
        "an output without a name": {"inputs": one, "outputs": [{}]},
        "outputs that are no list": {"inputs": one, "outputs": {}},
        "classification": {"inputs": one, "outputs": [output | {"parameters": {"classification": 2}}]},
        "no inputs": {"inputs": []},
        "no list of inputs": {},
        "inputs that are no list": {"inputs": {}},
        "an unknown input": {"inputs": [*one, tensor(name="quary")]},
        "an input twice": {"inputs": one * 2},
        "an input without a name": {"inputs": [{"shape": [3, 8], "datatype": "FP32", "data": [0.0] * 24}]},
        "an input without a shape": {"inputs": [{"name": "query", "datatype": "FP32", "data": [0.0] * 24}]},
        "an input without a datatype": {"inputs": [{"name": "query", "shape": [3, 8], "data": [0.0] * 24}]},
        "an input without data": {"inputs": [{"name": "query", "shape": [3, 8], "datatype": "FP32"}]},
        "an unknown datatype": {"inputs": [tensor(datatype="FP8")]},
        "another datatype": {"inputs": [tensor(datatype="INT64", data=[1] * 24)]},
        "BF16 in JSON": {"inputs": [tensor(datatype="BF16")]},
        "too few numbers": {"inputs": [tensor(data=[1.0] * 23)]},
        "too many numbers": {"inputs": [tensor(data=[1.0] * 25)]},
        "text for a number": {"inputs": [tensor(data=["1.0"] * 24)]},
        "whole numbers for FP32": {"inputs": [tensor(data=[1] * 24)]},
        "another width": {"inputs": [tensor(shape=[6, 4])]},
        "a negative size": {"inputs": [tensor(shape=[-3, 8])]},
        "a shape of text": {"inputs": [tensor(shape=["3", 8])]},
        "a shape that is no list": {"inputs": [tensor(shape=24)]},
        "no rows": {"inputs": [tensor(shape=[0, 8], data=[])]},
        "parameters that are a list": {"inputs": one, "parameters": [1]},
        "an unknown parameter": {"inputs": one, "parameters": {"colour": 1}},
        "a parameter that is an object": {"inputs": one, "parameters": {"colour": {}}},
        "triton_ parameter": {"inputs": one, "parameters": {"triton_x": 1}},
        "a timeout": {"inputs": one, "parameters": {"timeout": 10_000_000}},
        "a timeout as text": {"inputs": one, "parameters": {"timeout": "5"}},
        "a negative timeout": {"inputs": one, "parameters": {"timeout": -1}},
        "a priority": {"inputs": one, "parameters": {"priority": 1}},
        "a sequence": {"inputs": one, "parameters": {"sequence_id": 4, "sequence_start": True}},
        "shared memory": {"inputs": [{"name": "query", "shape": [3, 8], "datatype": "FP32", "parameters": {
            "shared_memory_region": "r", "shared_memory_byte_size": 96}}]},
        "an unknown field": {"inputs": one, "extra": 1},
    }  # fmt: skip


def raw_requests() -> list[RawRequest]:
    """Every request."""
    whole = json.dumps({"inputs": [tensor()]}).encode()
    found = [
        RawRequest("server", "GET", "/v2"),
        RawRequest("server, with a slash", "GET", "/v2/"),
        RawRequest("live", "GET", "/v2/health/live"),
        RawRequest("ready", "GET", "/v2/health/ready"),
        RawRequest("POST to live", "POST", "/v2/health/live", b""),
        RawRequest("metadata", "GET", "/v2/models/demo"),
        RawRequest("metadata of version 1", "GET", "/v2/models/demo/versions/1"),
        RawRequest("metadata of version 2", "GET", "/v2/models/demo/versions/2"),
        RawRequest("metadata of an unknown model", "GET", "/v2/models/nobody"),
        RawRequest("config", "GET", "/v2/models/demo/config"),
        RawRequest("config of an unknown model", "GET", "/v2/models/nobody/config"),
        RawRequest("model ready", "GET", "/v2/models/demo/ready"),
        RawRequest("unknown model ready", "GET", "/v2/models/nobody/ready"),
        RawRequest("statistics", "GET", "/v2/models/demo/stats"),
        RawRequest("statistics of all", "GET", "/v2/models/stats"),
        RawRequest("statistics of an unknown model", "GET", "/v2/models/nobody/stats"),
        RawRequest("index", "POST", "/v2/repository/index", b""),
        RawRequest("GET of the index", "GET", "/v2/repository/index"),
        RawRequest("load of an unknown model", "POST", "/v2/repository/models/nobody/load", b"{}"),
        RawRequest("unload of an unknown model", "POST", "/v2/repository/models/nobody/unload", b"{}"),
        RawRequest("an unknown path", "GET", "/v2/nothing"),
        RawRequest("GET of infer", "GET", INFER),
        RawRequest("log settings", "GET", "/v2/logging"),
        RawRequest("trace settings", "GET", "/v2/trace/setting"),
        RawRequest("shared memory's status", "GET", "/v2/systemsharedmemory/status"),
        RawRequest("an empty body", "POST", INFER, b""),
        RawRequest("no JSON", "POST", INFER, b"{"),
        RawRequest("a list", "POST", INFER, b"[]"),
        RawRequest("infer with an unknown model", "POST", "/v2/models/nobody/infer", whole),
        RawRequest("infer with version 1", "POST", "/v2/models/demo/versions/1/infer", whole),
        RawRequest("infer with version 2", "POST", "/v2/models/demo/versions/2/infer", whole),
        RawRequest("NaN in JSON", "POST", INFER, whole.replace(b"-1.0", b"NaN", 1)),
    ]  # fmt: skip
    found += [RawRequest(name, "POST", INFER, json.dumps(body).encode()) for name, body in envelopes().items()]
    cases: dict[str, tuple[bytes, dict[str, str]]] = {
        "binary input": binary(),
        "a size of 95": binary(95),
        "a size of 97": binary(97),
        "a size of -1": binary(-1),
        "a size as text": binary("96"),
        "no bytes behind": binary(data=b""),
        "more bytes behind": binary(data=X.tobytes() + b"\0"),
        "a length beyond the body": binary(length=9999),
        "a length of text": binary(length="x"),
        "a negative length": binary(length=-1),
        "one raw input": (X.tobytes(), {LENGTH: "0"}),
        "one raw input, torn": (X.tobytes()[:-1], {LENGTH: "0"}),
    }
    for coding, compress in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        body, headers = binary()
        cases[f"binary input in {coding}"] = compress(body), headers | {"Content-Encoding": coding}
        cases[f"broken {coding}"] = b"\0" + compress(body), headers | {"Content-Encoding": coding}
    body, headers = binary()
    cases["an unknown coding"] = body, headers | {"Content-Encoding": "br"}
    found += [RawRequest(name, "POST", INFER, body, headers) for name, (body, headers) in cases.items()]
    return found
