"""What clients of Triton and KServe depend on, over real HTTP."""

import gzip
import json
import socket
import time
import zlib
from urllib.parse import unquote

import httpx
import ml_dtypes
import numpy as np
import pytest

from tests.api.doors.oip.conftest import client
from tests.api.doors.oip.envelopes import LENGTH, binary, infer, read, refused, tensor
from tests.conftest import live_server

INFER = "/v2/models/demo/infer"
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
REQUEST = {"inputs": [tensor("query", X)]}


@pytest.fixture(scope="module")
def version(http):
    return http.get("/v1/modules/demo").json()["version"]


@pytest.fixture(scope="module")
def native(http):
    """The output of the native request."""
    query = {"dtype": "float32", "shape": [3, 8], "data": X.reshape(-1).tolist()}
    return np.array(http.post("/v1/modules/demo/forward", json={"query": query}).json()["output"], np.float32)


# ── (1) versions, (2) names, (3) unknown models, (7) readiness ───────────────────────────────────────────────────────


def test_the_version_is_1_or_the_content_hash(http, version, native):
    for path in ("", "/versions/1", "/versions/", f"/versions/{version}"):
        outputs, head = read(http.post(f"/v2/models/demo{path}/infer", json=REQUEST))
        assert (head["model_version"], head["parameters"]["version"]) == ("1", version)
        assert np.array_equal(outputs["output"], native)
        assert http.get(f"/v2/models/demo{path}/ready").status_code == 200
    refused(http.get("/v2/models/demo/versions/2/ready"), 404, "'demo' version 2 is not found")
    refused(http.post(f"/v2/models/demo/versions/{'0a' * 16}/infer", json=REQUEST), 409, version)
    refused(http.post(INFER, json=REQUEST | {"model_version": "7"}), 404)
    refused(http.post(INFER, json=REQUEST | {"model_version": "0a"}), 409)
    refused(http.get("/v2/models/_attention/versions/0a"), 404)


def test_a_version_that_if_match_pins_holds_here_too(http, version):
    assert http.post(INFER, json=REQUEST, headers={"if-match": f'"{version}"'}).status_code == 200
    refused(http.post(INFER, json=REQUEST, headers={"if-match": '"0a"'}), 409)
    both = f"/v2/models/demo/versions/{version}/infer"
    assert http.post(both, json=REQUEST, headers={"if-match": f'"{version}"'}).status_code == 200
    refused(http.post(both, json=REQUEST, headers={"if-match": '"0a"'}), 400, "If-Match")
    refused(http.post(both, json=REQUEST | {"model_version": "0a"}), 400, "version")


def test_names_arrive_percent_encoded(http):
    for name in ("demo%3Aweights", "demo:weights", "%64emo:weights"):
        assert http.get(f"/v2/models/{name}").json()["name"] == "demo:weights"


@pytest.mark.parametrize(
    "name", ["nobody", "demo:", "demo:nothing", "nobody:weights", "a b", "demo:weights:x", "%C3%A9"]
)
def test_an_unknown_model_is_refused_in_the_words_of_triton(http, name):
    for method, path in (("GET", ""), ("GET", "/ready"), ("GET", "/config"), ("GET", "/stats"), ("POST", "/infer")):
        refusal = refused(http.request(method, f"/v2/models/{name}{path}"), 404)
        assert refusal["error"] == f"Request for unknown model: '{unquote(name)}' is not found"


# ── (4) errors, (5) only 200 succeeds, (6) health, (10) paths ────────────────────────────────────────────────────────


def test_every_refusal_has_an_error_as_text(door, http):
    with client(door.url, "wrong") as stranger:
        reply = stranger.get("/v2")
        refused(reply, 401, "API key")
        assert "www-authenticate" in reply.headers
    with client(door.url, door.limited) as seldom:
        assert seldom.get("/v2").status_code == 200
        limited = seldom.get("/v2")
        refused(limited, 429, "requests_per_s")
        assert int(limited.headers["retry-after"]) > 0
    refused(http.get("/v2/nothing"), 404)
    refused(http.get(INFER), 405)
    refused(http.put("/v2"), 405)
    refused(http.post(INFER, json=REQUEST, headers={"content-encoding": "br"}), 415)
    assert "error" in http.get("/v2", headers={"x-long": "x" * 10_000}).json()
    host, port = door.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nbroken\r\n\r\n")
        head, _, body = _all(connection).partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    assert isinstance(json.loads(body)["error"], str)


def _all(connection):
    came = b""
    while piece := connection.recv(65536):
        came += piece
    return came


def test_loading_and_unloading_answer_200_with_nothing(http):
    load, unload = (f"/v2/repository/models/brief/{what}" for what in ("load", "unload"))
    refused(http.post(load), 404, "'brief' is not found")
    config = json.dumps({"config": {"d_model": 4, "num_heads": 1}, "seed": 1})
    for body in ({"parameters": {"config": config}}, {}, None):
        answer = http.post(load, json=body) if body is not None else http.post(load)
        assert (answer.status_code, answer.content) == (200, b"")
    assert http.get("/v1/modules/brief").json()["durable"] is False
    answer = http.post(unload, json={"parameters": {"unload_dependents": False}})
    assert (answer.status_code, answer.content) == (200, b"")
    refused(http.get("/v2/models/brief/ready"), 404)
    refused(http.post(unload), 404, "'brief' is not found")


def test_a_stored_module_is_not_lost_by_unloading(http):
    refused(http.post("/v2/repository/models/demo/unload"), 409, "DELETE /v1/modules/demo")
    refused(http.post("/v2/repository/models/_attention/unload"), 409)
    assert http.get("/v2/models/demo/ready").status_code == 200


def test_health_needs_no_key(door, http):
    assert httpx.get(f"{door.url}/v2/health/live").json() == {"live": True}
    for end in ("", "/"):
        assert httpx.get(f"{door.url}/v2/health/ready{end}").json() == {"ready": True}


def test_every_path_may_end_in_a_slash(http):
    assert http.get("/v2").json() == http.get("/v2/").json()
    for method, path in (("GET", "/v2/health/live"), ("GET", "/v2/models/demo"), ("POST", "/v2/repository/index")):
        for each in (path, f"{path}/"):
            assert http.request(method, each, follow_redirects=False).status_code == 200


def test_no_content_type_is_required(http, native):
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/octet-stream"}):
        outputs, _ = read(http.post(INFER, content=json.dumps(REQUEST), headers=headers))
        assert np.array_equal(outputs["output"], native)


def test_another_host_is_refused_with_an_error(tmp_path):
    with live_server(tmp_path, oip=True) as url:
        refused(httpx.get(f"{url}/v2", headers={"host": "elsewhere.example"}), 421)
        assert httpx.get(f"{url}/v2").status_code == 200


def test_without_the_setting_there_is_nothing(tmp_path):
    with live_server(tmp_path) as url:
        answer = httpx.get(f"{url}/v2")
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
        assert httpx.get(f"{url}/v2/health/live").status_code == 404


# ── (8) compressed bodies, (9) binary data ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_bodies_are_read_and_broken_ones_refused(http, native, coding, compress):
    body, headers = binary({"query": X})
    headers |= {"content-encoding": coding}
    outputs, _ = read(http.post(INFER, content=compress(body), headers=headers))
    assert np.array_equal(outputs["output"], native)
    for broken in (compress(body)[:-9], b"\0" + compress(body), body):
        refused(http.post(INFER, content=broken, headers=headers), 400)


def test_the_length_of_the_header_is_of_uncompressed_bytes(http):
    body, headers = binary({"query": X})
    compressed = zlib.compress(body)
    assert len(compressed) < len(body)
    answer = http.post(INFER, content=compressed, headers=headers | {"content-encoding": "deflate"})
    assert answer.status_code == 200


def test_a_length_of_0_is_one_raw_input(http, native):
    for dtype, model in ((np.float32, "demo"), (np.float16, "half"), (ml_dtypes.bfloat16, "brain")):
        x = X.astype(dtype)
        answer = http.post(f"/v2/models/{model}/infer", content=x.tobytes(), headers={LENGTH: "0"})
        outputs, head = read(answer)
        assert "data" not in head["outputs"][0]
        assert outputs["output"].dtype == dtype
        assert np.array_equal(outputs["output"], infer(http, model, {"query": x})[0]["output"])
    refused(http.post(INFER, content=X.tobytes()[:-1], headers={LENGTH: "0"}), 400, "query", "multiple of 32")
    refused(http.post(INFER, content=b"", headers={LENGTH: "0"}), 400, "query")
    refused(http.post("/v2/models/_attention/infer", content=X.tobytes(), headers={LENGTH: "0"}), 400, LENGTH)


@pytest.mark.parametrize("length", ["-1", "x", "1.5", "99999", "1" * 30, "", "+3"])
def test_a_length_that_cannot_be_is_refused(http, length):
    body, _ = binary({"query": X})
    refused(http.post(INFER, content=body, headers={LENGTH: length}), 400)


@pytest.mark.parametrize("size", [-1, 95, 97, 4096, 0, "96", 96.0, True, 2**70])
def test_a_size_of_binary_data_that_cannot_be_is_refused(http, size):
    described = {"name": "query", "shape": [3, 8], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [described]}).encode()
    answer = http.post(INFER, content=head + X.tobytes(), headers={LENGTH: str(len(head))})
    refused(answer, 400, "inputs.0.parameters.binary_data_size")


def test_bytes_that_no_input_takes_are_refused(http):
    body, headers = binary({"query": X})
    refused(http.post(INFER, content=body + b"\0", headers=headers), 400, "inputs", "96 bytes; 97 come")
    head = json.dumps(REQUEST).encode()
    refused(http.post(INFER, content=head + b"\0", headers={LENGTH: str(len(head))}), 400, "inputs")
    both = REQUEST["inputs"][0] | {"parameters": {"binary_data_size": 96}}
    head = json.dumps({"inputs": [both]}).encode()
    refused(
        http.post(INFER, content=head + X.tobytes(), headers={LENGTH: str(len(head))}), 400, "inputs.0.data", "both"
    )


# ── (11) datatypes, (12) malformed envelopes ─────────────────────────────────────────────────────────────────────────


def test_bf16_is_binary_alone(http):
    x = X.astype(ml_dtypes.bfloat16)
    outputs, _ = infer(http, "brain", {"query": x}, wants_binary=True)
    assert outputs["output"].dtype == ml_dtypes.bfloat16
    body, headers = binary({"query": x})
    outputs, head = read(http.post("/v2/models/brain/infer", content=body, headers=headers))
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 48}  # nobody asked for JSON
    in_json = {"name": "query", "shape": [3, 8], "datatype": "BF16", "data": X.reshape(-1).tolist()}
    refused(http.post("/v2/models/brain/infer", json={"inputs": [in_json]}), 400, "inputs.0.data", "binary_data_size")
    wanted = [{"name": "output", "parameters": {"binary_data": False}}]
    body, headers = binary({"query": x}, outputs=wanted)
    answer = http.post("/v2/models/brain/infer", content=body, headers=headers)
    refused(answer, 400, "outputs.0.parameters.binary_data", "BF16")


def test_fp16_is_json_too(http):
    x = X.astype(np.float16)
    outputs, head = read(http.post("/v2/models/half/infer", json={"inputs": [tensor("query", x)]}))
    assert head["outputs"][0]["datatype"] == "FP16"
    assert np.array_equal(outputs["output"], infer(http, "half", {"query": x})[0]["output"])


def test_numbers_that_json_lacks_come_as_bytes_or_are_refused(http):
    spec = json.dumps({"masks": [{"name": "causal"}]})
    request = REQUEST | {"parameters": {"spec": spec}, "outputs": [{"name": "masked_scores"}, {"name": "output"}]}
    outputs, head = read(http.post("/v2/models/_attention/infer", json=request))
    assert np.isinf(outputs["masked_scores"]).sum() == 3
    assert ["data" in each for each in head["outputs"]] == [False, True]
    request["outputs"][0]["parameters"] = {"binary_data": False}
    refused(
        http.post("/v2/models/_attention/infer", json=request), 400, "outputs.0.parameters.binary_data", "JSON lacks"
    )
    for number in ('"NaN"', "NaN", "1e999"):
        text = json.dumps(REQUEST).replace("-1.0", number, 1)
        refused(http.post(INFER, content=text), 400)
    x = X.copy()
    x[0, 0] = np.nan
    outputs, _ = infer(http, "demo", {"query": x})
    assert np.isnan(outputs["output"]).any()


MALFORMED = {
    "parameters": REQUEST | {"parameters": [1]},
    "parameters.timeout": REQUEST | {"parameters": {"timeout": "5"}},
    "inputs": {},
    "inputs.0.name": {"inputs": [{"shape": [1], "datatype": "FP32", "data": [1]}]},
    "inputs.0.shape": {"inputs": [REQUEST["inputs"][0] | {"shape": [3, -8]}]},
    "inputs.0.datatype": {"inputs": [REQUEST["inputs"][0] | {"datatype": "FP8"}]},
    "inputs.0.data": {"inputs": [REQUEST["inputs"][0] | {"data": [1, 2]}]},
    "inputs.0.parameters": {"inputs": [REQUEST["inputs"][0] | {"parameters": 4}]},
    "inputs.0.parameters.size": {"inputs": [REQUEST["inputs"][0] | {"parameters": {"size": 4}}]},
    "inputs.1.name": {"inputs": REQUEST["inputs"] * 2},
    "query": {"inputs": []},
    "quary": {"inputs": [*REQUEST["inputs"], REQUEST["inputs"][0] | {"name": "quary"}]},
    "id": REQUEST | {"id": 7},
    "outputs": REQUEST | {"outputs": {}},
    "outputs.0.name": REQUEST | {"outputs": [{"name": "outputs"}]},
    "outputs.0.parameters.binary_data": REQUEST | {"outputs": [{"name": "output", "parameters": {"binary_data": 1}}]},
    "outputs.0.parameters.classification": REQUEST
    | {"outputs": [{"name": "output", "parameters": {"classification": 1}}]},
    "parameters.binary_data_output": REQUEST | {"parameters": {"binary_data_output": "yes"}},
    "parameters.select": REQUEST | {"parameters": {"select": "{"}},
    "select.heads.0": REQUEST | {"parameters": {"select": '{"heads": [-1]}'}},
    "parameters.edits": REQUEST | {"parameters": {"edits": []}},
    "extra": REQUEST | {"extra": 1},
}


@pytest.mark.parametrize("field", MALFORMED)
def test_a_malformed_envelope_is_400_with_its_field(http, field):
    refusal = refused(http.post(INFER, json=MALFORMED[field]), 400, field)
    assert refusal["param"] == field


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "7", '{"inputs": ' + "[" * 2000])
def test_a_body_that_is_no_object_is_400(http, text):
    refused(http.post(INFER, content=text), 400)


# ── (13) parameters, (14) timeout, (15) descriptions ─────────────────────────────────────────────────────────────────


def test_unknown_parameters_are_refused_but_for_reserved_ones(http):
    for name in ("colour", "query", "encoding", "parameters", "mask"):
        refused(http.post(INFER, json=REQUEST | {"parameters": {name: "1"}}), 400, f"parameters.{name}")
    reserved = {"sequence_id": 0, "sequence_start": True, "sequence_end": True, "priority": 3, "timeout": 10**9,
                "binary_data_output": False, "headers": "x", "triton_final_response": True}  # fmt: skip
    assert http.post(INFER, json=REQUEST | {"parameters": reserved}).status_code == 200
    for sequence in (5, "a", [1]):
        refused(http.post(INFER, json=REQUEST | {"parameters": {"sequence_id": sequence}}), 501, "session")


def test_shared_memory_and_other_extensions_are_501(http):
    for name in ("shared_memory_region", "shared_memory_byte_size"):
        inputs = [REQUEST["inputs"][0] | {"parameters": {name: "x"}}]
        refused(http.post(INFER, json={"inputs": inputs}), 501, "shares no memory")
        outputs = [{"name": "output", "parameters": {name: "x"}}]
        refused(http.post(INFER, json=REQUEST | {"outputs": outputs}), 501)
    left_out = (
        "logging", "trace/setting", "models/demo/trace/setting", "systemsharedmemory/status",
        "cudasharedmemory/region/a/register", "models/demo/generate", "models/demo/generate_stream",
    )  # fmt: skip
    for path in left_out:
        for method in ("GET", "POST"):
            refused(http.request(method, f"/v2/{path}"), 501)


@pytest.mark.parametrize("timeout", [-1, "5", 1.5, True, 2**70, None])
def test_a_timeout_is_microseconds(http, timeout):
    refused(http.post(INFER, json=REQUEST | {"parameters": {"timeout": timeout}}), 400, "parameters.timeout")


def test_a_timeout_that_passes_ends_the_request(http):
    x = np.ones((1, 4096, 8), np.float32)
    body, headers = binary({"query": x}, parameters={"timeout": 1})
    began = time.monotonic()
    refused(http.post(INFER, content=body, headers=headers), 503, "deadline")
    assert time.monotonic() - began < 5


def test_metadata_lists_required_inputs_and_config_all(http, version):
    reply = http.get("/v2/models/half").json()
    assert reply == {
        "name": "half",
        "versions": ["1"],
        "platform": "attention_service",
        "inputs": [{"name": "query", "datatype": "FP16", "shape": [-1, -1, 8]}],
        "outputs": [{"name": "output", "datatype": "FP16", "shape": [-1, -1, 8]}],
    }
    config = http.get("/v2/models/demo/config").json()
    inputs = {each["name"]: each for each in config["input"]}
    assert "optional" not in inputs["query"]
    assert all(each["optional"] for name, each in inputs.items() if name != "query")
    assert inputs["key_mask"]["data_type"] == "TYPE_BOOL"
    assert inputs["past_key"]["dims"] == [-1, 2, -1, 4]
    assert inputs["parameters.o_proj.weight"]["dims"] == [8, 8]
    assert config["parameters"]["version"] == {"string_value": version}
    assert config["max_batch_size"] == 0


@pytest.mark.parametrize("question", ["", ":weights", ":gradients"])
@pytest.mark.parametrize("model", ["demo", "_attention"])
def test_metadata_states_the_outputs_that_come(http, model, question):
    reply = http.get(f"/v2/models/{model}{question}").json()
    x = X[None, None] if model == "_attention" else X[None]
    outputs, _ = infer(http, f"{model}{question}", {"query": x})
    assert {each["name"] for each in reply["outputs"]} == set(outputs)
    if model == "demo":
        for each in reply["outputs"]:
            assert all(
                size in (-1, came) for size, came in zip(each["shape"], outputs[each["name"]].shape, strict=True)
            )


# ── (16) scopes, (17) outputs, (18) files ────────────────────────────────────────────────────────────────────────────


def test_scopes_are_required_for_what_is_done(door):
    with client(door.url, door.infer) as http:
        assert http.post(INFER, json=REQUEST).status_code == 200
        assert http.post("/v2/repository/index").status_code == 200
        for path in ("/v2/repository/models/demo/load", "/v2/repository/models/demo/unload"):
            refusal = refused(http.post(path), 403, "manage")
            assert refusal["needed_scopes"] == ["manage"]
        refused(http.get("/v2/models/stats"), 403, "inspect")
    with client(door.url, door.inspect) as http:
        refused(http.post(INFER, json=REQUEST), 403, "infer")
        assert http.get("/v2/models/demo/config").status_code == 200
        assert http.get("/v2/models/stats").status_code == 200


def test_outputs_select_what_the_reply_alone_has(http):
    names = ["gradients.query", "weights", "gradients.q_proj.weight"]
    outputs, _ = infer(http, "demo:gradients", {"query": X}, names)
    assert list(outputs) == names
    names = ["statistics.entropy", "statistics.locality", "top.keys"]
    outputs, _ = infer(http, "demo:weights", {"query": X}, names, top_k=2)
    assert list(outputs) == names
    outputs, _ = infer(http, "demo", {"query": X, "past_key": np.ones((2, 1, 4), np.float32),
                                      "past_value": np.ones((2, 1, 4), np.float32)}, ["present_key"])  # fmt: skip
    assert outputs["present_key"].shape == (2, 4, 4)
    edits = json.dumps([{"tap": "weights", "heads": [0], "set": 0}])
    outputs, _ = infer(http, "demo", {"query": X}, ["differences.output"], edits=edits, compare="unedited")
    assert outputs["differences.output"].any()


def test_an_output_that_did_not_come_is_refused(http):
    wanted = [{"name": "top.keys"}]
    refused(http.post("/v2/models/demo:weights/infer", json=REQUEST | {"outputs": wanted}), 400, "outputs.0.name")
    for model, name in (
        ("demo", "differences.output"), ("demo", "present_key"), ("demo", "dropout_mask"), ("demo", "final_state"),
        ("demo:weights", "pooled"), ("demo:gradients", "hessian_products.query"), ("demo:gradients", "gradients."),
        ("demo:gradients", "gradients.parameters"), ("demo:gradients", "gradients.nothing"),
    ):  # fmt: skip
        answer = http.post(f"/v2/models/{model}/infer", json=REQUEST | {"outputs": [{"name": name}]})
        refused(answer, 400)


def test_outputs_add_to_what_parameters_ask_for(http):
    request = REQUEST | {"outputs": [{"name": "weights"}], "parameters": {"return": '["output"]'}}
    outputs, _ = read(http.post(INFER, json=request))
    assert list(outputs) == ["weights"]
    names = ["gradients.query", "gradients.k_proj.weight"]
    for wrt in ('["parameters", "query"]', '["query"]'):
        outputs, _ = infer(http, "demo:gradients", {"query": X}, names, wrt=wrt)
        assert list(outputs) == names


def test_loading_with_files_or_with_what_is_no_config_is_refused(http):
    load = "/v2/repository/models/filed/load"
    config = json.dumps({"config": {"d_model": 4, "num_heads": 1}})
    for parameters, field in (
        ({"config": config, "file:1/model.onnx": "AAAA"}, "parameters.file:1/model.onnx"),
        ({"config": 3}, "parameters.config"),
        ({"config": "{"}, "parameters.config"),
        ({"config": "[]"}, "parameters.config"),
        ({"other": 1}, "parameters.other"),
        ([], "parameters"),
    ):
        refusal = refused(http.post(load, json={"parameters": parameters}), 400)
        assert refusal["param"] == field
    refused(http.post(load, json={"parameters": {"config": '{"max_batch_size": 8}'}}), 400, "config")
    refused(http.post("/v2/repository/models/demo:weights/load"), 400, "name the module alone")
    refused(http.post("/v2/repository/models/_attention/load", json={"parameters": {"config": config}}), 400)
    assert http.post("/v2/repository/models/_attention/load").status_code == 200
    refused(http.post("/v2/repository/index", json={"ready": 1}), 400, "ready")


# ── what else the protocol has ───────────────────────────────────────────────────────────────────────────────────────


def test_the_id_of_a_request_comes_back(http):
    assert read(http.post(INFER, json=REQUEST | {"id": "a7"}))[1]["id"] == "a7"
    assert "id" not in read(http.post(INFER, json=REQUEST))[1]


def test_data_may_be_nested(http, native):
    nested = tensor("query", X) | {"data": X.tolist()}
    outputs, _ = read(http.post(INFER, json={"inputs": [nested]}))
    assert np.array_equal(outputs["output"], native)
    refused(http.post(INFER, json={"inputs": [nested | {"shape": [8, 3]}]}), 400, "inputs.0.data", "[3, 8]")


def test_statistics_count_inferences_and_failures(http):
    def stats():
        (entry,) = http.get("/v2/models/demo:gradients/stats").json()["model_stats"]
        return entry

    before = stats()
    infer(http, "demo:gradients", {"query": X})
    refused(http.post("/v2/models/demo:gradients/infer", json={"inputs": []}), 400)
    after = stats()
    assert after["inference_count"] == before["inference_count"] + 1
    for phase in ("success", "fail", "queue", "compute_infer"):
        counts = [each["inference_stats"][phase] for each in (before, after)]
        assert counts[1]["count"] == counts[0]["count"] + 1
        assert counts[1]["ns"] >= counts[0]["ns"]
    listed = {each["name"] for each in http.get("/v2/models/stats").json()["model_stats"]}
    assert {"demo", "demo:weights", "demo:gradients", "_attention"} <= listed
    assert listed == {each["name"] for each in http.post("/v2/repository/index").json()}


def test_requests_are_counted_and_their_changes_audited(http):
    http.post(INFER, json=REQUEST)
    text = http.get("/metrics").text
    assert 'attention_requests_total{operation="v2_infer",status="200"}' in text


@pytest.mark.slow
def test_a_large_reply_comes_in_json_and_in_bytes(http):
    x = np.random.default_rng(0).standard_normal((40, 1000, 8)).astype(np.float32)
    body, headers = binary({"query": x})
    in_json, head = read(http.post(INFER, content=body, headers=headers))
    assert "data" in head["outputs"][0]
    mixed = [{"name": "output"}, {"name": "lse", "parameters": {"binary_data": True}}]
    body, headers = binary({"query": x}, outputs=mixed)
    both, head = read(http.post(INFER, content=body, headers=headers))
    assert ["data" in each for each in head["outputs"]] == [True, False]
    for other in (
        both,
        infer(http, "demo", {"query": x})[0],
    ):  # what is above 1 MiB is not moved, and may round otherwise
        np.testing.assert_allclose(other["output"], in_json["output"], rtol=1e-4, atol=1e-6)
