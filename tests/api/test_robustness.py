"""What an unkind caller sends: every request is answered or refused in a sentence, and nobody else notices."""

import base64
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from tools.fuzz.seeds import bend

from attention_contract.operations import OPENAI_PATHS, OPERATIONS
from attention_contract.wire import SAFETENSORS
from tests.api.talk import post, problem, refuse
from tests.api.test_protocol_abuse import connected, until_closed
from tests.conftest import eventually, live_server

RAW = "/v1/attention"
Q = [[1.0, 0.0], [0.0, 1.0]]
SECONDS = 4.0
"""Of the processor, of which other load takes none. Far above what a refusal takes, far below what an attack would."""


def empty(*shape: int, dtype: str = "float32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data": []}


def zeros(*shape: int) -> dict[str, Any]:
    data = base64.b64encode(bytes(4 * int(np.prod(shape)))).decode()
    return {"dtype": "float32", "shape": list(shape), "base64": data}


def idle(http: httpx.Client) -> bool:
    """Whether the memory in flight comes back to nothing."""
    return eventually(lambda: not http.get("/v1").json()["memory"]["in_flight_bytes"])


@pytest.fixture(scope="module")
def module(http):
    http.post("/v1/modules", json={"name": "robust", "config": {"d_model": 8, "num_heads": 2}})
    return "robust"


# ── small bodies that ask for much ───────────────────────────────────────────────────────────────────────────────────

WINDOW = {"masks": [{"name": "sliding_window", "left": 1, "right": 1}]}
NESTED: dict[str, Any] = {"name": "sliding_window", "left": 0, "right": 0}
for _ in range(3):
    NESTED = {"name": "any", "of": [NESTED] * 5}
MANY = 3 * 10**5
GREEDY: dict[str, tuple[str, dict[str, Any]]] = {
    "queries without a batch": ("weights", {"query": empty(0, 1, 2**40, 1), "key": empty(0, 1, 1, 1)}),
    "keys without a batch": ("forward", {"query": empty(0, 1, 2, 1), "key": empty(0, 1, 2**40, 1), "spec": WINDOW}),
    "padding without a batch": (
        "forward",
        {"query": empty(0, 1, 2, 1), "key": empty(0, 1, 2**30, 1), "key_lengths": empty(0, dtype="int64")},
    ),
    "pairs without a batch": ("forward", {"query": empty(0, 1, 2**21, 1), "spec": WINDOW, "kernel": "fused"}),
    "sequences without queries": ("weights", {"query": empty(2**40, 1, 0, 1)}),
    "heads without queries": ("gradients", {"query": empty(1, 2**40, 0, 1)}),
    "past without a batch": (
        "forward",
        {"query": empty(0, 1, 1, 1), "past_key": empty(0, 1, 2**40, 1), "past_value": empty(0, 1, 2**40, 1)},
    ),
    "sizes that overflow": ("forward", {"query": empty(0, 2**31, 2**28, 1), "return": ["weights"]}),
    "one row many times": (
        "forward",
        {"query": Q, "return": ["weights"], "select": {"heads": [0] * MANY, "queries": [0] * MANY}},
    ),
    "top keys of one row many times": (
        "weights",
        {"query": Q, "top_k": 2, "return_weights": False, "select": {"heads": [0] * MANY, "queries": [0] * MANY}},
    ),
    "a value for one place many times": (
        "forward",
        {"query": Q, "edits": [{"tap": "weights", "queries": [0] * 10**4, "keys": [1] * 10**4, "value": 1.0}]},
    ),
    "masks in masks": ("forward", {"query": Q, "spec": {"masks": [NESTED]}}),
    "weights of a long sequence": ("forward", {"query": zeros(1, 1, 10**6, 1), "return": ["weights"]}),
    "a mask for a long sequence": ("forward", {"query": zeros(1, 1, 10**6, 1), "spec": WINDOW, "kernel": "fused"}),
    "every gradient of a long sequence": (
        "gradients",
        {"query": zeros(1, 1, 10**6, 1), "wrt": ["query", "scores", "weights"], "check": True},
    ),
}


@pytest.mark.sampled(attack=8)
@pytest.mark.parametrize("attack", GREEDY)
def test_what_would_take_more_than_there_is_is_refused_at_once(http, attack):
    operation, body = GREEDY[attack]
    text = json.dumps(body)
    started = time.process_time()
    answer = http.post(f"{RAW}/{operation}", content=text, headers={"content-type": "application/json"})
    assert time.process_time() - started < SECONDS
    assert answer.status_code in {413, 422, 507}, answer.text
    assert len(answer.text) < 2000
    problem(answer)
    assert idle(http)


@pytest.mark.parametrize(
    "body",
    [
        {"shape": {"queries": 2**40}},
        {"shape": {"queries": 2**31 - 1}},
        {"shape": {"queries": 2, "batch": 10**30}},
        {"shape": {"queries": 2**31 - 1, "past": 2**31 - 1}, "sweep": {"values": [2**31 - 1, 1]}},
        {"shape": {"queries": 100}, "spec": {"masks": [NESTED]}},
        {"shape": {"queries": 2}, "spec": {"masks": [{"name": "global_tokens", "positions": [*range(4096)]}] * 5}},
    ],
)
def test_a_cost_beyond_counting_is_refused(http, body):
    refused = refuse(http, f"{RAW}/complexity", num_heads=64, head_dim=128, **body)
    assert refused["status"] == 422
    assert refused["param"].partition(".")[0] in {"shape", "spec", "sweep"}


@pytest.mark.slow
def test_the_most_masks_there_may_be_are_counted_in_time(http):
    masks = [{"name": "global_tokens", "positions": list(range(i, 8000, 2))[:4000]} for i in range(4)]
    masks += [{"name": "any", "of": [{"name": "sliding_window", "left": 9 * i, "right": i}] * 2} for i in range(12)]
    started = time.process_time()
    post(http, f"{RAW}/complexity", shape={"queries": 10**5}, num_heads=1, head_dim=4, spec={"masks": masks})
    assert time.process_time() - started < 5 * SECONDS


@pytest.mark.parametrize(("count", "detail"), [(10_000, b"the query has"), (3000, b"too many to name")])
def test_many_names_in_a_query_are_refused_in_time(server, count, detail):
    names = "&".join(f"{index:x}=" for index in range(count))
    started = time.process_time()
    answer = exchange(server, head("GET", f"/v1/modules/m/parameters/p?{names}", connection="close"))
    assert time.process_time() - started < SECONDS
    assert answer.startswith(b"HTTP/1.1 422")
    assert detail in answer


@pytest.mark.slow
def test_many_tensors_of_nothing_are_refused_in_time(http):
    header = {f"f{index}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for index in range(200_000)}
    text = json.dumps(header).encode()
    started = time.process_time()
    body = len(text).to_bytes(8, "little") + text
    refusal = problem(http.post(f"{RAW}/forward", content=body, headers={"content-type": SAFETENSORS}))
    assert time.process_time() - started < SECONDS
    assert (refusal["status"], refusal["code"]) == (400, "unreadable")


# ── numbers at the edge ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("operation", "more", "param"),
    [
        ("forward", {"edits": [{"tap": "q", "set": 1e300}]}, "edits.0.set"),
        ("forward", {"edits": [{"tap": "q", "scale": 1.0}, {"tap": "q", "value": [1e300, 1]}]}, "edits.1.value"),
        ("gradients", {"upstream": [[1e300, 0], [0, 0]]}, "upstream"),
        ("gradients", {"key": [[1e300, 0]]}, "key"),
    ],
)
def test_a_number_too_large_for_what_is_computed_in_is_refused_by_name(http, operation, more, param):
    assert refuse(http, f"{RAW}/{operation}", query=Q, **more)["param"] == param


@pytest.mark.parametrize("tap", ["q", "k", "v", "scores", "masked_scores", "weights", "context", "output"])
def test_a_value_for_a_tap_without_elements_changes_nothing(http, tap):
    no_queries = {"query": empty(0, 2), "key": Q} if tap not in {"k", "v"} else {"query": Q, "key": empty(0, 2)}
    reply = post(http, f"{RAW}/forward", **no_queries, edits=[{"tap": tap, "value": 1.0}])
    assert np.sum(reply["output"]) == 0


def test_a_mask_may_be_one_wide_where_there_are_no_keys(http):
    reply = post(http, f"{RAW}/forward", query=Q, key=empty(0, 2), mask=[[True], [True]])
    assert reply["output"] == [[0, 0], [0, 0]]


# ── bodies that were bent ────────────────────────────────────────────────────────────────────────────────────────────

FULL: dict[str, Any] = {
    "mask": [[0.0, "-Infinity"], [0.0, 0.0]], "key_mask": [True, True], "key_lengths": 2, "offsets": -1,
    "edits": [{"tap": "weights", "heads": [0], "keys": [1], "set": 0, "renormalize": True}],
    "return": ["output", "weights", "lse"], "select": {"heads": [0], "queries": [1, 0]}, "average_heads": True,
    "kernel": "materialized", "encoding": "base64",
}  # fmt: skip
SPEC = {
    "score": {"name": "scaled_dot", "scale": 0.5}, "softcap": 2.0,
    "position": {"name": "rope", "dim": 2, "style": "interleaved"},
    "masks": [{"name": "any", "of": [{"name": "causal"}, {"name": "global_tokens", "positions": [0]}]}],
    "normalizer": {"name": "softmax", "temperature": 0.5}, "method": {"name": "exact"},
}  # fmt: skip
X = [[0.1 * i for i in range(8)], [0.3] * 8]
VALID: list[tuple[str, dict[str, Any]]] = [
    *((operation.path, operation.example) for operation in OPERATIONS if operation.example),
    (f"{RAW}/forward", {"query": Q, **FULL, "spec": SPEC, "positions": [4, 2]}),
    (
        f"{RAW}/gradients",
        {"query": Q, "key": Q, **FULL, "spec": SPEC, "wrt": ["key", "mask", "weights"], "check": True},
    ),
    (f"{RAW}/weights", {"query": Q, "spec": SPEC, "top_k": 2, "query_mask": [True, False], "return_weights": False}),
    (
        "/v1/modules/{name}/gradients",
        {"query": X, **FULL, "wrt": ["parameters", "q"], "upstream": X},
    ),
    ("/v1/modules/{name}/parameters", {"parameters": {"q_proj.weight": X}}),
]


@pytest.mark.slow
def test_bent_bodies_are_answered_or_refused(http, module):
    rng = random.Random(7)
    seen: set[int] = set()
    for _ in range(700):
        path, valid = rng.choice(VALID)
        body = bend(json.dumps(valid).encode(), rng)
        method = "PUT" if path.endswith("/parameters") else "POST"
        headers = {"content-type": "application/json"}
        answer = http.request(method, path.replace("{name}", module), content=body, headers=headers)
        seen.add(answer.status_code)
        assert answer.status_code < 500 or answer.status_code == 507, (path, body, answer.text)
        assert len(answer.text) < 4000 or answer.status_code == 200
        if answer.status_code >= 400 and path in OPENAI_PATHS:
            assert answer.json()["error"]["code"], answer.text
        elif answer.status_code >= 400:
            problem(answer)
    assert {200, 422} <= seen
    assert idle(http)


# ── beside others ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_version_in_a_reply_is_the_one_that_made_its_numbers(server, http):
    config = {"d_model": 1, "num_heads": 1, "bias": False}
    names = [f"{name}_proj.weight" for name in "qkvo"]

    def parameters(number: float) -> dict[str, Any]:
        return {name: [[1.0]] for name in names} | {"o_proj.weight": [[number]]}

    made = post(http, "/v1/modules", name="robust.race", config=config, parameters=parameters(0.0))
    versions = {made["version"]: 0.0}
    found: list[tuple[str, float]] = []
    stop = threading.Event()

    def look() -> None:
        with httpx.Client(base_url=server, timeout=60) as client:
            while not stop.is_set():
                reply = post(client, "/v1/modules/robust.race/forward", query=[[1.0]])
                found.append((reply["ran"]["version"], reply["output"][0][0]))

    with ThreadPoolExecutor(2) as threads:
        looking = [threads.submit(look) for _ in range(2)]
        for number in range(1, 16):
            answer = http.put("/v1/modules/robust.race/parameters", json={"parameters": parameters(number)})
            versions[answer.json()["version"]] = number
        stop.set()
        for one in looking:
            one.result()
    assert len(versions) == 16
    assert all(versions[version] == number for version, number in found)
    assert found


def test_a_module_may_be_deleted_while_it_answers(server, http):
    config = {"d_model": 64, "num_heads": 2}
    statuses: list[int] = []

    def look() -> None:
        with httpx.Client(base_url=server, timeout=60) as client:
            body = {"query": zeros(1, 100, 64), "return": ["output", "weights"]}
            statuses.extend(client.post("/v1/modules/robust.gone/forward", json=body).status_code for _ in range(8))

    for seed in range(4):
        post(http, "/v1/modules", name="robust.gone", config=config, seed=seed)
        with ThreadPoolExecutor(2) as threads:
            looking = [threads.submit(look) for _ in range(2)]
            time.sleep(0.03)
            assert http.delete("/v1/modules/robust.gone").status_code == 204
            for one in looking:
                one.result()
    assert set(statuses) <= {200, 404}
    assert http.get("/v1/modules/robust.gone").status_code == 404
    assert idle(http)


# ── the protocol itself ──────────────────────────────────────────────────────────────────────────────────────────────


def exchange(server: str, request: bytes) -> bytes:
    """What comes back on one connection until the server closes it."""
    with connected(server) as raw:
        raw.sendall(request)
        return until_closed(raw)


def head(method: str, target: str, **headers: object) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "host: localhost"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "path",
    [
        "/v1/modules/..", "/v1/modules/../..", "/v1/modules/%2e%2e/forward", "/v1/modules/a%2Fb", "/v1/modules/%00",
        "/v1/modules/%ff%fe", "/v1/modules/%", "/v1/modules/%zz", "/v1/modules/" + "a" * 30_000, "//v1//modules",
        "/v1/modules/é", "/v1/modules/a/parameters/..%2f..%2fetc", "/web/..%2f..%2fsettings.py", "/web/%00", "/v1/",
        "/v1/modules/x/parameters/q?slice=%F0%9F%98%80", "/v1?x=%", "/v1/modules?" + "a=b&" * 2000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PATCH"])
def test_odd_paths_and_methods_are_answered(server, method, path):
    body = exchange(server, head(method, "X", connection="close").replace(b"X", path.encode(), 1))
    status = int(body.split(b" ", 2)[1])
    assert status < 500, body[:300]
    if status == 405:
        assert b"\r\nallow: " in body.lower()
    if method == "HEAD" and b"not HTTP/1.1" not in body:
        assert body.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("header", "value", "statuses"),
    [
        ("accept", "*/*;q=0", {200, 406}), ("accept", "application/json;q=abc", {200, 406}), ("accept", ";;", {406}),
        ("accept", "application/*, text/html;q=0.1", {200}), ("accept", "image/gif", {406}), ("accept", "/", {406}),
        ("accept", "a/b," * 500 + "*/*", {200}), ("accept", "*", {200}), ("accept", "é/é", {406}),
        ("accept", "Application/JSON;Q=0.5", {200}), ("prefer", "Wait=0", {503}), ("prefer", "wait=0", {503}),
        ("content-type", "text/plain", {415}), ("content-type", "application/json; charset=utf-8", {200}),
        ("content-type", "APPLICATION/JSON", {200}), ("content-type", ";", {200, 415}),
        ("content-encoding", "gzip", {400}), ("content-encoding", "br", {415}),
        ("if-match", "x", {422}), ("if-match", '"a", "b"', {422}),
        ("if-match", '"' + "a" * 4000 + '"', {409, 422}), ("if-match", "*", {200}), ("if-match", '"é"', {409}),
        ("x-request-id", "é" * 10, {200}), ("expect", "100-continue", {200}),
    ],
)  # fmt: skip
def test_odd_headers_are_understood_or_refused(http, module, header, value, statuses):
    body = json.dumps({"query": X}).encode()
    sent = {"content-type": "application/json"} | {header: value.encode("utf-8")}
    answer = http.post(f"/v1/modules/{module}/forward", content=body, headers=sent)
    assert answer.status_code in statuses, answer.text
    if answer.status_code >= 400:
        problem(answer)


def test_modules_that_are_left_out_are_counted(tmp_path):
    for name in ("damaged", "empty"):
        (tmp_path / "modules" / name).mkdir(parents=True)
        (tmp_path / "modules" / name / "config.json").write_text("{")
    with live_server(tmp_path) as url:
        eventually(lambda: httpx.get(f"{url}/health/ready").json()["modules_left_out"] == 2)
        assert httpx.get(f"{url}/health/live").json()["modules_left_out"] == 2
        assert "attention_modules_left_out 2.0" in httpx.get(f"{url}/metrics").text
