"""Modules over HTTP: make, read, replace, delete; versions and preconditions."""

import numpy as np
import pytest

from tests.api.talk import post, problem, refuse

CONFIG = {"d_model": 8, "num_heads": 2}


def test_a_module_is_made_listed_described_and_deleted(http):
    made = http.post("/v1/modules", json={"name": "life", "config": CONFIG, "seed": 1})
    assert made.status_code == 201
    assert made.headers["location"] == "/v1/modules/life"
    info = made.json()
    assert made.headers["etag"] == f'"{info["version"]}"'
    assert info["parameter_count"] == 4 * 8 * 8 + 4 * 8
    assert info["bytes"] == 4 * info["parameter_count"]
    assert info["config"]["head_dim"] == 4
    assert http.get("/v1/modules/life").json() == info
    assert info in http.get("/v1/modules").json()["modules"]
    assert http.delete("/v1/modules/life").status_code == 204
    assert problem(http.get("/v1/modules/life"))["code"] == "module_not_found"
    assert problem(http.delete("/v1/modules/life"))["status"] == 404


def test_the_same_module_twice_is_one_and_another_is_a_conflict(http):
    first = post(http, "/v1/modules", name="twice", config=CONFIG, seed=1)
    assert post(http, "/v1/modules", name="twice", config=CONFIG, seed=1) == first
    assert refuse(http, "/v1/modules", name="twice", config=CONFIG, seed=2)["code"] == "module_exists"


def test_parameters_are_described_and_read_in_parts(http):
    post(http, "/v1/modules", name="parts", config={**CONFIG, "num_kv_heads": 1}, seed=5)
    rows = {row["name"]: row for row in http.get("/v1/modules/parts/parameters").json()["parameters"]}
    assert list(rows) == [f"{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")]
    whole = np.array(http.get("/v1/modules/parts/parameters/q_proj.weight").json()["value"])
    row = rows["q_proj.weight"]
    assert (row["shape"], row["dtype"]) == ([8, 8], "float32")
    for name, value in {"mean": whole.mean(), "std": whole.std(), "min": whole.min(), "max": whole.max(),
                        "norm": np.linalg.norm(whole)}.items():  # fmt: skip
        assert row[name] == pytest.approx(value, abs=1e-6)

    def read(name, **query):
        return np.array(http.get(f"/v1/modules/parts/parameters/{name}", params=query).json()["value"])

    np.testing.assert_array_equal(read("q_proj.weight", head=1), whole[4:8])
    np.testing.assert_array_equal(read("q_proj.weight", head=1, slice="0:2,:3"), whole[4:6, :3])
    assert read("o_proj.weight", head=1).shape == (8, 4)
    assert problem(http.get("/v1/modules/parts/parameters/k_proj.weight?head=1"))["param"] == "head"
    assert problem(http.get("/v1/modules/parts/parameters/q_proj.weight?slice=9"))["param"] == "slice"
    assert problem(http.get("/v1/modules/parts/parameters/q_proj.weight?hed=1"))["param"] == "hed"
    assert problem(http.get("/v1/modules/parts/parameters/x"))["code"] == "parameter_not_found"


def test_all_parameters_are_replaced_or_none(http):
    made = post(http, "/v1/modules", name="swap", config={**CONFIG, "bias": False}, seed=1)
    names = [f"{p}_proj.weight" for p in "qkvo"]
    new = {name: np.full((8, 8), index / 10).tolist() for index, name in enumerate(names)}
    body = {"parameters": {name: new[name] for name in names[:3]}}
    assert problem(http.put("/v1/modules/swap/parameters", json=body))["status"] == 422
    body = {"parameters": {**new, "o_proj.weight": [[1.0]]}}
    assert problem(http.put("/v1/modules/swap/parameters", json=body))["param"] == "parameters.o_proj.weight"
    assert http.get("/v1/modules/swap").json() == made

    old = f'"{made["version"]}"'
    replaced = http.put("/v1/modules/swap/parameters", json={"parameters": new}, headers={"if-match": old})
    assert replaced.status_code == 200
    assert replaced.json()["version"] != made["version"]
    value = http.get("/v1/modules/swap/parameters/o_proj.weight").json()["value"]
    np.testing.assert_allclose(value, new["o_proj.weight"], atol=1e-7)
    # A request whose reply was lost may come again; another one may not.
    again = http.put("/v1/modules/swap/parameters", json={"parameters": new}, headers={"if-match": old})
    assert again.json() == replaced.json()
    other = {"parameters": {**new, "q_proj.weight": new["o_proj.weight"]}}
    stale = problem(http.put("/v1/modules/swap/parameters", json=other, headers={"if-match": old}))
    assert (stale["status"], stale["expected"], stale["actual"]) == (409, made["version"], replaced.json()["version"])


def test_a_pin_that_no_longer_holds_is_a_conflict_everywhere(http):
    post(http, "/v1/modules", name="pinned", config=CONFIG)
    query = {"query": [[0.0] * 8]}
    bodies = {"forward": query, "weights": query, "gradients": query, "complexity": {"shape": {"queries": 4}}}
    for question, body in bodies.items():
        path = f"/v1/modules/pinned/{question}"
        assert refuse(http, path, **body, version="0" * 32)["code"] == "version_mismatch"
        assert problem(http.post(path, json=body, headers={"if-match": '"old"'}))["status"] == 409
        version = http.get("/v1/modules/pinned").json()["version"]
        assert http.post(path, json=body, headers={"if-match": f'"{version}"'}).status_code == 200
    assert problem(http.delete("/v1/modules/pinned", headers={"if-match": '"old"'}))["status"] == 409
    assert problem(http.delete("/v1/modules/pinned", headers={"if-match": "old"}))["param"] == "If-Match"


def test_what_has_not_changed_is_not_sent_again(http):
    post(http, "/v1/modules", name="cached", config=CONFIG)
    for path in ("/v1/modules/cached", "/v1/modules/cached/parameters", "/v1/modules/cached/parameters/q_proj.bias"):
        first = http.get(path)
        again = http.get(path, headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "../x", "config": CONFIG}, "name"),
        ({"name": "x", "config": {"d_model": 7, "num_heads": 2}}, "config.d_model"),
        ({"name": "x", "config": {"d_model": 8, "num_heads": 4, "num_kv_heads": 3}}, "config.num_kv_heads"),
        ({"name": "x", "config": CONFIG, "seed": 1, "parameters": {}}, "seed"),
        ({"name": "x", "config": CONFIG, "parameters": {"q_proj.weight": [[1.0]]}}, "parameters"),
        ({"name": "x", "config": {**CONFIG, "dtype": "int8"}}, "config.dtype"),
        ({"name": "x", "config": CONFIG, "extra": 1}, "extra"),
    ],
)
def test_a_module_that_cannot_be_is_refused(http, body, param):
    refusal = refuse(http, "/v1/modules", **body)
    assert refusal["status"] == 422
    assert refusal.get("param") == param


def test_a_module_too_large_is_refused_before_anything_is_allocated(http):
    huge = refuse(http, "/v1/modules", name="huge", config={"d_model": 1_048_576, "num_heads": 1})
    assert huge["status"] in {413, 507}
    assert huge["needed_bytes"] >= 4 * 4 * 1_048_576**2


@pytest.mark.parametrize("path", ["/etc", "../..", "nothing", "modules/../../x"])
def test_a_checkpoint_outside_the_repository_is_not_found(http, path):
    refusal = refuse(http, "/v1/modules/import", checkpoint=path)
    assert refusal["status"] in {404, 422}
    assert "root:" not in str(refusal)
