"""Position encodings over HTTP: what each refuses, and what a module learns. The fuzz compares the numbers."""

import numpy as np
import pytest

from tests.api.talk import post, refuse


def test_a_biased_position_is_not_for_the_fused_kernel(http):
    body = {"query": np.eye(4).tolist(), "kernel": "fused"}
    rotated = post(http, "/v1/attention/forward", **body, spec={"position": {"name": "rope"}})
    assert rotated["ran"]["kernel"] == "fused"
    document = refuse(http, "/v1/attention/forward", **body, spec={"position": {"name": "alibi"}})
    assert document["param"] == "kernel"
    assert "alibi" in document["detail"]


X = np.zeros((3, 4)).tolist()
LEARNED = {"name": "learned", "length": 4}
TABLE = {"parameters": {"position.weight": np.zeros((4, 4)).tolist()}}
ROPE = {"name": "rope"}
LONG = {
    "name": "longrope", "short_factor": [1], "long_factor": [2], "factor": 2, "original_max_position_embeddings": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param", "detail"),
    [
        ({"positions": [0, 1, 2]}, "positions", "'none'"),
        ({"spec": {"position": ROPE}, "positions": [[0, 1, 2]] * 2}, "positions", "[3]"),
        ({"spec": {"position": ROPE}, "positions": [0, 1]}, "positions", "[3]"),
        ({"spec": {"position": ROPE}, "positions": [0, 1, 2], "key": [[1, 2, 3, 4]]}, "positions", "1 new key"),
        ({"spec": {"position": LEARNED}, "positions": [0, -1, 2], **TABLE}, "positions", "-1"),
        ({"spec": {"position": LEARNED}, "positions": [0, 4, 2], **TABLE}, "positions", "4"),
        ({"spec": {"position": LEARNED}, "offsets": -1, **TABLE}, "offsets", "-1"),
        ({"spec": {"position": LEARNED}, "offsets": 2, **TABLE}, "offsets", "4"),
        ({"spec": {"position": LEARNED}, "query": [[0, 0, 0, 0]] * 5, **TABLE}, "query", "4"),
        ({"spec": {"position": LEARNED}, "key": [[0, 0, 0, 0]] * 5, **TABLE}, "key", "4"),
        ({"spec": {"position": LEARNED}}, "parameters.position.weight", "[4, 4]"),
        ({"spec": {"position": {"name": "rope", "dim": 6}}}, "spec.position.dim", "4"),
        ({"spec": {"position": ROPE | {"scaling": LONG}}}, "spec.position.scaling", "2 pairs"),
        ({"spec": {"position": ROPE}, "query": [[1, 2, 3]]}, "spec.position.dim", "3 wide"),
        (
            {"spec": {"position": ROPE | {"scaling": {"name": "ntk", "factor": 2}}}, "query": [[1, 2]]},
            "spec.position.scaling",
            "2 wide",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(http, body, param, detail):
    document = refuse(http, "/v1/attention/forward", **{"query": X, **body})
    assert (document["status"], document["param"]) == (422, param), document
    assert detail in document["detail"]


@pytest.mark.parametrize(
    ("config", "param", "detail"),
    [
        ({"head_dim": 3, "spec": {"position": ROPE}}, "config.spec.position.dim", "3 wide"),
        ({"spec": {"position": {"name": "rope", "dim": 8}}}, "config.spec.position.dim", "4"),
        ({"key_width": 6, "spec": {"position": LEARNED}}, "config.spec.position", "6"),
    ],
)
def test_a_module_that_cannot_be_is_not_made(http, config, param, detail):
    document = refuse(http, "/v1/modules", name="impossible", config={"d_model": 8, "num_heads": 2, **config})
    assert (document["status"], document["param"]) == (422, param), document
    assert detail in document["detail"]
    assert http.get("/v1/modules/impossible").status_code == 404


def test_a_shape_that_cannot_be_is_not_counted(http):
    body = {"shape": {"queries": 4}, "num_heads": 1, "head_dim": 3, "spec": {"position": ROPE}}
    assert refuse(http, "/v1/attention/complexity", **body)["param"] == "spec.position.dim"
    body |= {"head_dim": 4, "spec": {"position": LEARNED}}
    assert post(http, "/v1/attention/complexity", **body)["parameter_count"] == 16
    for shape, field in (
        ({"queries": 5}, "queries"),
        ({"queries": 1, "past": 4}, "queries"),
        ({"queries": 1, "keys": 5}, "keys"),
    ):
        document = refuse(http, "/v1/attention/complexity", **body | {"shape": shape})
        assert (document["param"], document["limit"]) == (f"shape.{field}", 4)


def test_a_module_holds_what_its_spec_learns(http):
    spec = {"position": LEARNED, "qk_norm": {}}
    config = {"d_model": 8, "num_heads": 2, "num_kv_heads": 1, "bias": False, "spec": spec}
    post(http, "/v1/modules", name="learning", config=config, seed=0)
    shapes = {each["name"]: each["shape"] for each in http.get("/v1/modules/learning/parameters").json()["parameters"]}
    assert (shapes["position.weight"], shapes["q_norm.weight"], shapes["k_norm.weight"]) == ([4, 8], [4], [4])
    norm = http.get("/v1/modules/learning/parameters/q_norm.weight").json()
    assert set(np.ravel(norm["value"])) == {1.0}
    http.delete("/v1/modules/learning")
