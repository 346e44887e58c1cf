"""The cache of plans: which entries it keeps, and for which clock."""

from attention_service.cost import Rates, Roofline
from attention_service.runtime.device import plan_cache
from attention_service.runtime.device.plan_cache import PlanCache

RATES = Rates(1e11, 1e10, 1e-5)


def test_the_least_recently_used_go_first(monkeypatch):
    monkeypatch.setattr(plan_cache, "MOST", 3)
    cache, clock = PlanCache(), Roofline(RATES)
    for key in (1, 2, 3, 1, 4):
        cache.get(clock, key, lambda key=key: f"plan {key}")
    assert len(cache) == 3
    assert cache.get(clock, 1, lambda: "anew") == "plan 1"
    assert cache.get(clock, 2, lambda: "anew") == "anew"


def test_an_entry_of_a_clock_that_was_replaced_meanwhile_is_not_kept():
    cache, first, second = PlanCache(), Roofline(RATES), Roofline(RATES)

    def make():
        cache.get(second, "other", lambda: "by the second")
        return "by the first"

    assert cache.get(first, "plan", make) == "by the first"
    assert cache.get(second, "plan", lambda: "anew") == "anew"
    assert cache.get(second, "other", lambda: "anew") == "by the second"
