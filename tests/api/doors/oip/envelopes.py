"""Envelopes of the protocol, written and read without the server's code."""

import json

import ml_dtypes
import numpy as np

TYPES = {
    "BOOL": np.dtype(bool), "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"), "FP16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"),
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TYPES.items()}
LENGTH = "Inference-Header-Content-Length"


def tensor(name, array, **more):
    """An input with its numbers in JSON."""
    described = {"name": name, "shape": list(array.shape), "datatype": NAMES[array.dtype]}
    return described | {"data": array.reshape(-1).tolist()} | more


def binary(inputs, **more):
    """A body with its inputs as bytes, and its header."""
    described = [
        {"name": name, "shape": list(x.shape), "datatype": NAMES[x.dtype], "parameters": {"binary_data_size": x.nbytes}}
        for name, x in inputs.items()
    ]
    head = json.dumps({"inputs": described} | more).encode()
    return head + b"".join(x.tobytes() for x in inputs.values()), {LENGTH: str(len(head))}


def infer(http, model, inputs, outputs=(), wants_binary=True, **parameters):
    """The outputs of a model and the reply's parameters, of inputs sent as bytes."""
    more = {"parameters": {"binary_data_output": wants_binary} | parameters}
    more |= {"outputs": [{"name": name} for name in outputs]} if outputs else {}
    body, headers = binary(inputs, **more)
    answer = http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return read(answer)


def read(answer):
    """The outputs of a reply by name, and its JSON object."""
    length = int(answer.headers.get(LENGTH, len(answer.content)))
    head, behind = json.loads(answer.content[:length]), answer.content[length:]
    outputs = {}
    for each in head["outputs"]:
        size = each.get("parameters", {}).get("binary_data_size")
        dtype = TYPES[each["datatype"]]
        if size is None:
            outputs[each["name"]] = np.array(each["data"], dtype).reshape(each["shape"])
        else:
            outputs[each["name"]] = np.frombuffer(behind[:size], dtype).reshape(each["shape"])
            behind = behind[size:]
    assert not behind
    return outputs, head


def refused(answer, status, *words):
    """The error object of an answer that must be refused, with words that must be in it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    reply = answer.json()
    assert isinstance(reply["error"], str)
    assert all(word in reply["error"] for word in words), reply["error"]
    return reply
