"""Position encodings and the norm of queries and keys over HTTP: every question, for modules and raw tensors."""

import numpy as np
import pytest

from tests.api.talk import post, refuse

POSITIONS = {
    "sinusoidal": {"name": "sinusoidal"},
    "learned": {"name": "learned", "length": 8},
    "rope": {"name": "rope", "theta": 100, "dim": 2, "style": "interleaved"},
    "yarn": {"name": "rope", "scaling": {"name": "yarn", "factor": 4, "original_max_position_embeddings": 4}},
    "alibi": {"name": "alibi"},
    "relative_bias": {"name": "relative_bias", "num_buckets": 8, "max_distance": 4},
}
NORM = {"over": "all_heads", "unit_offset": True}
HEADS, KV_HEADS, HEAD, WIDTH, TOKENS = 4, 2, 4, 6, 6
CAUSAL = [{"name": "causal"}]


def typed(x):
    return {"dtype": "float64", "shape": list(np.shape(x)), "data": np.ravel(x).tolist()}


def learned(spec, width=HEAD):
    """Random learned tensors of a spec, as a raw request brings them."""
    draw = np.random.default_rng(5).normal
    found = {}
    if spec["position"]["name"] == "learned":
        found["position.weight"] = draw(size=(8, width))
    if spec["position"]["name"] == "relative_bias":
        found["relative_bias.weight"] = draw(size=(8, HEADS))
    if spec.get("qk_norm"):
        found |= {"q_norm.weight": draw(size=HEADS * HEAD), "k_norm.weight": draw(size=KV_HEADS * HEAD)}
    return {name: typed(x) for name, x in found.items()}


@pytest.fixture(params=POSITIONS, ids=POSITIONS)
def spec(request):
    return {"position": POSITIONS[request.param], "qk_norm": NORM, "masks": CAUSAL}


@pytest.fixture
def module(http, spec):
    name = f"placed-{spec['position']['name']}"
    config = {"d_model": WIDTH, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD, "dtype": "float64"}
    post(http, "/v1/modules", name=name, config=config | {"spec": spec}, seed=0)
    yield name
    http.delete(f"/v1/modules/{name}")


@pytest.fixture(params=["module", "raw"])
def ask(request, http, spec, rng):
    """A function that asks one question about the same tokens, as a module or raw, with more fields."""
    if request.param == "module":
        path = f"/v1/modules/{request.getfixturevalue('module')}"
        whole = {"query": rng.normal(size=(2, TOKENS, WIDTH))}
        more = {}
    else:
        path = "/v1/attention"
        sizes = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
        whole = {name: rng.normal(size=(2, heads, TOKENS, HEAD)) for name, heads in sizes.items()}
        more = {"spec": spec, "parameters": learned(spec)}

    def about(question, rows=slice(None), **fields):
        tokens = {name: typed(x[..., rows, :]) for name, x in whole.items()}
        return post(http, f"{path}/{question}", **tokens, **more, **fields)

    return about


def test_a_sequence_in_parts_is_the_whole(ask, spec):
    empty = typed(np.zeros((2, KV_HEADS, 0, HEAD)))
    whole = ask("forward", past_key=empty, past_value=empty, **{"return": ["output", "k", "q"]})
    axis = np.ndim(whole["output"]) - 2
    past, outputs = {"past_key": empty, "past_value": empty}, []
    for start, end in ((0, 3), (3, 4), (4, 6)):
        step = ask("forward", slice(start, end), **past)
        outputs.append(step["output"])
        past = {"past_key": typed(step["present_key"]), "past_value": typed(step["present_value"])}
    np.testing.assert_allclose(np.concatenate(outputs, axis), whole["output"], atol=1e-12)
    np.testing.assert_allclose(past["past_key"]["data"], np.ravel(whole["k"]), atol=1e-12)
    np.testing.assert_allclose(past["past_key"]["data"], np.ravel(whole["present_key"]), atol=1e-12)


def test_positions_are_the_places_of_the_tokens(ask, spec):
    plain = ask("forward")["output"]
    told = ask("forward", positions=[[0, 1, 2, 3, 4, 5]] * 2)["output"]
    np.testing.assert_allclose(told, plain, atol=1e-12)
    packed = ask("forward", positions=[[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])["output"]
    np.testing.assert_allclose(packed[1], plain[1], atol=1e-12)
    assert not np.allclose(packed[0], plain[0])


def test_gradients_pass_their_check(ask, spec):
    names = list(learned(spec))
    reply = ask("gradients", wrt=["query", "q", "k", "masked_scores", *names], check=True)
    assert all(row["passed"] for row in reply["check"].values()), reply["check"]
    assert all(np.any(reply["gradients"][name]) for name in names)


def test_weights_are_looked_at_and_costs_counted(ask, spec, http, module):
    reply = ask("weights", **{"return_weights": True})
    np.testing.assert_allclose(reply["weights"], ask("forward", **{"return": ["weights"]})["weights"], atol=1e-12)
    cost = post(http, f"/v1/modules/{module}/complexity", shape={"queries": TOKENS, "batch": 2})["costs"][0]
    ran = ask("forward")["ran"]
    assert cost["forward"]["dense"]["position"] > 0
    assert ran["kernel"] in {"fused", "materialized", "blocked"}
    assert cost["forward"]["dense"]["total"] >= ran["flops"] > 0


def test_a_biased_position_is_not_for_the_fused_kernel(ask, spec, http):
    if spec["position"]["name"] not in {"alibi", "relative_bias"}:
        assert ask("forward", kernel="fused")["ran"]["kernel"] == "fused"
        return
    document = refuse(http, "/v1/attention/forward", query=np.eye(HEAD).tolist(), kernel="fused",
                      spec={"position": {"name": "alibi"}})  # fmt: skip
    assert document["param"] == "kernel"
    assert "alibi" in document["detail"]


X = np.zeros((3, 4)).tolist()
LEARNED = {"name": "learned", "length": 4}
TABLE = {"parameters": {"position.weight": np.zeros((4, 4)).tolist()}}
ROPE = {"name": "rope"}


@pytest.mark.parametrize(
    ("body", "param", "told"),
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
        (
            {
                "spec": {
                    "position": ROPE
                    | {
                        "scaling": {
                            "name": "longrope",
                            "short_factor": [1],
                            "long_factor": [2],
                            "factor": 2,
                            "original_max_position_embeddings": 8,
                        }
                    }
                }
            },
            "spec.position.scaling",
            "2 pairs",
        ),
        ({"spec": {"position": ROPE}, "query": [[1, 2, 3]]}, "spec.position.dim", "3 wide"),
        (
            {"spec": {"position": ROPE | {"scaling": {"name": "ntk", "factor": 2}}}, "query": [[1, 2]]},
            "spec.position.scaling",
            "2 wide",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(http, body, param, told):
    document = refuse(http, "/v1/attention/forward", **{"query": X, **body})
    assert (document["status"], document["param"]) == (422, param), document
    assert told in document["detail"]


@pytest.mark.parametrize(
    ("config", "param", "told"),
    [
        ({"head_dim": 3, "spec": {"position": ROPE}}, "config.spec.position.dim", "3 wide"),
        ({"spec": {"position": {"name": "rope", "dim": 8}}}, "config.spec.position.dim", "4"),
        ({"key_width": 6, "spec": {"position": LEARNED}}, "config.spec.position", "6"),
    ],
)
def test_a_module_that_cannot_be_is_not_made(http, config, param, told):
    document = refuse(http, "/v1/modules", name="impossible", config={"d_model": 8, "num_heads": 2, **config})
    assert (document["status"], document["param"]) == (422, param), document
    assert told in document["detail"]
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
