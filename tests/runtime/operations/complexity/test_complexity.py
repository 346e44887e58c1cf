"""What fits, what is cheaper from where on, and what-if sizes: held against plain search on the same estimates."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from attention_contract.errors import InvalidRequest, KernelUnsuitable
from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.costs.complexity import ComplexityRequest, RawComplexityRequest
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_service.core.multihead import Sizes, initial_parameters, parameter_shapes
from attention_service.cost import Rates, Roofline, executed_flops, flops
from attention_service.modules.resident import Module, complete
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import forward, gradients
from attention_service.runtime.operations.complexity import report
from attention_service.runtime.operations.complexity.crossovers import lattice
from attention_service.runtime.operations.complexity.shape_cost import cost_of
from attention_service.runtime.operations.complexity.subjects import DeviceMemory, RequestedSubjects
from attention_service.runtime.planning.blank_requests import decode_step

DEVICE = Device(torch.device("cpu"), "a cpu", 2**40, Roofline(Rates(1e11, 1e10, 1e-5)))
WINDOW = {"masks": [{"name": "sliding_window", "left": 32, "right": 32}]}
KERNELS = ("fused", "blocked", "materialized")


def place(free=2**26):
    return DeviceMemory(DEVICE, free, free)


def raw(**fields):
    return RawComplexityRequest.model_validate({"shape": {"queries": 64}, "num_heads": 8, "head_dim": 16} | fields)


def ask(free=2**26, module=None, **fields):
    request = raw(**fields) if module is None else ComplexityRequest.model_validate({"shape": {"queries": 64}} | fields)
    return report(module, request, place(free))


def module(**fields):
    config = complete(ModuleConfig(**{"d_model": 64, "num_heads": 8} | fields))
    return Module.of("m", config, initial_parameters(Sizes.of(config), 0, torch.float32))


def refused(**fields):
    with pytest.raises(InvalidRequest) as caught:
        ask(**fields)
    return caught.value.param


@pytest.mark.sampled(widths=2)
@pytest.mark.parametrize(
    "widths", [{"key_width": 12}, {"value_width": 10}, {"key_width": 12, "value_width": 12}], ids=str
)
def test_keys_and_values_that_are_no_queries_come_beside_them(widths):
    """Where a module's widths differ, its tokens alone are no request: the cost is that of one that can be."""
    of = module(**widths)
    found = ask(module=of).costs[0].peak_bytes
    query, key, value = of.sizes.inputs
    sent = {"query": query} | ({"key": key} if key != query else {}) | ({"value": value} if value != key else {})
    x = {name: np.zeros((1, 64, width), np.float32) for name, width in sent.items()}
    job = forward.prepare(of, ForwardRequest(**x), DEVICE.exact(), 2**26)
    assert found.request == job.plan.peak_bytes
    wanted = gradients.prepare(of, GradientsRequest(**x, wrt=[*x, "parameters"]), DEVICE.exact(), 2**26)
    assert found.gradients == wanted.plan.peak_bytes


# ── what-if sizes ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.sampled(dimension=1, value=1, config=1)
@pytest.mark.parametrize(
    ("dimension", "value", "config"),
    [
        ("d_model", 128, {"d_model": 128}),
        ("d_model", 96, {"d_model": 96, "head_dim": None}),
        ("num_heads", 4, {"num_heads": 4, "head_dim": None}),
        ("num_kv_heads", 2, {"num_kv_heads": 2}),
        ("head_dim", 24, {"head_dim": 24}),
        ("value_dim", 5, {"value_dim": 5}),
    ],
)
def test_a_modules_what_if_costs_what_a_module_of_those_sizes_does(dimension, value, config):
    same = {"dimension": dimension, "values": [value, value * 2]}
    supposed = ask(module=module(), sweep=same).costs[0]
    real = ask(module=module(**config)).costs[0]
    assert supposed.parameter_bytes == real.parameter_bytes
    assert supposed == real


def test_the_base_keeps_its_own_parameters_through_a_sweep_of_lengths():
    sizes = Sizes.of(module().config)
    costs = ask(module=module(), sweep={"values": [8, 16]}).costs
    count = sum(torch.empty(shape, device="meta").numel() for shape in parameter_shapes(sizes).values())
    assert {cost.parameter_bytes for cost in costs} == {4 * count}
    assert costs[0].input_bytes == 8 * 64 * 4, "self-attention: the query alone"


def test_queries_and_keys_are_varied_one_without_the_other():
    for dimension, other in (("queries", "keys"), ("keys", "queries")):
        costs = ask(module=module(), sweep={"dimension": dimension, "values": [64, 96]}).costs
        assert [getattr(cost.shape, dimension) for cost in costs] == [64, 96]
        assert {getattr(cost.shape, other) for cost in costs} == {64}
        assert costs[0].input_bytes == 64 * 64 * 4
        assert costs[1].input_bytes == (64 + 2 * 96 if dimension == "keys" else 96 + 2 * 64) * 64 * 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sweep": {"dimension": "num_kv_heads", "values": [4, 3]}}, "sweep.values.1"),
        ({"sweep": {"dimension": "num_heads", "values": [0, 3]}}, "sweep.values.0"),
        ({"sweep": {"dimension": "d_model", "values": [4, 3]}}, "sweep.values.0"),
        ({"sweep": {"dimension": "d_model", "values": [64, 65]}, "module": module()}, "sweep.values.1"),
        (
            {"sweep": {"dimension": "head_dim", "values": [8, 7]}, "spec": {"position": {"name": "rope"}}},
            "sweep.values.1",
        ),
        ({"sweep": {"dimension": "num_kv_heads", "values": [8, 8]}}, "sweep.values"),
        ({"compare": [{"label": "a"}, {"label": "a"}]}, "compare.1.label"),
        ({"compare": [{"return": ["lse"], "spec": {"normalizer": {"name": "sigmoid"}}}]}, "compare.0.return.0"),
        ({"hardware": "Abacus"}, "hardware"),
        ({"hardware": "T4", "dtype": "bfloat16"}, "hardware"),
    ],
)
def test_what_cannot_be_is_refused_and_named(fields, param):
    assert refused(**fields) == param


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_spec_may_end_before_memory_does():
    spec = {"position": {"name": "learned", "length": 100}}
    found = ask(module=module(spec=spec), shape={"queries": 10, "past": 7}).limits.forward.longest
    assert (found.size, found.bound) == (93, "spec")


def test_a_kernel_that_another_device_refuses_is_refused_for_it():
    assert ask(dtype="float64", kernel="fused").limits.forward.longest.kernel == "fused"
    with pytest.raises(KernelUnsuitable, match="GPU"):
        ask(hardware="H100 SXM", dtype="float64", kernel="fused")


# ── crossovers ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_flops_cross_where_the_formula_says():
    """A window leaves out tiles from the length on at which there are tiles to leave out."""
    reply = ask(compare=[{"label": "window", "spec": WINDOW, "kernel": "blocked"}], kernel="blocked")
    by = {found.of: found for found in reply.crossovers}
    subjects = (
        RequestedSubjects(None, raw(), place()).subject,
        RequestedSubjects(None, raw(spec=WINDOW), place()).subject,
    )

    def counts(length):
        return [executed_flops(subject.at("length", length), "blocked") for subject in subjects]

    found = by["flops"]
    assert found.cheaper == "window"
    dense, narrow = counts(found.at)
    assert narrow < dense
    before = lattice("length", [64])
    dense, narrow = counts(before[before.index(found.at) - 1])
    assert narrow >= dense


def test_attention_and_projections_cross_at_twice_the_width():
    for width in (64, 256):
        of = module(d_model=width, num_heads=8)
        found = ask(module=of).projections_crossover
        assert found == 2 * width
        work = RequestedSubjects(
            of, ComplexityRequest.model_validate({"shape": {"queries": found}}), place()
        ).subject.base
        stages = flops(work, masked=False)
        assert stages.scores + stages.values == stages.projections + stages.output_projection
    assert ask().projections_crossover is None


@pytest.mark.slow
def test_time_has_an_interval_around_its_crossover():
    """Two clocks' worth: a window is faster from some length on, perhaps from before it, surely from after it."""
    request = raw(compare=[{"label": "window", "spec": WINDOW}], sweep={"values": [64, 2**16]})
    sure = replace(DEVICE, clock=Roofline(DEVICE.clock.rates, factor=1.0))
    vague = replace(DEVICE, clock=Roofline(DEVICE.clock.rates, factor=1.5))
    exact, wide = (
        next(
            found
            for found in report(None, request, DeviceMemory(device, 2**30, 2**30)).crossovers
            if found.of == "time"
        )
        for device in (sure, vague)
    )
    assert exact.cheaper == wide.cheaper == "window"
    assert exact.at == wide.at == exact.low == exact.high
    assert (wide.low or 1) < wide.at <= wide.high
    subjects = (
        RequestedSubjects(None, raw(), place()).subject,
        RequestedSubjects(None, raw(spec=WINDOW), place()).subject,
    )

    def faster(length):
        dense, narrow = (
            subject.time(subject.forward(bound, kernel), bound, kernel).median
            for subject in subjects
            for bound in [subject.at("length", length)]
            for kernel in [subject.kernel_of(bound)]
        )
        return narrow < dense

    assert faster(wide.at)
    assert not faster(round(wide.at * 0.97))
    assert all(faster(length) for length in (wide.high, 2**14, 2**18))


def test_equal_costs_have_no_crossover_and_a_width_is_looked_at_on_request():
    reply = ask(compare=[{"label": "same"}], sweep={"dimension": "head_dim", "values": [16, 8, 64]})
    assert [(found.cheaper, found.at, found.searched) for found in reply.crossovers] == [(None, None, (8, 64))] * 3
    assert [found.of for found in reply.crossovers] == ["time", "peak_bytes", "flops"]


def test_one_that_costs_less_throughout_has_no_place_where_it_begins():
    reply = ask(compare=[{"num_kv_heads": 1}], kernel="materialized")
    memory = next(found for found in reply.crossovers if found.of == "peak_bytes")
    assert (memory.cheaper, memory.at, memory.searched) == ("num_kv_heads 1", None, (1, 2**20))


@pytest.mark.slow
def test_each_two_are_compared_and_each_is_reported_as_if_alone():
    others = [
        {"label": "grouped", "num_kv_heads": 2},
        {"label": "w", "spec": WINDOW},
    ]
    reply = ask(compare=others, sweep={"values": [64, 128]})
    assert len(reply.crossovers) == 3 * 3
    assert [one.label for one in reply.compared] == ["request", "grouped", "w"]
    for one, fields in zip(reply.compared[1:], others, strict=True):
        alone = ask(sweep={"values": [64, 128]}, **{name: value for name, value in fields.items() if name != "label"})
        assert (one.costs, one.growth, one.limits) == (alone.costs, alone.growth, alone.limits)


# ── times ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_predicted_times_are_the_clocks():
    subjects = RequestedSubjects(None, raw(shape={"queries": 64, "past": 3}), place())
    subject = subjects.subject
    bound, cost, step = subject.base, cost_of(subject, subject.base), decode_step(subject.base)
    forward, gradients = subject.kernel_of(bound), subject.kernel_of(bound, "gradients")
    for stated, found, kind in (
        (cost.predicted.forward, subject.forward(bound, forward), f"forward {forward} float32"),
        (cost.predicted.gradients, subject.gradients(bound, gradients), f"gradients {gradients} float32"),
        (cost.predicted.decode, subject.forward(step, subject.kernel_of(step)), f"forward {forward} float32"),
    ):
        estimate = DEVICE.clock.predict(found.total(), 4, kind)
        assert (stated.low_ms, stated.median_ms, stated.high_ms) == pytest.approx(
            (estimate.low * 1e3, estimate.median * 1e3, estimate.high * 1e3)
        )
    assert cost.predicted_ms == cost.predicted.forward.median_ms
    assert cost.per_token.flops * 64 == cost.executed_flops
    assert cost.per_token.predicted_ms * 64 == pytest.approx(cost.predicted_ms)


def test_time_grows_as_the_clock_says():
    grown = ask(sweep={"values": [2**14, 2**15]}).growth
    assert grown.time_exponent == pytest.approx(2, abs=0.06)


SWEPT = {"sweep": {"values": [16, 32, 64]}, "compare": [{"kernel": kernel} for kernel in KERNELS[:2]]}


@pytest.fixture(scope="module")
def whole():
    """The answer without a limit of time."""
    return ask(**SWEPT)


def test_in_time_nothing_is_left_out(whole):
    assert whole.omitted is None
    assert report(None, raw(**SWEPT), place(), until=time.monotonic() + 1e6) == whole


@pytest.mark.parametrize("checks", [0, 1, 3, 5, 8, 10])
def test_what_is_known_when_the_time_is_over_is_part_of_the_whole_answer(monkeypatch, checks, whole):
    """A clock that passes the limit after some looks at it, wherever that is."""
    looks = iter([0.0] * checks)
    monkeypatch.setattr(time, "monotonic", lambda: next(looks, 2.0))
    found = report(None, raw(**SWEPT), place(), until=1.0)
    omitted = found.omitted or []
    assert found.costs == whole.costs[: len(found.costs)]
    assert ("costs" in omitted) == (len(found.costs) < 3)
    series = found.series
    assert [each.label for each in series[1:]] == [each.label for each in whole.series[1 : len(series)]]
    assert all(len(each.costs) == len(found.costs) for each in series)
    if "costs" not in omitted:
        assert [each.costs for each in series] == [each.costs for each in whole.series[: len(series)]]
        assert ("compared" in omitted) == (len(series) < 3)
        assert all(each in whole.crossovers for each in found.crossovers)
    assert bool(found.omitted) == (found != whole)
