"""Triton's lists of HTTP requests, input sizes and input validation, put to this server.

Source: triton-inference-server/server, ``qa/L0_http`` (http_test.py, http_input_size_limit_test.py,
http_request_many_chunks.py), ``qa/L0_http_fuzz`` (fuzztest.py) and ``qa/L0_input_validation``
(input_validation_test.py). Each test names the case that it rewrites. Where Triton answers 500, a 4xx is expected here.
"""

import base64
import gzip
import itertools
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
def module(server):
    with httpx.Client(base_url=server, timeout=60) as client:
        post(client, "/v1/modules", name=NAME, config={"d_model": 8, "num_heads": 2}, seed=0)
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


@pytest.mark.parametrize("size", [8, 32])
def test_raw_binary(http, size):
    """test_raw_binary, test_raw_binary_longer: one query looks at itself, so that the output is the input."""
    x = np.arange(size, dtype=np.float32)[None]
    answer = send(http, as_file(x))
    assert answer.json()["output"] == x.tolist()


def test_several_variable_dimensions_need_a_shape(http):
    """test_multi_variable_dimensions, test_byte_too_many_elements: bytes alone do not tell a shape."""
    refused = problem(send(http, np.ones((2, 2), np.float16).tobytes()))
    assert (refused["status"], refused["code"]) == (400, "unreadable")


def test_bytes_of_several_inputs_without_names_are_refused(http):
    """test_multi_inputs."""
    refused = problem(send(http, as_file(np.zeros((1, 8), np.float32)) + bytes(64)))
    assert "accounts for" in refused["detail"]


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


@pytest.mark.parametrize("coding", ["compress", "identity, gzip", "br"])
def test_an_unsupported_coding_is_refused(http, coding):
    """test_content_encoding_unsupported_client."""
    refused = problem(send(http, as_file(np.zeros((1, 8), np.float32)), **{"content-encoding": coding}))
    assert refused["status"] == 415
    assert "gzip" in refused["detail"]


@pytest.mark.parametrize(
    "shape",
    [[2**4, 2**60 + 2], [2**2, 2**60 + 2], [2**31, 2**31, 4], [2**63], [2**64], [2**32, 2**32]],
)
@pytest.mark.parametrize("form", ["data", "base64", "safetensors"])
def test_sizes_that_overflow_are_refused(http, shape, form):
    """test_buffer_size_overflow."""
    if form == "safetensors":
        refused = problem(send(http, as_file(np.ones((1, 1), np.float32), shape=shape)))
    else:
        data = [1.0] if form == "data" else base64.b64encode(bytes(4)).decode()
        refused = refuse(http, RAW, query={"dtype": "float32", "shape": shape, form: data})
    assert refused["status"] == 422
    assert refused["param"].startswith("query")


@pytest.mark.parametrize("shape", [[2, -5], [-1], [-(2**63), 1], [0.5, 2], [True, 2], ["2", 2], None, 2, {}])
def test_a_shape_that_is_no_list_of_counts_is_refused(http, shape):
    """test_negative_dimensions; Triton answers 500."""
    assert refuse(http, RAW, query={"dtype": "float32", "shape": shape, "data": [1.0]})["status"] == 422
    assert problem(send(http, as_file(np.ones((1, 1), np.float32), shape=shape)))["status"] in {400, 422}


@pytest.mark.parametrize("name", ["A" * 256, "file:" + "A" * 256, "A" * 10_000])
def test_a_name_longer_than_the_file_system_takes_is_refused(http, name):
    """test_load_oversized_file_parameter; Triton answers 500."""
    refused = refuse(http, "/v1/modules", name=name, config={"d_model": 8, "num_heads": 2})
    assert (refused["status"], refused["param"]) == (422, "name")


@pytest.mark.parametrize("depth", [120, 254, 255, 256, 970, 1_000, 1_023, 1_024, 2_000, 250_000])
@pytest.mark.parametrize("value", ["1.0", '"x"'])
@pytest.mark.parametrize("field", ["query", "spec", "unknown"])
def test_deeply_nested_json_is_refused(http, depth, value, field):
    """test_json_recursion_depth_limit, test_repository_index_deeply_nested_json."""
    text = f'{{"{field}": {"[" * depth}{value}{"]" * depth}}}'
    answer = http.post(RAW, content=text, headers={"content-type": "application/json"})
    assert problem(answer)["status"] in {400, 422}
    assert len(answer.content) < 2000


def test_nesting_within_the_limit_is_read(http):
    """test_json_recursion_depth_limit: the depth that succeeds."""
    assert post(http, RAW, query=[[[[1.0]]]])["output"] == [[[[1.0]]]]


def test_a_reply_that_is_named_twice_comes_once_or_is_refused(http, module):
    """test_duplicate_output_names."""
    answer = http.post(f"{module}/forward", json={"query": X, "return": ["output", "output"]})
    if answer.status_code == 200:
        assert answer.text.count('"output"') == 1
    else:
        assert problem(answer)["status"] == 422


@pytest.mark.parametrize("length", [99_999_999_999, 2**31, 2**63, 2**64 - 1])
def test_a_header_length_out_of_range_is_refused(http, length):
    """test_inference_header_content_length_out_of_range: here the length stands in the file."""
    refused = problem(send(http, length.to_bytes(8, "little") + b"{}"))
    assert (refused["status"], refused["code"]) == (400, "unreadable")


# ── L0_http, http_input_size_limit_test.py and test.sh ───────────────────────────────────────────────────────────────


def test_a_small_body_that_means_a_large_tensor_is_refused(http):
    """test_json_dtype_size_expansion_exceeds_limit_error: few bytes, a wide dtype and a large shape."""
    for dtype, data in (("float64", [1]), ("float32", []), ("int64", [0] * 100)):
        refused = refuse(http, RAW, query={"dtype": dtype, "shape": [2**12, 2**12], "data": data})
        assert refused["status"] == 422


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


@pytest.mark.parametrize("cut", [1, 10, 0.5, -1])
def test_malformed_compressed_bodies_leave_nothing_behind(http, cut):
    """test.sh: many malformed compressed requests do not leak."""
    body = gzip.compress(as_file(np.ones((16, 64), np.float32)))
    place = int(cut * len(body)) if isinstance(cut, float) else cut
    for broken in (body[:place], body[:place] + b"\xff" + body[place + 1 :]):
        answer = send(http, broken, **{"content-encoding": "gzip"})
        assert problem(answer)["code"] in {"unreadable", "invalid_tensor"} if answer.status_code != 200 else True
    assert http.get("/v1").json()["memory"]["in_flight_bytes"] == 0


@pytest.mark.parametrize(
    ("numbers", "status"), [(16, 200), (15, 422), (18, 422), (0, 422)]
)  # test.sh: data that does not fit its shape
def test_data_that_does_not_fit_its_shape_is_refused(http, numbers, status):
    answer = http.post(RAW, json={"query": {"dtype": "float32", "shape": [1, 16], "data": [1.0] * numbers}})
    assert answer.status_code == status
    if status == 422:
        assert {"16", str(numbers)} <= set(problem(answer)["detail"].replace(",", " ").replace(";", " ").split())


@pytest.mark.parametrize("asked", list(itertools.product(["list", "base64"], ["application/json", SAFETENSORS])))
def test_replies_as_text_or_binary_have_the_same_numbers(http, asked):
    """test.sh: binary_data and binary_data_output of each output."""
    encoding, accept = asked
    body = {"query": X, "encoding": encoding, "return": ["output", "weights"]}
    answer = http.post(RAW, json=body, headers={"accept": accept})
    if accept == SAFETENSORS:
        import safetensors.numpy

        outputs = safetensors.numpy.load(answer.content)["output"].tolist()
    elif encoding == "base64":
        outputs = np.frombuffer(base64.b64decode(answer.json()["output"]["base64"]), np.float32).reshape(2, 8).tolist()
    else:
        outputs = answer.json()["output"]
    np.testing.assert_allclose(outputs, post(http, RAW, query=X)["output"], rtol=1e-6)


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


def test_optional_inputs_may_all_be_absent(http, module):
    """test_input_validation_all_optional."""
    assert len(post(http, f"{module}/forward", query=X)["output"]) == 2


@pytest.mark.parametrize("width", [1, 7, 9, 64])
def test_an_input_of_another_width_is_refused(http, module, width):
    """test_input_shape_validation."""
    refused = refuse(http, f"{module}/forward", query=[[1.0] * width])
    assert (refused["status"], refused["param"]) == (422, "query")
    assert str(width) in refused["detail"]
    assert "8" in refused["detail"]


@pytest.mark.parametrize("wrong", ["x", ["x"], [["x"] * 8], [[None] * 8], [[{}] * 8], [[True] * 8]])
def test_text_in_place_of_numbers_is_refused(http, module, wrong):
    """test_input_string_shape_validation."""
    assert refuse(http, f"{module}/forward", query=wrong)["param"] == "query"


@pytest.mark.parametrize("offsets", [[0, 28], [0, 36], [4, 32], [0, 2**40], [32, 0], [-4, 28], [0], "0:32", None])
def test_a_tensor_of_the_wrong_byte_size_is_refused(http, offsets):
    """test_wrong_input_shape_tensor_size."""
    refused = problem(send(http, as_file(np.ones((1, 8), np.float32), data_offsets=offsets)))
    assert refused["status"] in {400, 422}


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
