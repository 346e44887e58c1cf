"""A past that a request brings: copied only when its pages are admitted, beside the event loop."""

import threading

import numpy as np
import pytest
from tests.runtime.sessions.session_tree import create, running

from attention_contract.errors import OverBudget
from attention_contract.schemas.sessions import OpenSession, ReplaceCache
from attention_contract.validation import validate
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.sessions import page_budget, step

_TOKENS = 3000
"""More than are copied at a time."""


@pytest.fixture
async def engine(tmp_path):
    """An engine with a module ``m`` in float32."""
    async with running(tmp_path) as engine:
        await create(engine, "m", {"masks": [{"name": "causal"}]}, dtype="float32")
        yield engine


@pytest.fixture
def noted(monkeypatch):
    """Each reservation of pages, and each copy of a past with the thread that made it, in their order."""
    found = []
    reserve, to_device = page_budget.PageBudget.reserve, step.to_device

    def reserving(self, *about):
        reserve(self, *about)
        if about[1]:
            found.append("reserved")

    def copying(*about):
        found.append(threading.current_thread().name)
        return to_device(*about)

    monkeypatch.setattr(page_budget.PageBudget, "reserve", reserving)
    monkeypatch.setattr(step, "to_device", copying)
    return found


def past_of(engine):
    """Keys and values of a past, in another dtype than the module's."""
    sizes = engine.library.get("m").sizes
    rng = np.random.default_rng(0)
    widths = {"past_key": sizes.head_dim, "past_value": sizes.value_dim}
    return {name: rng.standard_normal((1, sizes.kv_heads, _TOKENS, width)) for name, width in widths.items()}


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
async def test_it_is_copied_after_its_pages_are_reserved_and_on_the_lane_of_a_gpu(
    engine, noted, monkeypatch, on_gpu, replaced
):
    past = past_of(engine)
    monkeypatch.setattr(engine.device, "is_cuda", on_gpu)
    monkeypatch.setattr(Device, "await_parameters", lambda self: None)
    if replaced:
        ident = (await engine.sessions.open("m", OpenSession())).session
        noted.clear()
        await engine.sessions.replace_cache(ident, validate(ReplaceCache, past))
    else:
        ident = (await engine.sessions.open("m", validate(OpenSession, past))).session
    first = next(index for index, what in enumerate(noted) if what != "reserved")
    assert "reserved" in noted[:first]
    assert len(noted[first:]) == 2 * -(-_TOKENS // 1024)
    assert {name.rpartition("_")[0] for name in noted[first:]} == {
        "attention-cpu-long" if on_gpu else "attention-store"
    }
    held = await engine.sessions.cache(ident)
    for name, given in past.items():
        np.testing.assert_array_equal(getattr(held, name), given.astype(np.float32))


async def test_one_that_does_not_fit_is_not_copied_at_all(engine, noted, monkeypatch):
    monkeypatch.setattr(engine.sessions._page_budget, "limit", 2**10)
    with pytest.raises(OverBudget):
        await engine.sessions.open("m", validate(OpenSession, past_of(engine)))
    assert not noted
