"""What any HTTP client may rely on: media types, problems, limits, documents, health and metrics."""

import json
import math
import re
import struct
from urllib.parse import urlsplit

import httpx
import jsonschema
import numpy as np
import pytest
import safetensors.numpy
from tools.docs.snippets import json_difference

from attention_contract.operations import (
    OPENAI_PATHS,
    OPERATIONS,
    create_raw_pass,
    create_recording,
    fit_lens,
    fit_probe,
    fit_vector,
)
from attention_contract.schemas.attention import ApproximationError
from attention_contract.schemas.gradients import GradientCheck
from attention_contract.schemas.model_requests import LikelyToken
from attention_contract.schemas.openai import CompletionLogprobs, Embedding
from attention_contract.wire import SAFETENSORS, to_json
from attention_service.api.problems import status_elsewhere
from tests.api.talk import post, problem
from tests.conftest import live_server


def test_a_library_that_knows_only_safetensors_can_ask(http):
    body = safetensors.numpy.save(
        {"query": np.eye(2, dtype=np.float32)}, {"request": '{"return": ["weights", "output"]}'}
    )
    answer = http.post("/v1/attention/forward", content=body, headers={"content-type": SAFETENSORS})
    assert answer.headers["content-type"] == SAFETENSORS
    tensors = safetensors.numpy.load(answer.content)
    np.testing.assert_allclose(tensors["weights"].sum(-1), 1, atol=1e-6)
    size = struct.unpack("<Q", answer.content[:8])[0]
    assert b'\\"kernel\\":\\"fused\\"' in answer.content[8 : 8 + size]


def test_accept_chooses_the_form_of_the_reply(http):
    ask = {"query": [[1.0, 0.0]]}
    forms = {"application/json": "application/json", SAFETENSORS: SAFETENSORS, "*/*": "application/json",
             "application/*;q=0.5, application/json": "application/json",
             f"application/json;q=0.1, {SAFETENSORS}": SAFETENSORS}  # fmt: skip
    for accept, expected in forms.items():
        assert (
            http.post("/v1/attention/forward", json=ask, headers={"accept": accept}).headers["content-type"] == expected
        )
    assert problem(http.post("/v1/attention/forward", json=ask, headers={"accept": "text/html"}))["status"] == 406
    assert problem(http.get("/v1", headers={"accept": SAFETENSORS}))["status"] == 406


def test_lists_may_come_in_several_headers(http):
    ask = {"query": [[1.0, 0.0]]}
    lines = [("accept", "text/html"), ("accept", f"{SAFETENSORS};q=0.1"), ("accept", "application/json;q=0.2")]
    for order in (lines, lines[::-1]):
        assert http.post("/v1/attention/forward", json=ask, headers=order).headers["content-type"] == "application/json"
    twice = [("content-encoding", "gzip"), ("content-encoding", "gzip")]
    assert problem(http.post("/v1/attention/forward", json=ask, headers=twice))["status"] == 415
    late = [("prefer", "respond-async"), ("prefer", "wait=0")]
    assert problem(http.post("/v1/attention/forward", json=ask, headers=late))["code"] == "deadline_exceeded"
    post(http, "/v1/modules", name="several", config={"d_model": 2, "num_heads": 1})
    tag = http.get("/v1/modules/several").headers["etag"]
    tags = [("if-none-match", '"other"'), ("if-none-match", tag), ("if-none-match", '"another"')]
    assert http.get("/v1/modules/several", headers=tags).status_code == 304
    several = [("if-match", '"a"'), ("if-match", '"b"')]
    refusal = problem(http.post("/v1/modules/several/forward", json=ask, headers=several))
    assert (refusal["status"], refusal["param"]) == (422, "If-Match")


def test_encoding_chooses_between_lists_and_base64(http):
    reply = post(http, "/v1/attention/forward", query=[[1.0, 0.0]], encoding="base64")
    assert reply["output"]["dtype"] == "float32"
    assert reply["output"]["shape"] == [1, 2]
    assert set(reply["output"]) == {"dtype", "shape", "base64"}


def test_unknown_paths_and_methods_are_problems(http):
    assert problem(http.get("/v2"))["code"] == "not_found"
    answer = http.put("/v1/modules")
    assert problem(answer)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "GET, HEAD, OPTIONS, POST"


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/modules", {"GET", "HEAD", "POST"}),
        ("/v1/modules/any", {"GET", "HEAD", "DELETE"}),
        ("/v1/modules/any/parameters", {"GET", "HEAD", "PUT"}),
        ("/v1/attention/forward", {"POST"}),
        ("/v1/checkpoints/some/folder", {"GET", "HEAD", "DELETE"}),
        ("/web/index.html", {"GET", "HEAD"}),
        ("/metrics", {"GET"}),
    ],
)
def test_options_tells_the_methods_of_a_path(http, path, methods):
    answer = http.options(path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert {*answer.headers["allow"].split(", ")} == methods | {"OPTIONS"}
    for method in ("GET", "HEAD", "PUT", "PATCH"):
        assert (http.request(method, path).status_code == 405) == (method not in methods)


def test_a_problem_is_short_whatever_came(http):
    bad = {"query": [[0.5] * 100_000, [0.5]]}
    answer = http.post("/v1/attention/forward", json=bad)
    assert answer.status_code == 422
    assert len(answer.content) < 1000
    answer = http.post("/v1/attention/forward", json={"query": "x" * 100_000, "y" * 5000: 1})
    assert len(answer.content) < 3000


def test_request_ids_are_kept_or_made(http):
    assert http.get("/v1", headers={"x-request-id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    assert re.fullmatch("[0-9a-f]{32}", http.get("/v1").headers["x-request-id"])
    assert http.get("/v1", headers={"x-request-id": "bad id"}).headers["x-request-id"] != "bad id"


def test_the_documents_describe_every_operation(http):
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for operation in OPERATIONS:
        described = document["paths"][operation.path][operation.method.lower()]
        assert described["operationId"] == operation.name
        assert str(operation.status) in described["responses"]
        for error in operation.errors:
            status = status_elsewhere(error) if operation.path in OPENAI_PATHS else error.status
            assert str(status) in described["responses"]
        if operation.tensors and operation.method != "GET":
            assert set(described["requestBody"]["content"]) == {"application/json", SAFETENSORS}
    text = http.get("/openapi.json").text
    for name in set(re.findall(r'"#/components/schemas/(\w+)"', text)):
        assert name in document["components"]["schemas"], name
    assert "x-tensor" not in text
    assert "x-non-finite" not in text


@pytest.mark.slow
def test_every_example_of_the_document_works_and_the_reply_has_the_documented_schema(http, tmp_path):
    # The examples name modules that other tests may have made otherwise, so this test has a server of its own.
    with live_server(tmp_path) as url, httpx.Client(base_url=url, timeout=300) as own:
        _answer_every_example(own, http.get("/openapi.json").json())


def _answer_every_example(http: httpx.Client, document: dict) -> None:
    http.post("/v1/modules", json={"name": "demo", "config": {"d_model": 8, "num_heads": 2}, "seed": 0})
    http.post("/v1/modules", json={"name": "unit", "config": {"d_model": 1, "num_heads": 1, "bias": False}})
    recording = http.post("/v1/recordings", json=create_recording.example).json()["id"]
    left_out = {"import_module", "delete_module", "create_module", "fetch_checkpoint", "get_checkpoint"}
    left_out |= {"cancel_fetch", "unload_model", "delete_recording", "delete_session", "delete_lens", "delete_probe"}
    left_out |= {"delete_vector"}
    left_out |= {"create_transcription", "rerank", "score"}  # the model that ships hears nothing and scores no pairs
    session = http.post("/v1/modules/demo/sessions", json={}).json()["session"]
    kept = http.post("/v1/attention/passes", json=create_raw_pass.example).json()["id"]
    probe = http.post("/v1/models/tiny/probes", json=fit_probe.example).json()["id"]
    vector = http.post("/v1/models/tiny/vectors", json=fit_vector.example).json()["id"]
    lens = http.post("/v1/models/tiny/lenses", json=fit_lens.example).json()["id"]
    ids = {"sessions": session, "passes": kept, "recordings": recording, "/v1/probes": probe}
    ids |= {"/v1/vectors": vector, "/v1/lenses": lens}
    for operation in OPERATIONS:
        if operation.name in left_out:
            continue
        described = document["paths"][operation.path][operation.method.lower()]
        media = described.get("requestBody", {}).get("content", {}).get("application/json", {})
        assert ("example" in media) == (operation.method in {"POST", "PUT"}), operation.name
        name = "unit" if operation.name == "replace_parameters" else "demo"
        path = operation.path.format(
            name=name,
            parameter="q_proj.bias",
            model="tiny",
            id=next((made for kind, made in ids.items() if kind in operation.path), None),
        )
        answer = http.request(operation.method, path, json=media.get("example"))
        assert answer.status_code == operation.status, answer.text
        schema = described["responses"][str(operation.status)]["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json(), schema | {"components": document["components"]})


def test_numbers_that_json_lacks_are_documented(http):
    document = http.get("/openapi.json").json()
    nan = {"dtype": "float32", "shape": [2], "data": ["NaN", "Infinity"]}
    plain = {f"{name}_proj.weight": [[1.0, 0.0], [0.0, 1.0]] for name in "qkvo"}
    parameters = plain | {f"{name}_proj.bias": nan for name in "qkvo"}
    made = {"name": "diverged", "config": {"d_model": 2, "num_heads": 1}, "parameters": parameters}
    assert http.post("/v1/modules", json=made).status_code == 201
    listed = http.get("/v1/modules/diverged/parameters")
    assert "NaN" in listed.text
    documented(document, "ParameterList", listed.json())
    likely = LikelyToken(token="a", id=1, logit=math.nan, probability=math.nan, unedited_logit=-math.inf)
    logprobs = CompletionLogprobs(text_offset=[0], tokens=["a"], token_logprobs=[math.nan], top_logprobs=[{"a": -9e9}])
    check = GradientCheck(max_absolute_error=math.inf, max_relative_error=math.inf, elements=1, passed=False)
    vector = Embedding(index=0, embedding=[math.nan])
    error = ApproximationError(max=math.nan, rms=math.nan, mean_kl=math.inf)
    for reply in (likely, logprobs, check, vector, error):
        documented(document, type(reply).__name__, json.loads(to_json(reply)))


def documented(document: dict, name: str, value: object) -> None:
    """Check a value against one of the document's schemas."""
    schema = document["components"]["schemas"][name]
    jsonschema.validate(value, schema | {"components": document["components"]})


def test_the_replies_shown_are_those_of_a_server(http):
    shown = [operation for operation in OPERATIONS if operation.reply_example]
    assert shown
    for operation in shown:
        answer = http.request(operation.method, operation.path, json=operation.example).json()
        assert json_difference(operation.reply_example, answer, operation.name) is None


def test_the_documents_need_no_other_host(http):
    for path in ("/docs", "/redoc", "/"):
        page = http.get(path)
        assert page.status_code == 200
        for address in re.findall(r'(?:src|href)="([^"]+)"', page.text):
            parts = urlsplit(address)
            assert parts.netloc == "", address
            assert http.get(address).status_code == 200, address


def test_health_and_metrics_tell_the_truth(http):
    assert http.get("/health/live").json()["status"] == "live"
    assert http.get("/health/ready").json()["status"] == "ready"
    http.get("/v1/modules/nobody")
    text = http.get("/metrics").text
    assert 'attention_requests_total{operation="get_module",status="404"}' in text
    assert "attention_resident_bytes" in text
    info = http.get("/v1").json()
    assert info["session_kernel"] == "products"  # on a CPU
    assert info["limits"]["memory_budget_bytes"] > 0
    assert info["memory"]["in_flight_bytes"] == 0
