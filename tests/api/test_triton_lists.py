"""What Triton's lists of HTTP requests, input sizes and input validation have beside the other tests here.

Source: triton-inference-server/server, ``qa/L0_http`` (http_test.py, http_input_size_limit_test.py,
http_request_many_chunks.py), ``qa/L0_http_fuzz`` (fuzztest.py) and ``qa/L0_input_validation``
(input_validation_test.py). Each test names the case that it rewrites. Where Triton answers 500, a 4xx is expected here.
"""

import json
import random
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from attention_contract.operations import OPERATIONS
from attention_contract.wire import SAFETENSORS
from tests.api.talk import post, problem, received, refuse

RAW = "/v1/attention/forward"
NAME = "triton.lists"
X = [[0.5] * 8, [0.25] * 8]


@pytest.fixture(scope="module")
def module(http):
    post(http, "/v1/modules", name=NAME, config={"d_model": 8, "num_heads": 2}, seed=0)
    return f"/v1/modules/{NAME}"


@pytest.fixture(autouse=True)
def alive(http):
    """After each case the server answers, as after each of Triton's."""
    yield
    assert http.get("/health/live").status_code == 200


def as_file(array: np.ndarray, **header: Any) -> bytes:
    """The array as the query of a safetensors request, with parts of its entry replaced."""
    entry = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [0, array.nbytes]} | header
    text = json.dumps({"query": entry}).encode()
    return len(text).to_bytes(8, "little") + text + array.tobytes()


def send(http: httpx.Client, body: bytes, **headers: str) -> httpx.Response:
    return http.post(RAW, content=body, headers={"content-type": SAFETENSORS, "accept": "application/json"} | headers)


# ── L0_http, http_test.py ────────────────────────────────────────────────────────────────────────────────────────────


def test_chunked_by_hand(http):
    """test_content_encoding_chunked_manually."""
    x = np.arange(8, dtype=np.float32)[None]
    body = as_file(x)
    answer = http.post(
        RAW,
        content=iter([body[:5], body[5:40], body[40:]]),
        headers={"content-type": SAFETENSORS, "accept": "application/json"},
    )
    assert answer.json()["output"] == x.tolist()


@pytest.mark.parametrize("name", ["A" * 256, "file:" + "A" * 256, "A" * 10_000])
def test_a_name_longer_than_the_file_system_takes_is_refused(http, name):
    """test_load_oversized_file_parameter; Triton answers 500."""
    refused = refuse(http, "/v1/modules", name=name, config={"d_model": 8, "num_heads": 2})
    assert (refused["status"], refused["param"]) == (422, "name")


def test_a_reply_that_is_named_twice_comes_once_or_is_refused(http, module):
    """test_duplicate_output_names."""
    answer = http.post(f"{module}/forward", json={"query": X, "return": ["output", "output"]})
    if answer.status_code == 200:
        assert answer.text.count('"output"') == 1
    else:
        assert problem(answer)["status"] == 422


# ── L0_http, http_input_size_limit_test.py and test.sh ───────────────────────────────────────────────────────────────


def test_a_json_body_over_its_limit_is_refused(server, http):
    """test_default_limit_json."""
    limit = http.get("/v1").json()["limits"]["max_json_bytes"]
    address = urlsplit(server)
    head = f"POST {RAW} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {limit + 1}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=20) as raw:
        raw.sendall(head.encode())  # the refusal does not wait for the body
        refused = json.loads(received(raw).partition("\r\n\r\n")[2])
    assert (refused["status"], refused["code"]) == (413, "body_too_large")
    assert str(limit) in refused["detail"]


# ── L0_http, http_request_many_chunks.py ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [1_000, 65_537])
def test_very_many_chunks_are_read_in_bounded_memory(server, http, count):
    """test_chunked_infer_over_max_chunks_reject_with_bounded_rss_growth: chunks are joined as they come, so many are
    no fault; none of their memory stays."""
    address = urlsplit(server)
    head = f"POST {RAW} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=30) as raw:
        raw.sendall(head.encode() + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nA\r\n" * count + b"0\r\n\r\n")
        came = b"".join(iter(lambda: raw.recv(65536), b""))
    assert came.startswith(b"HTTP/1.1 400")
    assert http.get("/v1").json()["memory"]["in_flight_bytes"] == 0


# ── L0_http_fuzz ─────────────────────────────────────────────────────────────────────────────────────────────────────

METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE"]
STRINGS = [
    "", "/", "//", "/.", "/..", "/../../../../../../etc/passwd", "%00", "%n%n%n%s", "%s" * 100, "A" * 1000, "\\", "'",
    '"', "<script>alert(1)</script>", "' OR 1=1 --", "; ls", "| cat /etc/passwd", "`id`", "$(id)", "\u0000", "\x01",
    "\xff" * 64, "?", "#", "?" + "a=b&" * 500, "%", "%zz", "%c0%ae%c0%ae/", "😀", "\t", "0" * 20, "-1", "1e309", "{}",
    "[" * 500,
]  # fmt: skip
VERSIONS = [
    "HTTP/1.1",
    "HTTP/1.0",
    "HTTP/0.9",
    "HTTP/2",
    "HTTP/1.1.1",
    "http/1.1",
    "HTTP/",
    "",
    "HTTP/65536.1",
    "A" * 500,
]


def answered_or_closed(server: str, request: bytes) -> bool:
    """Send a request; True if the server answers it below 500 or closes the connection."""
    address = urlsplit(server)
    with socket.create_connection((address.hostname, address.port), timeout=10) as raw:
        try:
            raw.sendall(request)
            raw.shutdown(socket.SHUT_WR)
            came = raw.recv(64)
        except ConnectionError:
            return True
    return not came or int(came.split()[1]) < 500


def request_lines(count: int) -> list[bytes]:
    """Every method with every target, and odd targets and versions drawn at random."""
    rng = random.Random(3)
    targets = ["/", "/metrics", "/openapi.json", *(operation.path for operation in OPERATIONS)]
    targets = [target.replace("{name}", NAME).replace("{id}", "7-1") for target in targets]
    made = []
    for _ in range(count):
        target = rng.choice(targets)
        place = rng.randint(0, len(target))
        odd = rng.choice([target, target + rng.choice(STRINGS), target[:place] + rng.choice(STRINGS) + target[place:]])
        # A module of other tests is not deleted: DELETE goes to the names of this file alone.
        made.append(f"{rng.choice(METHODS)} {odd} {rng.choice(VERSIONS)}\r\n\r\n".encode("utf-8", "surrogatepass"))
    return made


@pytest.mark.parametrize("count", [250, pytest.param(20_000, marks=pytest.mark.slow)])
def test_request_lines_at_random(server, count):
    """fuzztest.py, without its library: methods, targets and versions, each with odd strings."""
    for line in request_lines(count):
        assert answered_or_closed(server, line), line


# ── L0_input_validation ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "sent", "missing"),
    [
        (RAW, {}, "query"),
        (RAW, {"query": [[1.0]], "key": [[1.0]], "value": None, "past_key": [[1.0]]}, "past_value"),
        ("/v1/modules", {}, "name"),
        ("/v1/modules", {"name": "triton.none"}, "config"),
        ("/v1/modules", {"name": "triton.none", "config": {"d_model": 8}}, "config.num_heads"),
        ("/v1/hopfield/retrieve", {"states": [[1.0]]}, "stored"),
        ("/v1/attention/complexity", {"num_heads": 1, "head_dim": 4}, "shape"),
    ],
)
def test_a_missing_input_is_named(http, path, sent, missing):
    """test_input_validation_required_empty, …_required_missing, …_optional."""
    refused = refuse(http, path, **sent)
    assert refused["status"] == 422
    assert missing in (refused["param"], *refused["detail"].replace(":", " ").replace(",", " ").split()), refused


@pytest.mark.parametrize(
    "name",
    [
        "../model", "..", ".", "a/b", "a\\b", "/etc/passwd", "a/../b", "model/../../etc", "..%2f", "\\..\\", "", " ",
        "  ", "\t", "\n", "a\0b", "a b", "a\nb", "é", "-",
    ],
)  # fmt: skip
def test_a_name_that_could_leave_the_store_or_is_blank_is_refused(http, name):
    """test_model_name_invalid_load, …_empty_load, …_whitespace_only_load."""
    answer = http.post("/v1/modules", json={"name": name, "config": {"d_model": 8, "num_heads": 2}, "durable": False})
    if answer.status_code == 201:
        assert name == "-"
        http.delete("/v1/modules/-")
        return
    refused = problem(answer)
    assert (refused["status"], refused["param"]) == (422, "name")


@pytest.mark.parametrize("name", ["model", "model-1", "model_1", "Model.v2", "0", "a" * 64])
def test_an_ordinary_name_is_taken(http, name):
    """test_model_name_valid."""
    full = f"triton.{name}"[:64]
    made = http.post("/v1/modules", json={"name": full, "config": {"d_model": 8, "num_heads": 2}, "durable": False})
    assert made.status_code == 201, made.text
    assert http.delete(f"/v1/modules/{full}").status_code == 204
