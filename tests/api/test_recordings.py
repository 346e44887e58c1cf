"""Recordings over HTTP: stored durably, listed, read in parts, refused where broken or too large."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from attention_contract.schemas.recordings import EXAMPLE_RECORDING
from attention_contract.wire import SAFETENSORS
from tests.api.talk import problem
from tests.conftest import live_server

HEADS, TOKENS, WIDTH = 2, 4, 3
FILE = {"content-type": SAFETENSORS}


def file_of(text="a b c d", *, seed=0, tensors=None, **changed):
    """The bytes of a recording with one layer, as another program would write them."""
    rng = np.random.default_rng(seed)
    arrays = {
        "layers.embeddings": rng.normal(size=(TOKENS, WIDTH)).astype(np.float32),
        "layers.0.hidden": rng.normal(size=(TOKENS, WIDTH)).astype(np.float32),
        "layers.0.weights": rng.dirichlet(np.ones(TOKENS), (HEADS, TOKENS)).astype(np.float32),
        "layers.0.lse": rng.normal(size=(HEADS, TOKENS)).astype(np.float32),
    } | (tensors or {})
    facts = {
        "model": "tiny", "text": text, "created": "2026-01-02T03:04:05Z", "versions": {"transformers": "5"},
        "tokens": {"layers": text.split()}, "attentions": [{"name": "layers.0", "heads": ["L0H0", "L0H1"]}],
    } | changed  # fmt: skip
    return arrays, safetensors.numpy.save(arrays, {"recording": json.dumps(facts)})


def stored(http, content):
    answer = http.post("/v1/recordings", content=content, headers=FILE | {"accept": "application/json"})
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/v1/recordings/{answer.json()['id']}"
    return answer.json()


def test_a_recording_is_stored_listed_described_and_removed(http):
    arrays, content = file_of(seed=1)
    made = stored(http, content)
    assert stored(http, content)["id"] == made["id"]  # the same content is stored once
    listed = [each for each in http.get("/v1/recordings").json()["recordings"] if each["id"] == made["id"]]
    assert listed == [
        {
            "id": made["id"], "model": "tiny", "text": "a b c d", "created": "2026-01-02T03:04:05+00:00",
            "tokens": {"layers": 4}, "layers": 1, "heads": 2, "taps": ["embeddings", "hidden", "lse", "weights"],
            "bytes": made["bytes"],
        }
    ]  # fmt: skip
    described = http.get(f"/v1/recordings/{made['id']}").json()
    assert described == made
    assert {each["name"]: each["shape"] for each in described["tensors"]} == {
        name: list(array.shape) for name, array in arrays.items()
    }
    assert described["tokens"] == {"layers": ["a", "b", "c", "d"]}
    assert "value" not in described
    assert http.delete(f"/v1/recordings/{made['id']}").status_code == 204
    assert problem(http.get(f"/v1/recordings/{made['id']}"))["code"] == "recording_not_found"
    assert problem(http.delete(f"/v1/recordings/{made['id']}"))["status"] == 404


def test_the_whole_file_comes_back_by_accept(http, tmp_path):
    arrays, content = file_of(seed=2)
    made = stored(http, content)
    answer = http.get(f"/v1/recordings/{made['id']}", headers={"accept": SAFETENSORS})
    assert answer.headers["content-type"] == SAFETENSORS
    assert len(answer.content) == made["bytes"]
    (tmp_path / "whole.safetensors").write_bytes(answer.content)
    with safe_open(tmp_path / "whole.safetensors", framework="np") as file:
        assert json.loads(file.metadata()["recording"])["text"] == "a b c d"
        for name, array in arrays.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)
    assert stored(http, answer.content)["id"] == made["id"]


@pytest.mark.parametrize(
    ("query", "part"),
    [
        ({"layer": "0"}, lambda a: a["layers.0.weights"]),
        ({"layer": "layers.0", "heads": "1"}, lambda a: a["layers.0.weights"][1:2]),
        ({"layer": "0", "heads": "1,0", "queries": "1:3"}, lambda a: a["layers.0.weights"][[1, 0], 1:3]),
        ({"layer": "0", "tensor": "hidden", "queries": "3,1"}, lambda a: a["layers.0.hidden"][[3, 1]]),
        ({"layer": "0", "tensor": "lse", "heads": "0"}, lambda a: a["layers.0.lse"][:1]),
        ({"tensor": "layers.embeddings"}, lambda a: a["layers.embeddings"]),
    ],
)
def test_parts_of_tensors_are_read_in_both_forms(http, query, part):
    arrays, content = file_of(seed=3)
    path = f"/v1/recordings/{stored(http, content)['id']}"
    as_json = http.get(path, params=query).json()
    assert as_json["tokens"] == {"layers": ["a", "b", "c", "d"]}
    np.testing.assert_allclose(as_json["value"], part(arrays), rtol=1e-6)
    as_file = safetensors.numpy.load(http.get(path, params=query, headers={"accept": SAFETENSORS}).content)
    np.testing.assert_array_equal(as_file["value"], part(arrays))


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"layer": "1"}, "tensor"),
        ({"layer": "0", "tensor": "q"}, "tensor"),
        ({"tensor": "../../etc/passwd"}, "tensor"),
        ({"layer": "0", "heads": "2"}, "heads"),
        ({"layer": "0", "queries": "0,9"}, "queries"),
        ({"layer": "0", "heads": "-1"}, "heads"),
        ({"layer": "0", "heads": "0:1:2"}, "heads"),
        ({"layer": "0", "tensor": "hidden", "heads": "0"}, "heads"),
        ({"layer": "0", "nonsense": "0"}, "nonsense"),
    ],
)
def test_a_part_that_is_not_there_is_refused_by_its_field(http, query, param):
    path = f"/v1/recordings/{stored(http, file_of(seed=3)[1])['id']}"
    refusal = problem(http.get(path, params=query))
    assert (refusal["status"], refusal["param"]) == (422, param)


@pytest.mark.parametrize(
    "name", ["0" * 32, "0" * 31, "%2e%2e%2fmodules", "..%2F..%2Fetc%2Fpasswd", "A" * 32, "0" * 32 + "%00"]
)
def test_an_id_never_leaves_the_folder(http, name):
    for method in ("GET", "DELETE"):
        assert problem(http.request(method, f"/v1/recordings/{name}"))["status"] in {404, 405}


def with_tensor(name, shape):
    return file_of(tensors={name: np.zeros(shape, np.float32)})[1]


@pytest.mark.parametrize(
    ("content", "status", "param"),
    [
        (b"", 400, None),
        (file_of()[1][:-1], 400, None),
        (file_of()[1] + b"\0", 400, None),
        (b"\xff" * 8 + file_of()[1][8:], 400, None),
        (safetensors.numpy.save({"layers.0.weights": np.ones((1, 1, 1), np.float32)}), 422, "model"),
        (safetensors.numpy.save({}, {"recording": "{"}), 400, None),
        (file_of(format=2)[1], 422, "format"),
        (file_of(model="")[1], 422, "model"),
        (file_of(created="yesterday")[1], 422, "created"),
        (file_of(tokens={"nonsense": ["a"]})[1], 422, "tokens.nonsense"),
        (file_of(attentions=[{"name": "layers.0/..", "heads": ["x"]}])[1], 422, "attentions.0.name"),
        (file_of(attentions=[])[1], 422, "layers.0.lse"),
        (with_tensor("layers.0.weights", (HEADS, TOKENS, TOKENS + 1)), 422, "layers.0.weights"),
        (with_tensor("layers.0.hidden", (TOKENS,)), 422, "layers.0.hidden"),
        (with_tensor("layers.0.nonsense", (TOKENS,)), 422, "layers.0.nonsense"),
        (with_tensor("layers.0.cross.q", (HEADS, TOKENS, WIDTH)), 422, "layers.0.cross.q"),
        (with_tensor("decoder.0.hidden", (TOKENS, WIDTH)), 422, "decoder.0.hidden"),
        (with_tensor("other", (1,)), 422, "other"),
        (file_of(tensors={"layers.0.hidden": np.zeros((TOKENS, WIDTH), np.int64)})[1], 422, "layers.0.hidden"),
    ],
)
def test_a_broken_or_wrong_file_is_refused_and_nothing_is_stored(http, content, status, param):
    before = http.get("/v1/recordings").json()
    refusal = problem(http.post("/v1/recordings", content=content, headers=FILE))
    assert (refusal["status"], refusal.get("param")) == (status, param), refusal
    assert http.get("/v1/recordings").json() == before


def test_a_recording_may_also_come_as_json(http):
    made = http.post("/v1/recordings", json=EXAMPLE_RECORDING).json()
    assert http.get(f"/v1/recordings/{made['id']}", params={"layer": "0"}).json()["value"] == [
        [[1.0, 0.0], [0.25, 0.75]]
    ]


def test_limits_are_reported_and_leave_nothing_behind(tmp_path):
    _, content = file_of()
    with (
        live_server(tmp_path, recordings_limit=len(content) + 500, max_body_bytes=2**16) as url,
        httpx.Client(base_url=url) as http,
    ):
        first = stored(http, content)
        full = problem(http.post("/v1/recordings", content=file_of(seed=9)[1], headers=FILE))
        assert (full["status"], full["code"], full["held_bytes"]) == (507, "store_full", first["bytes"])
        long = file_of("a b c d " * 200, tensors=None, tokens={"layers": list("abcd")})[1]
        large = problem(http.post("/v1/recordings", content=long, headers=FILE))
        assert (large["status"], large["limit_bytes"]) == (413, len(content) + 500)
        huge = problem(http.post("/v1/recordings", content=b"\0" * (2**16 + 1), headers=FILE))
        assert (huge["status"], huge["code"]) == (413, "body_too_large")
        assert [path.name for path in (tmp_path / "recordings").glob("[!.]*")] == [f"{first['id']}.safetensors"]
        assert not list((tmp_path / "recordings").glob(".new-*"))
        http.delete(f"/v1/recordings/{first['id']}")
        stored(http, file_of(seed=9)[1])


@pytest.mark.long
def test_many_callers_may_add_read_and_delete_at_once(http):
    contents = [file_of(seed=100 + number)[1] for number in range(4)]
    ids = [stored(http, content)["id"] for content in contents]  # every caller has the same recordings

    def call(number):
        """One caller's turns; the statuses of its answers."""
        seen = set()
        for turn in range(15):
            content, name = contents[turn % 4], ids[turn % 4]
            seen.add(http.post("/v1/recordings", content=content, headers=FILE).status_code)
            seen.add(http.get(f"/v1/recordings/{name}?layer=layers.0").status_code)
            seen.add(http.get("/v1/recordings").status_code)
            seen.add(http.delete(f"/v1/recordings/{name}").status_code)
        return seen

    with ThreadPoolExecutor(8) as callers:
        assert set().union(*callers.map(call, range(8))) <= {200, 201, 204, 404}


@pytest.mark.slow
def test_recordings_outlive_the_server_and_damage_is_named(tmp_path):
    with live_server(tmp_path) as url, httpx.Client(base_url=url) as http:
        kept, broken = stored(http, file_of()[1])["id"], stored(http, file_of(seed=1)[1])["id"]
    folder = tmp_path / "recordings"
    (folder / ".new-0123").write_bytes(b"left by a crash")
    cut(folder / f"{broken}.safetensors")
    (folder / "notes.txt").write_text("not a recording")
    with live_server(tmp_path) as url, httpx.Client(base_url=url) as http:
        listed = http.get("/v1/recordings").json()
        assert ([each["id"] for each in listed["recordings"]], listed["damaged"]) == ([kept], [broken])
        answer = problem(http.get(f"/v1/recordings/{broken}"))
        assert (answer["status"], answer["code"]) == (500, "internal_error")
        assert broken in answer["detail"]
        assert not re.search(re.escape(str(tmp_path)), json.dumps(answer))
        assert http.delete(f"/v1/recordings/{broken}").status_code == 204
        assert not (folder / ".new-0123").exists()


def cut(path: Path):
    path.write_bytes(path.read_bytes()[:-7])


def test_statistics_of_every_layer_and_head_come_from_the_recorded_weights(http):
    arrays, content = file_of("a b a b", seed=21)
    made = stored(http, content)
    body = {"statistics": ["entropy", "previous_token", "induction", "classes", "received"], "classes": {"bees": ["b"]}}
    reply = http.post(f"/v1/recordings/{made['id']}/statistics", json=body)
    assert reply.status_code == 200, reply.text
    (found,) = reply.json()["attentions"]
    w = arrays["layers.0.weights"].astype(np.float64)
    assert (found["name"], found["heads"], found["queries"]) == ("layers.0", ["L0H0", "L0H1"], TOKENS)
    expected = {
        "entropy": -(w * np.log(w)).sum(-1).mean(-1),
        "received": w.mean(-2),
        "previous_token": np.diagonal(w, -1, 1, 2).sum(-1) / TOKENS,
        "induction": (w[:, 2, 1] + w[:, 3, 2]) / TOKENS,  # the second a looks behind the first, the second b likewise
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found["statistics"][name], value, rtol=1e-5, err_msg=name)
    shares = w[:, :, [1, 3]].sum(-1).mean(-1)
    np.testing.assert_allclose(found["statistics"]["classes"]["bees"], shares, rtol=1e-5)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"layers": ["layers.7"]}, "layers"),
        ({"statistics": ["classes"]}, "classes"),
        ({"statistics": ["retrieval"]}, "statistics.0"),
        ({"statistics": ["pairs"]}, "statistics.0"),
        ({"window": -1}, "window"),
    ],
)
def test_statistics_of_missing_layers_or_classes_are_refused(http, query, param):
    made = stored(http, file_of(seed=22)[1])
    refused = problem(http.post(f"/v1/recordings/{made['id']}/statistics", json=query))
    assert (refused["status"], refused["param"]) == (422, param)


def test_a_recording_without_weights_or_that_is_missing_has_no_statistics(http):
    bare = {"model": "m", "text": "a", "created": "2026-01-01T00:00:00Z", "tokens": {"layers": ["a"]}}
    made = http.post("/v1/recordings", json=bare | {"layers": {"embeddings": [[1.0]]}}).json()
    assert problem(http.post(f"/v1/recordings/{made['id']}/statistics", json={}))["param"] == "id"
    assert problem(http.post(f"/v1/recordings/{'0' * 32}/statistics", json={}))["code"] == "recording_not_found"
