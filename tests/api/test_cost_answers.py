"""What a complexity reply says of kernels, taps, steps, growth and alternatives, over HTTP."""

import json
from itertools import combinations

import numpy as np
import pytest

from attention_contract.schemas.costs.complexity import ComplexityReply
from tests.api.talk import post, refuse

PATH = "/v1/attention/complexity"
RAW = {"num_heads": 4, "head_dim": 16, "memory_bytes": 2**22}  # little, so that limits are found soon
CAUSAL = {"masks": [{"name": "causal"}]}


def cost(http, **fields):
    (found,) = post(http, PATH, **{"shape": {"queries": 256}} | RAW | fields)["costs"]
    return found


def test_what_runs_says_the_flops_that_were_counted(http, rng):
    x = rng.normal(size=(16, 64)).tolist()
    post(http, "/v1/modules", name="cost", config={"d_model": 64, "num_heads": 4}, seed=0)
    ran = post(http, "/v1/modules/cost/forward", query=x)["ran"]
    cost = post(http, "/v1/modules/cost/complexity", shape={"queries": 16}, memory_bytes=2**24)["costs"][0]
    assert ran["flops"] == cost["forward"]["dense"]["total"]
    assert ran["kernel"] == cost["kernel"]
    assert ran["predicted_ms"] > 0
    assert ran["compute_ms"] > 0


@pytest.mark.sampled(body=3, param=3)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"shape": {"queries": 0}}, "shape.queries"),
        ({"shape": {"queries": 4}, "sweep": {"dimension": "length", "values": [4, 0]}}, "sweep.values.1"),
        ({"shape": {"queries": 4}, "kernel": "fused", "spec": {"softcap": 2}}, "kernel"),
        ({"shape": {"queries": 4}, "num_kv_heads": 3}, "num_kv_heads"),
        (
            {"shape": {"queries": 10**9}, "spec": {"masks": [{"name": "random_blocks", "size": 2**20, "count": 1}]}},
            "shape.queries",
        ),
    ],
)
def test_what_cannot_be_is_refused(http, body, param):
    assert refuse(http, PATH, num_heads=4, head_dim=8, **body).get("param") == param


# ── taps ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.sampled(taps=1)
@pytest.mark.parametrize("taps", [["weights"], ["q", "lse", "weights"]])
def test_what_taps_add_together_is_the_difference_to_the_output_alone(http, taps):
    bare, all_of_them = (cost(http, kernel="blocked", **{"return": ["output", *some]}) for some in ([], taps))
    joint = all_of_them["taps_together"]
    assert "taps_together" not in bare
    assert joint["peak_bytes"] == all_of_them["peak_bytes"]["request"] - bare["peak_bytes"]["request"]
    assert joint["output_bytes"] == all_of_them["output_bytes"] - bare["output_bytes"]
    assert joint["predicted_ms"] == pytest.approx(all_of_them["predicted_ms"] - bare["predicted_ms"])
    each = all_of_them["taps"]
    assert set(each) == set(taps)
    assert joint["output_bytes"] == sum(one["output_bytes"] for one in each.values())
    if len(taps) == 1:
        assert joint == each[taps[0]]


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kernel", ["fused", "blocked", "materialized"])
def test_a_backward_pass_and_a_step_are_those_of_the_kernels_that_are_named(http, kernel):
    found = cost(http, kernel=kernel)
    assert (found["kernel"], found["gradients_kernel"], found["decode_kernel"]) == (kernel,) * 3
    largest = max(phase["bytes"] for phase in found["memory"] if phase["direction"] == "backward")
    assert 0 <= found["peak_bytes"]["gradients"] - largest <= 4096
    assert found["executed"]["backward"]["flops"] == found["executed_backward_flops"]


@pytest.mark.slow
def test_each_planned_kernel_is_the_one_that_runs(http, rng):
    """Of gradients too: with little memory, theirs is another than the forward pass's."""
    sizes = {"shape": {"queries": 2**16}, "head_dim": 64, "value_dim": 1}  # which the fused kernel makes as wide
    fused, blocked = (cost(http, kernel=kernel, **sizes) for kernel in ("fused", "blocked"))
    found = cost(http, **sizes | {"memory_bytes": blocked["peak_bytes"]["gradients"]})
    assert (found["kernel"], found["gradients_kernel"]) == ("fused", "blocked")
    for named, direction in ((fused, "forward"), (blocked, "backward")):
        assert found["executed"][direction] == named["executed"][direction]
    assert found["predicted"]["gradients"] == blocked["predicted"]["gradients"]
    assert found["peak_bytes"]["gradients"] == blocked["peak_bytes"]["gradients"] < fused["peak_bytes"]["gradients"]
    x = rng.normal(size=(4, 256, 16)).astype(np.float32).tolist()
    ran = post(http, "/v1/attention/gradients", query=x, key=x, value=x)["ran"]
    planned = cost(http)
    assert ran["kernel"] == planned["gradients_kernel"]
    assert 0 <= ran["peak_bytes"] - planned["peak_bytes"]["gradients"] <= 2**25  # admitted for its bucket of sizes


@pytest.mark.sampled(spec=2, able=2)
@pytest.mark.parametrize(
    ("spec", "able"),
    [
        ({}, {"fused", "blocked", "materialized"}),
        ({"softcap": 30}, {"blocked", "materialized"}),
        ({"normalizer": {"name": "sigmoid"}}, {"blocked", "materialized"}),
        ({"method": {"name": "performer"}}, {"fused", "blocked", "materialized"}),
    ],
)
def test_a_kernel_that_cannot_run_has_no_peak(http, spec, able):
    assert set(cost(http, spec=spec)["peak_bytes"]) - {"request", "gradients"} == able


# ── steps of methods ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_step_of_a_running_state_costs_what_it_does_whatever_came_before(http, rng):
    spec = CAUSAL | {"method": {"name": "linear"}}
    short, long = (cost(http, shape={"queries": n}, spec=spec) for n in (16, 4096))
    assert short["decode_kernel"] == "linear"
    for of in ("executed", "predicted"):
        assert short[of]["decode"] == long[of]["decode"]
    token = rng.normal(size=(4, 1, 16)).tolist()
    state = {"initial_state": np.zeros((4, 16, 16)).tolist(), "initial_normalizer": np.ones((4, 16)).tolist()}
    sent = state | {"query": token, "key": token, "value": token, "offsets": 15, "return_state": True}
    answer = post(http, "/v1/attention/forward", spec=spec, **sent)
    assert answer["ran"]["flops"] == short["executed"]["decode"]["flops"]
    assert np.shape(answer["final_state"]) == (4, 16, 16)


def test_a_step_of_another_method_is_one_query_over_past_keys(http, rng):
    spec = {"method": {"name": "performer"}}
    found = cost(http, spec=spec)
    token, past = rng.normal(size=(4, 1, 16)).tolist(), rng.normal(size=(4, 255, 16)).tolist()
    sent = {"query": token, "key": token, "value": token, "past_key": past, "past_value": past}
    ran = post(http, "/v1/attention/forward", spec=spec, **sent)["ran"]
    assert ran["kernel"] == found["decode_kernel"] == "performer"
    assert ran["flops"] == found["executed"]["decode"]["flops"]


def test_landmarks_over_all_queries_have_no_step(http):
    found = cost(http, spec={"method": {"name": "nystrom"}})
    assert "decode" not in found["predicted"]
    assert "decode" not in found["executed"]
    assert "decode_kernel" not in found


# ── growth ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.sampled(values=2, between=2)
@pytest.mark.parametrize(
    ("values", "between"), [([0, 4096], (4096, 8192)), ([0, 0], (1, 2)), ([4096, 0, 1024], (1024, 4096))]
)
def test_growth_leaves_a_size_of_nothing_out(http, values, between):
    body = {"shape": {"queries": 1, "past": 1}, "sweep": {"dimension": "past", "values": values}} | RAW
    growth = post(http, PATH, **body)["growth"]
    assert tuple(growth["between"]) == between
    assert all(-0.1 < growth[f"{what}_exponent"] < 1.1 for what in ("flops", "time", "peak_bytes"))
    if between[0] > 1000:
        assert growth["flops_exponent"] == pytest.approx(1, abs=0.01)
        assert growth["peak_bytes_exponent"] == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_orders_explain_their_letters(http):
    for spec, meant in (
        ({}, {"n", "d"}),
        (CAUSAL | {"masks": [{"name": "sliding_window", "left": 8, "right": 0}]}, {"n", "d", "w"}),
        ({"method": {"name": "nystrom"}}, {"n", "m", "d"}),
    ):
        growth = post(http, PATH, shape={"queries": 256}, spec=spec, **RAW)["growth"]
        assert set(growth["letters"]) == meant
    assert growth["letters"]["m"] == "landmarks"
    swept = post(http, PATH, shape={"queries": 8}, sweep={"dimension": "queries", "values": [8, 16]}, **RAW)["growth"]
    assert swept["letters"]["m"] == "queries"


# ── nulls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_null_is_left_out_and_read_as_null(http):
    answer = http.post(PATH, json={"shape": {"queries": 8}, "spec": {"method": {"name": "nystrom"}}} | RAW)
    assert "null" not in answer.text
    reply = json.loads(answer.text)
    assert "projections_crossover" not in reply
    read = ComplexityReply.model_validate(reply)
    assert read.projections_crossover is None
    assert read.costs[0].predicted.decode is None


# ── alternatives ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_alternatives_have_labels_that_differ(http):
    compare = [{"spec": {"softcap": 30}}, {"spec": {"softcap": 50}}]
    reply = post(http, PATH, shape={"queries": 16}, compare=compare, **RAW)
    labels = ["request", "softcap 30", "softcap 50"]
    assert [one["label"] for one in reply["compared"]] == labels
    assert {tuple(found["between"]) for found in reply["crossovers"]} == set(combinations(labels, 2))


LEARNED = {"position": {"name": "learned", "length": 100}}


@pytest.mark.sampled(fields=3, other=3, param=3)
@pytest.mark.parametrize(
    ("fields", "other", "param"),
    [
        ({"kernel": "fused"}, {"spec": {"softcap": 3}}, "compare.0.spec"),
        ({}, {"spec": {"softcap": 3}, "kernel": "fused"}, "compare.0.kernel"),
        ({"hardware": "T4"}, {"dtype": "bfloat16"}, "compare.0.dtype"),
        ({"hardware": "T4"}, {"hardware": "Abacus"}, "compare.0.hardware"),
        ({"return": ["lse"]}, {"spec": {"normalizer": {"name": "sigmoid"}}}, "compare.0.spec"),
        ({"spec": {"position": {"name": "rope"}}}, {"head_dim": 7}, "compare.0.head_dim"),
        ({"sweep": {"dimension": "num_heads", "values": [4, 8]}}, {"num_kv_heads": 3}, "compare.0.num_kv_heads"),
        (
            {"sweep": {"dimension": "head_dim", "values": [16, 17]}},
            {"spec": {"position": {"name": "rope"}}}, "compare.0.spec.position.dim",
        ),
        ({"shape": {"queries": 2**20}}, {"head_dim": 2**30}, "compare.0.head_dim"),
        ({}, {"d_model": 4}, "compare.0.d_model"),
        ({}, {"label": "request"}, "compare.0.label"),
    ],
)  # fmt: skip
def test_errors_of_an_alternative_name_what_it_says(http, fields, other, param):
    body = {"shape": {"queries": 8}} | RAW | fields
    assert http.post(PATH, json=body).status_code == 200
    refusal = refuse(http, PATH, compare=[other], **body)
    assert refusal["param"] == param
    assert refusal["detail"].startswith(f"{param}: ")


def test_a_spec_that_ends_early_is_named_down_to_its_length(http):
    post(http, "/v1/modules", name="ends", config={"d_model": 16, "num_heads": 4}, seed=0)
    path, short = "/v1/modules/ends/complexity", {"compare": [{"spec": LEARNED}]}
    named = "compare.0.spec.position.length"
    assert refuse(http, path, shape={"queries": 101}, **short)["param"] == named
    refusal = refuse(http, path, shape={"queries": 8}, sweep={"values": [64, 101]}, **short)
    assert refusal["param"] == named
    assert "at length 101" in refusal["detail"]
    post(http, "/v1/modules", name="ended", config={"d_model": 16, "num_heads": 4, "spec": LEARNED}, seed=0)
    for shape, param in (
        ({"queries": 101}, "shape.queries"),
        ({"queries": 1, "keys": 101}, "shape.keys"),
        ({"queries": 8, "past": 93}, "shape.queries"),
    ):
        assert refuse(http, "/v1/modules/ended/complexity", shape=shape)["param"] == param


@pytest.mark.slow
def test_crossovers_are_measured_on_request(http):
    """Both are run on the server's device, and everything that was held for it is given back."""
    window = {"masks": [{"name": "sliding_window", "left": 15, "right": 0}]}
    compare = [{"label": "window", "spec": window, "kernel": "blocked"}, {"label": "there", "hardware": "H100 SXM"}]
    fields = {"shape": {"queries": 16}, "num_heads": 4, "head_dim": 64, "compare": compare}
    answer = post(http, "/v1/attention/complexity", **fields)
    reply = post(http, "/v1/attention/complexity", **fields, measure=True)
    for before, found in zip(answer["crossovers"], reply["crossovers"], strict=True):
        measured = found.pop("measured", None)
        assert before.keys() == found.keys()
        assert "measured" not in before
        assert measured is None or (found["of"] == "time" and "there" not in found["between"] and measured > 0)
    metrics = http.get("/metrics").text
    assert "attention_in_flight_bytes 0.0" in metrics
