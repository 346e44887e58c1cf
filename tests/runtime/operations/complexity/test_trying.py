"""Crossovers found by running: the search against ratios that are known, and runs against passes of known length."""

import asyncio
from dataclasses import replace
from math import sqrt
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attention_contract.schemas.costs.complexity import ComplexityRequest, RawComplexityRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.cost import Estimate, Rates, Roofline
from attention_service.modules.resident import Module, complete
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.complexity import measured_crossover, report, tried
from attention_service.runtime.operations.complexity.measured_crossover import plainest
from attention_service.runtime.operations.complexity.subjects import DeviceMemory, RequestedSubjects
from attention_service.runtime.scheduling.budget import Budget

FREE_BYTES = 2**30


class KnownTimes(Roofline):
    """Says that fused attention takes a microsecond a token, and the others what they take at 500 tokens."""

    def predict(self, counts, itemsize, kind):
        tokens = sqrt(counts.products / 64) if "fused" in kind else 500  # two heads, 8 wide
        return Estimate.within(1e-6 * tokens, 1.2)


class Slow(KnownTimes):
    """A thousand times as long."""

    def predict(self, counts, itemsize, kind):
        return Estimate.within(1000 * super().predict(counts, itemsize, kind).median, 1.2)


DEVICE = Device(torch.device("cpu"), "a cpu", 2**40, KnownTimes(Rates(1e11, 1e10, 1e-5)))
PLACE = DeviceMemory(DEVICE, FREE_BYTES, FREE_BYTES)
OTHER = {"label": "other", "kernel": "materialized"}


def raw(**fields):
    given = {"shape": {"queries": 64}, "num_heads": 2, "head_dim": 8, "kernel": "fused", "compare": [OTHER]}
    return RawComplexityRequest.model_validate(given | fields)


def search(ratio, near, searched=(1, 2**20)):
    async def known(size):
        return ratio(size)

    return asyncio.run(measured_crossover.crossing(known, near, searched))


def answered(request, module=None, budget=None, place=PLACE):
    """The reply, how much was held while something ran, and what was run."""
    budget = budget or Budget(FREE_BYTES, FREE_BYTES, lambda: 0, 4)
    held = []

    async def run(work):
        held.append(budget.in_flight)
        return work()

    reply = report(module, request, place)
    reply = asyncio.run(tried(reply, module, request, place, run, budget))
    assert budget.in_flight == 0
    return reply, held


def times(reply):
    return {found.between: found.measured for found in reply.crossovers if found.of == "time"}


# ── the search ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("slope", [-2.0, -0.3, 0.5])
@pytest.mark.parametrize("near", [700, 1000, 1500])
def test_it_is_where_the_ratio_passes_one(slope, near):
    rng = np.random.default_rng(near)
    found = search(lambda size: (size / 1000) ** slope * np.exp(rng.normal(0, 0.01)), near)
    assert found == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize(
    "ratio",
    [lambda _: 1.0, lambda _: 2.0, lambda size: size / 1e5, lambda size: 3 + 1e-9 * size],
    ids=["one", "two", "far", "level"],
)
def test_there_is_none_where_the_ratio_does_not_pass_one_near_there(ratio):
    with np.errstate(all="raise"):
        assert search(ratio, 1000) is None


def test_a_place_that_noise_decides_is_not_reported():
    """Ratios that hardly fall, and lie about the line by more than they fall."""
    rng = np.random.default_rng(3)
    noisy = [search(lambda size: (size / 1000) ** -0.05 * np.exp(rng.normal(0, 0.05)), 1000) for _ in range(20)]
    assert sum(found is None for found in noisy) >= 18
    steep = [search(lambda size: (size / 1000) ** -1 * np.exp(rng.normal(0, 0.05)), 1000) for _ in range(20)]
    assert all(found == pytest.approx(1000, rel=0.2) for found in steep)


# ── the runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_runs_that_take_a_known_time_cross_where_they_do(monkeypatch):
    """Predicted at 500 tokens; in truth, fused takes as long as the other at 400."""
    now = [0.0]

    def prepare(module, request, device, free_bytes):
        seconds = 1e-5 * (request.query.shape[-2] if request.kernel == "fused" else 400)
        return SimpleNamespace(run=lambda: now.append(now.pop() + seconds))

    monkeypatch.setattr(measured_crossover, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(measured_crossover.forward, "prepare", prepare)
    reply, _ = answered(raw())
    (found,) = (found for found in reply.crossovers if found.of == "time")
    assert found.at == pytest.approx(500, rel=0.02)
    assert found.measured == pytest.approx(400, rel=0.1)
    assert {each.measured for each in reply.crossovers if each.of != "time"} == {None}


@pytest.mark.slow
def test_everything_is_run_as_a_request_would_be_and_its_memory_is_admitted(monkeypatch):
    """Both are run, at sizes around the predicted one, with kernel, taps, dtype and projections as they are told."""
    ran = []
    real = measured_crossover.forward.prepare

    def prepare(module, request, device, free_bytes):
        job = real(module, request, device, free_bytes)
        ran.append((module, request, job))
        return job

    monkeypatch.setattr(measured_crossover.forward, "prepare", prepare)
    monkeypatch.setattr(measured_crossover, "_ENOUGH_S", 0.0)
    config = complete(ModuleConfig(d_model=16, num_heads=2, key_width=12, value_width=10, dtype="float64"))
    module = Module.of("m", config, initial_parameters(Sizes.of(config), 0, torch.float64))
    given = {"shape": {"batch": 2, "queries": 64, "past": 3}, "kernel": "fused", "return": ["output", "context"]}
    request = ComplexityRequest.model_validate(given | {"compare": [OTHER | {"num_heads": 4}]})
    _, held = answered(request, module)
    assert {job.plan.kernel for _, _, job in ran} == {"fused", "materialized"}
    assert {len(request.query) for _, request, _ in ran} == {2}
    assert {(made.sizes.heads, made.sizes.key_width, made.sizes.value_width) for made, _, _ in ran} == {
        (2, 12, 10),
        (4, 12, 10),
    }
    lengths = [request.query.shape[1] for _, request, _ in ran]
    assert max(lengths) > 1.5**2 * min(lengths)
    for made, request, job in ran:
        assert request.past_key.shape[2] == 3
        assert job.prepared.dtype == "float64"
        assert set(job.run()) == {"output", "context", "present_key", "present_value"}
        tensors = [request.query, request.key, request.value, *made.parameters.values()]
        assert max(held) >= sum(tensor.nbytes for tensor in tensors) + job.plan.peak_bytes


@pytest.mark.slow
def test_what_cannot_be_tried_is_left_untried(monkeypatch):
    """Another device, more memory than there is, sizes other than tokens, and what takes too long."""
    monkeypatch.setattr(measured_crossover.forward, "prepare", lambda *_: pytest.fail("it was run"))
    elsewhere = raw(hardware="H100 SXM", compare=[{"label": "here"}, {"kernel": "blocked"}], dtype="bfloat16")
    widths = raw(sweep={"dimension": "head_dim", "values": [8, 500, 1000]})
    for request in (elsewhere, widths):
        reply, _ = answered(request)
        assert set(times(reply).values()) == {None}
    small = Budget(2**16, 2**16, lambda: 0, 4)
    assert set(times(answered(raw(), budget=small)[0]).values()) == {None}
    slow = DeviceMemory(replace(DEVICE, clock=Slow(DEVICE.clock.rates)), FREE_BYTES, FREE_BYTES)
    assert set(times(answered(raw(), place=slow)[0]).values()) == {None}


def test_a_drawn_module_runs_by_its_own_spec():
    """Also where another of the same sizes was run before it."""
    device = replace(DEVICE)
    for spec in ({"qk_norm": {}}, {}, {"masks": [{"name": "causal"}]}):
        config = complete(ModuleConfig(d_model=16, num_heads=2, spec=spec))
        module = Module.of("m", config, initial_parameters(Sizes.of(config), 0, torch.float32))
        complexity = ComplexityRequest.model_validate({"shape": {"queries": 64}})
        bound = RequestedSubjects(module, complexity, DeviceMemory(device, FREE_BYTES, FREE_BYTES)).subject.at(
            "length", 8
        )
        made, request = plainest("materialized", bound, {"output"})
        found = measured_crossover.forward.prepare(made, request, device, FREE_BYTES).run()["output"]
        alone = measured_crossover.forward.prepare(made, request, replace(DEVICE), FREE_BYTES).run()["output"]
        np.testing.assert_array_equal(found, alone)
