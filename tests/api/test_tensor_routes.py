"""Operations that carry tensors: every fault named, the same answer the second time, open to middleware and routes."""

import json
from typing import ClassVar

import numpy as np
import pytest
import safetensors.numpy
from starlette.testclient import TestClient

from attention_contract.operations import OPERATIONS
from attention_contract.wire import JSON, SAFETENSORS
from attention_service.api.app import create_app
from attention_service.settings import Settings
from tests.api.talk import post, problem

TENSOR_OPERATIONS = [operation for operation in OPERATIONS if operation.tensors and operation.method == "POST"]
MEDIA = [JSON, SAFETENSORS]


@pytest.fixture(scope="module")
def lane(http):
    """A client of a server that has a module of width 8 with 2 heads."""
    post(http, "/v1/modules", name="lane", config={"d_model": 8, "num_heads": 2}, seed=0)
    return http


def body_of(media_type, tensors, **rest):
    if media_type == JSON:
        return json.dumps(rest | {name: x.tolist() for name, x in tensors.items()}).encode()
    return safetensors.numpy.save(tensors, {"request": json.dumps(rest)})


@pytest.mark.sampled
@pytest.mark.parametrize("operation", TENSOR_OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize("media_type", MEDIA)
def test_every_fault_of_a_body_is_a_problem_naming_it(lane, operation, media_type):
    """Of every operation that takes tensors, in both forms."""
    path, headers = operation.path.replace("{name}", "lane"), {"content-type": media_type}
    for content in (b"", b"{", b"\0" * 7, b"[1]", b"[" * 10**5, b"\xff\xfe"):
        assert problem(lane.request(operation.method, path, content=content, headers=headers))["status"] == 400
    unknown = body_of(media_type, {}, nonsense=1)
    assert problem(lane.post(path, content=unknown, headers=headers))["param"] is not None
    for name, value, status in (
        ("accept", "text/html", 406),
        ("content-type", "text/plain", 415),
        ("content-encoding", "br", 415),
        ("if-match", "no tag", 422),
    ):
        refusal = problem(lane.post(path, content=unknown, headers=headers | {name: value}))
        assert refusal["status"] == status


def forward(lane, tensors, name="lane", headers=None, **rest):
    headers = {"content-type": SAFETENSORS} | (headers or {})
    return lane.post(f"/v1/modules/{name}/forward", content=body_of(SAFETENSORS, tensors, **rest), headers=headers)


def test_what_depends_on_numbers_is_checked_each_time(lane, rng):
    x = rng.normal(size=(2, 5, 8)).astype(np.float32)
    for good, bad, field in (
        ({"key_lengths": np.array([5, 3])}, {"key_lengths": np.array([5, 6])}, "key_lengths"),
        ({"key_mask": np.array([[1, 0, 1, 1, 1]] * 2)}, {"key_mask": np.array([[1, 0, 2, 1, 1]] * 2)}, "key_mask"),
    ):
        for tensors, status in ((good, 200), (bad, 422), (good, 200), (bad, 422)):
            answer = forward(lane, {"query": x} | tensors)
            assert answer.status_code == status, answer.text
            assert status == 200 or answer.json()["param"] == field


def test_a_module_that_was_replaced_or_deleted_answers_no_longer(lane, rng):
    x = {"query": rng.normal(size=(1, 3, 8)).astype(np.float32)}
    made = post(lane, "/v1/modules", name="brief", config={"d_model": 8, "num_heads": 2, "bias": False}, seed=1)

    def ask(status=200, **headers):
        answer = forward(lane, x, "brief", headers)
        assert answer.status_code == status, answer.text
        return safetensors.numpy.load(answer.content)["output"].tolist() if status == 200 else problem(answer)

    before = ask()
    assert ask(**{"if-match": f'"{made["version"]}"'}) == before
    parameters = {f"{role}_proj.weight": np.eye(8).tolist() for role in "qkvo"}
    changed = lane.put("/v1/modules/brief/parameters", json={"parameters": parameters}).json()
    after = ask()
    assert changed["version"] != made["version"]
    assert after != before
    assert ask(409, **{"if-match": f'"{made["version"]}"'})["code"] == "version_mismatch"
    assert lane.delete("/v1/modules/brief").status_code == 204
    assert ask(404)["code"] == "module_not_found"
    post(lane, "/v1/modules", name="brief", config={"d_model": 8, "num_heads": 2, "bias": False}, seed=1)
    assert ask() == before


def test_a_request_names_one_version_or_none(lane, rng):
    x = {"query": rng.normal(size=(1, 3, 8)).astype(np.float32)}
    version = lane.get("/v1/modules/lane").json()["version"]
    for _ in range(2):
        assert forward(lane, x, version=version).status_code == 200
        assert problem(forward(lane, x, version="other"))["status"] == 409
        assert problem(forward(lane, x, headers={"if-match": '"x"'}, version=version))["status"] == 422


def test_paths_beside_the_lane_are_what_they_were(lane):
    for path in ("/v1/modules//forward", "/v1/modules/a/b/forward", "/v1/attention/other"):
        assert problem(lane.post(path, json={}))["status"] == 404
    assert problem(lane.get("/v1/modules/lane/forward"))["status"] == 405
    head = lane.head("/v1")
    assert (head.status_code, head.content) == (200, b"")
    spaced = problem(lane.post("/v1/modules/no%20such/forward", json={"query": [[0.5] * 8]}))
    assert "no such" in spaced["detail"]


class Seen:
    """Middleware that notes the paths it sees, and marks the responses."""

    paths: ClassVar[list[str]] = []

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def marked(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-seen", b"1")]
            await send(message)

        if scope["type"] == "http":
            self.paths.append(scope["path"])
        await self.app(scope, receive, marked)


def test_middleware_that_somebody_adds_applies_to_every_operation(tmp_path):
    app = create_app(Settings(_env_file=None, models_dir=tmp_path, calibrate=False))
    app.add_middleware(Seen)
    with TestClient(app, base_url="http://localhost") as http:
        while http.get("/health/ready").status_code != 200:
            pass
        for operation in OPERATIONS:
            path = operation.path.format(name="nobody", parameter="none", id="0" * 32, path="none", model="none")
            answer = http.request(operation.method, path, json=[])  # which none takes
            assert answer.headers["x-seen"] == "1", operation.name
            assert "x-request-id" in answer.headers
            assert Seen.paths[-1] == path


@pytest.mark.slow
def test_a_route_that_somebody_adds_is_documented_and_its_faults_are_problems(tmp_path):
    app = create_app(Settings(_env_file=None, models_dir=tmp_path, calibrate=False))

    @app.get("/broken")
    def broken():
        raise RuntimeError("oh")

    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as http:
        assert "/broken" in http.get("/openapi.json").json()["paths"]
        assert problem(http.get("/broken"))["code"] == "internal_error"
