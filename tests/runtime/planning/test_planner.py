"""Plans are made once for equal requests, and made again where anything differs."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from attention_contract.errors import AttentionError
from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.schemas.modules import Biases
from attention_contract.spec import AttentionSpec, Causal
from attention_service.core.multihead import Sizes
from attention_service.cost import Rates, Roofline, Workload
from attention_service.runtime.device import Device
from attention_service.runtime.operations import forward, gradients
from attention_service.runtime.planning import plan_cache as plans
from attention_service.runtime.planning.plan_cache import Plans

RATES = Rates(1e11, 1e10, 1e-5)
ROOM = 2**40
WORK = Workload(2, 8, 8, 2, 2, 4, 4, 4, sizes=Sizes(8, 2, 2, 4, 4, 8, 8, Biases()))
OTHER = {
    "sizes": None,
    "spec": AttentionSpec(masks=[Causal()]),
    "taps": frozenset({"weights"}),
    "sent": frozenset({"gate"}),
    "wrt": frozenset({"inputs"}),
    "inputs": frozenset({"query"}),
    "selected_heads": 1,
    "selected_queries": 1,
}


def device():
    return Device(torch.device("cpu"), "test", 2**34, Roofline(RATES))


def request(made=RawForwardRequest, length=8, **more):
    x = np.ones((1, 2, length, 4), np.float32)
    return made(query=x, key=x, value=x, **more)


@pytest.mark.parametrize("name", [each.name for each in fields(Workload)])
def test_whatever_differs_makes_another_key(name):
    before = getattr(WORK, name)
    other = OTHER[name] if name in OTHER else not before if isinstance(before, bool) else (before or 0) + 1
    assert replace(WORK, **{name: other}).key != WORK.key
    assert replace(WORK, **{name: before}).key == WORK.key


@pytest.mark.parametrize(
    "change", [{"d_model": 16}, {"key_width": 3}, {"value_width": 3}, {"biases": Biases(q_proj=True)}]
)
def test_other_widths_of_a_module_make_another_key(change):
    assert replace(WORK, sizes=replace(WORK.sizes, **change)).key != WORK.key


def test_equal_requests_are_planned_once(monkeypatch):
    here, made = device(), []
    plan = forward.plan_forward
    monkeypatch.setattr(forward, "plan_forward", lambda *args: made.append(1) or plan(*args))
    first = forward.prepare(None, request(), here, ROOM).plan
    assert forward.prepare(None, request(), here, ROOM).plan is first
    assert len(made) == 1
    for other in (request(length=9), request(kernel="materialized"), request(**{"return": ["weights"]})):
        assert forward.prepare(None, other, here, ROOM).plan != first
    assert forward.prepare(None, request(), here, ROOM // 2).plan == first
    assert len(made) == 5


def test_gradients_are_planned_by_what_is_wanted_of_them():
    here = device()
    plain = gradients.prepare(None, request(RawGradientsRequest, wrt=["query"]), here, ROOM).plan
    again = gradients.prepare(None, request(RawGradientsRequest, wrt=["query"]), here, ROOM).plan
    assert again is plain
    for more in ({"wrt": ["weights"]}, {"wrt": ["query"], "check": True}):
        assert gradients.prepare(None, request(RawGradientsRequest, **more), here, ROOM).plan != plain


def test_another_clock_plans_anew():
    here = device()
    before = forward.prepare(None, request(), here, ROOM).plan
    here.clock = Roofline(replace(RATES, overhead_s=1.0))
    after = forward.prepare(None, request(), here, ROOM).plan
    assert after.predicted.median > 1 > before.predicted.median


def test_a_refusal_is_not_remembered():
    here = device()
    for _ in range(2):
        with pytest.raises(AttentionError):
            forward.prepare(None, request(kernel="fused", spec=AttentionSpec(softcap=3.0)), here, ROOM)
    assert len(here.plans) == 0


def test_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(plans, "MOST", 3)
    kept, clock = Plans(), Roofline(RATES)
    for key in (1, 2, 3, 1, 4):
        kept.get(clock, key, lambda key=key: f"plan {key}")
    assert len(kept) == 3
    assert kept.get(clock, 1, lambda: "anew") == "plan 1"
    assert kept.get(clock, 2, lambda: "anew") == "anew"


def test_what_was_planned_by_a_clock_that_no_longer_holds_is_not_remembered():
    """As when another thread sets one."""
    known, first, second = Plans(), Roofline(RATES), Roofline(RATES)

    def make():
        known.get(second, "other", lambda: "by the second")
        return "by the first"

    assert known.get(first, "plan", make) == "by the first"
    assert known.get(second, "plan", lambda: "anew") == "anew"
    assert known.get(second, "other", lambda: "anew") == "by the second"
