"""Plans of requests: equal ones, those of one bucket of sizes, and those near the limit of the memory budget."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.schemas.weights import RawWeightsRequest
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.cost import Rates, Roofline
from attention_service.modules.resident import Module, complete
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import forward, gradients, weights
from attention_service.runtime.planning import planner

RATES = Rates(1e11, 1e10, 1e-5)
FREE_BYTES = 2**40
WINDOW = {"masks": [{"name": "sliding_window", "left": 7}]}


def device():
    return Device(torch.device("cpu"), "test", 2**34, Roofline(RATES))


def request(made=RawForwardRequest, length=8, **more):
    x = np.ones((1, 2, length, 4), np.float32)
    return made(query=x, key=x, value=x, **more)


@pytest.fixture
def rehearsed(monkeypatch):
    """The queries and keys of every blank request that was rehearsed."""
    sizes, real = [], planner.seen

    def noted(bound, *args, **more):
        sizes.append((bound.queries, bound.keys))
        return real(bound, *args, **more)

    monkeypatch.setattr(planner, "seen", noted)
    return sizes


def test_a_request_of_a_known_bucket_is_not_rehearsed(rehearsed):
    here = device()
    plans = [forward.prepare(None, request(length=length), here, FREE_BYTES).plan for length in (20, 17, 18, 19, 20)]
    assert {keys for _, keys in rehearsed} == {17, 20}
    assert {plan.peak_bytes for plan in plans} == {plans[0].peak_bytes}
    assert plans[-1] is plans[0]
    assert plans[1].flops < plans[2].flops < plans[3].flops < plans[4].flops
    count = len(rehearsed)
    forward.prepare(None, request(length=21), here, FREE_BYTES)
    assert len(rehearsed) > count


def test_steps_of_a_decode_share_their_plans(rehearsed):
    """One query over a past that grows by one, and offsets that grow with it."""
    here, x = device(), np.ones((2, 2, 1, 4), np.float32)

    def step(past, **more):
        held = np.ones((2, 2, past, 4), np.float32)
        sent = RawForwardRequest(query=x, key=x, value=x, past_key=held, past_value=held, **more)
        return forward.prepare(None, sent, here, FREE_BYTES).plan

    for more in ({}, {"spec": WINDOW}):
        for offsets in (False, True):
            rehearsed.clear()
            for past in range(100, 257):
                step(past, **more, **({"offsets": np.array([past - 3, past])} if offsets else {}))
            assert (
                len({keys for _, keys in rehearsed}) == 12
            )  # both ends of past 97-112, 113-128, 129-160, 161-192, 193-224 and 225-256


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "materialized"},
        {"return": ["weights"]},
        {"select": {"heads": [0]}, "return": ["q"]},
        {"spec": {"masks": [{"name": "causal"}]}},
        {"mask": np.ones((8, 8), bool)},
        {"mask": np.ones((8, 8), np.float32)},
        {"key_lengths": np.array([3])},
        {"dropout": {"p": 0.5}},
        {"dropout": {"p": 0.5, "return_mask": True}},
        {"edits": [{"tap": "weights", "set": 0}]},
        {"past_key": np.ones((1, 2, 3, 4), np.float32), "past_value": np.ones((1, 2, 3, 4), np.float32)},
    ],
)
def test_another_question_makes_another_plan(change):
    """The plan found in a full cache is the one that is made in an empty cache."""
    here = device()
    forward.prepare(None, request(), here, FREE_BYTES)
    known = len(here.plans)
    plan = forward.prepare(None, request(**change), here, FREE_BYTES).plan
    assert len(here.plans) > known
    assert plan == forward.prepare(None, request(**change), device(), FREE_BYTES).plan


def test_modules_of_one_config_share_their_plans():
    here = device()
    config = complete(ModuleConfig(d_model=8, num_heads=2))
    sent = ForwardRequest(query=np.ones((1, 5, 8), np.float32))
    plans = [
        forward.prepare(
            Module.of(name, config, initial_parameters(Sizes.of(config), seed, torch.float32)), sent, here, FREE_BYTES
        ).plan
        for name, seed in (("m", 0), ("n", 1))
    ]
    assert plans[0] is plans[1]


def test_gradients_are_planned_by_their_targets():
    here = device()
    plain = gradients.prepare(None, request(RawGradientsRequest, wrt=["query"]), here, FREE_BYTES).plan
    again = gradients.prepare(None, request(RawGradientsRequest, wrt=["query"]), here, FREE_BYTES).plan
    assert again is plain
    for more in ({"wrt": ["weights"]}, {"wrt": ["query"], "check": True}):
        assert gradients.prepare(None, request(RawGradientsRequest, **more), here, FREE_BYTES).plan != plain


def test_another_clock_plans_anew():
    here = device()
    before = forward.prepare(None, request(), here, FREE_BYTES).plan
    here.clock = Roofline(replace(RATES, overhead_s=1.0))
    after = forward.prepare(None, request(), here, FREE_BYTES).plan
    assert after.predicted.median > 1 > before.predicted.median


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────

MASKS = ([], [{"name": "causal"}], [{"name": "causal", "align": "bottom_right"}], WINDOW["masks"])


@st.composite
def requests(draw):
    """An operation and a request of sizes that are seldom the end of a bucket."""
    batch, heads = draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 4]))
    queries, past = draw(st.integers(1, 700)), draw(st.sampled_from([0, 0, 1, 37, 300]))
    keys = queries if draw(st.booleans()) else draw(st.integers(1, 700))
    spec = {"masks": draw(st.sampled_from(MASKS)), "score": {"name": draw(st.sampled_from(["scaled_dot", "cosine"]))}}
    spec["normalizer"] = {"name": draw(st.sampled_from(["softmax", "sparsemax"]))}

    def ones(length):
        return np.broadcast_to(np.float32(1), (batch, heads, length, 8))

    sent = {"query": ones(queries), "key": ones(keys), "value": ones(keys), "spec": spec}
    if past:
        sent |= {"past_key": ones(past), "past_value": ones(past)}
    if draw(st.booleans()):
        sent["key_lengths"] = np.full(batch, draw(st.integers(1, past + keys)))
    rows = draw(st.sampled_from([None, (queries,), (batch, 1, queries), (batch, heads, 1)]))
    if rows is not None:
        sent["mask"] = np.broadcast_to(draw(st.sampled_from([np.True_, np.float32(0)])), (*rows, past + keys))
    if draw(st.booleans()):
        sent["offsets"] = np.array(draw(st.lists(st.integers(-20, 900), min_size=batch, max_size=batch)))
    operation = draw(
        st.sampled_from([(forward, RawForwardRequest), (weights, RawWeightsRequest), (gradients, RawGradientsRequest)])
    )
    if operation[0] is forward and draw(st.booleans()):
        sent |= {"return": ["weights"], "select": {"queries": [*range(draw(st.integers(1, queries)))]}}
    if operation[0] is gradients:
        sent["wrt"] = ["query", "value"]
    return operation[0], operation[1](**sent)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(requests())
@pytest.mark.slow
def test_the_plan_of_a_bucket_bounds_the_exact_one(drawn):
    operation, sent = drawn
    plan = operation.prepare(None, sent, device(), FREE_BYTES).plan
    # Near a crossover the upper end of a bucket may choose another kernel: the bound is that of the kernel that runs.
    same = sent.model_copy(update={"kernel": plan.kernel})
    exact = operation.prepare(None, same, device().exact(), FREE_BYTES).plan
    assert 0.98 * exact.peak_bytes <= plan.peak_bytes <= max(1.25 * exact.peak_bytes, exact.peak_bytes + 2**25)
    assert plan.flops == exact.flops
    assert plan.predicted.median == pytest.approx(exact.predicted.median, rel=0.15)


@pytest.mark.parametrize("length", [17, 700])
@pytest.mark.parametrize("kernel", [None, "materialized"])
def test_a_request_that_fits_exactly_is_not_refused_for_its_bucket(length, kernel):
    exact = forward.prepare(None, request(length=length, kernel=kernel), device().exact(), FREE_BYTES).plan
    here = device()
    bound = forward.prepare(None, request(length=length, kernel=kernel), here, FREE_BYTES).plan
    assert bound.peak_bytes > exact.peak_bytes
    plan = forward.prepare(None, request(length=length, kernel=kernel), here, exact.peak_bytes).plan
    assert plan == exact
    again = forward.prepare(None, request(length=length, kernel=kernel), here, bound.peak_bytes).plan
    assert again in (bound, exact)


def test_a_budget_that_grows_lets_a_faster_kernel_run():
    """No plan of the little room is kept for the larger one."""
    here = device()
    here.clock = Roofline(Rates(1e9, 1e13, 1e-9))
    plans = {budget: forward.prepare(None, request(length=700), here, budget).plan for budget in (2**20, 2**22, 2**30)}
    for budget, plan in plans.items():
        anew = device()
        anew.clock = here.clock
        assert forward.prepare(None, request(length=700), anew, budget).plan == plan
