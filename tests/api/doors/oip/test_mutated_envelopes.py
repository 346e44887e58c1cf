"""Envelopes of which something is wrong: no answer of the server is a fault of its own."""

import json
import random
from collections import Counter

import httpx
import numpy as np
import pytest
from tools.fuzz.seeds import bend

from tests.api.doors.oip.envelopes import LENGTH, tensor

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
NAMES = (
    "id", "model_name", "model_version", "parameters", "inputs", "outputs", "name", "shape", "datatype", "data",
    "binary_data_size", "binary_data", "binary_data_output", "timeout", "priority", "sequence_id", "headers",
    "triton_x", "spec", "select", "edits", "return", "wrt", "statistics", "statistic_options", "top_k", "kernel",
    "version", "dropout", "num_heads", "compare", "check", "labels", "shared_memory_region", "classification", "query",
    "key", "mask", "parameters.q_proj.weight", "edits.0.value", "tap_upstream.weights", "directions.query", "past_key",
    "offsets", "", ".", "a.b.c", "gradients.query", "statistics.entropy", "top.keys", "differences.output", "weights",
    "lse",
)  # fmt: skip
MODELS = ("demo", "demo:weights", "demo:gradients", "_attention", "_attention:weights", "_attention:gradients", "brain")
BINARY = {
    "inputs": [{"name": "query", "shape": [3, 8], "datatype": "FP32", "parameters": {"binary_data_size": 96}}],
    "parameters": {"edits": '[{"tap": "weights", "set": 0}]', "select": '{"heads": [1]}'},
}
WHOLE = (
    {"inputs": [tensor("query", X)]},
    {"inputs": [tensor("query", X), tensor("key_mask", np.ones(3, bool))], "id": "1",
     "parameters": {"binary_data_output": True, "timeout": 10**8}, "outputs": []},
    BINARY,
    {"inputs": [tensor("query", X)], "outputs": [{"name": "weights", "parameters": {"binary_data": True}}]},
    {"inputs": [tensor("query", X)], "parameters": {"spec": '{"masks": [{"name": "causal"}]}', "num_heads": 2}},
)  # fmt: skip


def body_of(draw, envelope, behind):
    """The bytes of an envelope with some changes and what follows it, and its headers, any of which may be wrong."""
    head = bend(json.dumps(envelope).encode(), draw, NAMES)
    if draw.random() < 0.2:
        behind = draw.choice([b"", X.tobytes(), X.tobytes()[:-1], b"\xff" * 96])
    if draw.random() < 0.1:
        cut = draw.randrange(len(head))
        head = head[:cut] + bytes([draw.randrange(256)]) + head[cut + draw.randint(0, 3) :]
    headers = {}
    if behind or draw.random() < 0.1:
        headers[LENGTH] = draw.choice(
            [str(len(head))] * 8 + ["0", "-1", "x", str(len(head) + 500), str(len(head) // 2)]
        )
    if draw.random() < 0.03:
        headers["content-encoding"] = draw.choice(["gzip", "deflate", "zstd", "br"])
    return head + behind, headers


def walk(http, count, seed):
    """Send so many mutated envelopes. Returns how many had each status; fails at one of the server's own faults."""
    draw, statuses = random.Random(seed), Counter()
    for number in range(count):
        whole = draw.choice(WHOLE)
        body, headers = body_of(draw, whole, X.tobytes() if whole is BINARY else b"")
        model = draw.choice(MODELS)
        answer = http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
        statuses[answer.status_code] += 1
        assert answer.status_code in {200, 400, 404, 409, 413, 415, 501, 503}, (
            number,
            model,
            body,
            headers,
            answer.text,
        )
        if answer.status_code != 200:
            assert isinstance(answer.json()["error"], str)
            assert len(answer.content) < 4096, "the input came back"
    return statuses


@pytest.mark.slow
def test_no_mutated_envelope_is_a_fault_of_the_server(http):
    statuses = walk(http, 600, seed=1)
    assert statuses[200] > 20
    assert statuses[400] > 200


@pytest.mark.slow
def test_twenty_thousand_mutated_envelopes(door):
    with httpx.Client(base_url=door.url, timeout=60, headers={"authorization": f"Bearer {door.key}"}) as http:
        assert walk(http, 20_000, seed=2).total() == 20_000
