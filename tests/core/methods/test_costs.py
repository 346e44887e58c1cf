"""What methods say that they cost, against PyTorch's FLOP counter on the meta device and its profiler on the CPU."""

from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
from tests.cost.peaks import Request, peaks
from torch.utils.flop_counter import FlopCounterMode

from attention_contract import spec
from attention_contract.schemas.modules import Biases
from attention_contract.spec import AttentionSpec
from attention_service.core.multihead import Sizes
from attention_service.cost import (
    Rates,
    Roofline,
    Workload,
    backward_flops,
    exactly,
    flops,
    gradient_peak_bytes,
    growth,
    moved_bytes,
    parameter_count,
    peak_bytes,
    predicted_seconds,
)
from attention_service.cost.gradient_memory import names_of

BIASES = Biases(q_proj=True, k_proj=True, v_proj=True, o_proj=True)
CAUSAL = [spec.Causal()]
STATE = frozenset({"initial_state", "initial_normalizer", "return_state"})
METHODS = {
    "linear": AttentionSpec(method=spec.Linear()),
    "linear, causal": AttentionSpec(method=spec.Linear(), masks=CAUSAL),
    "not normalized": AttentionSpec(method=spec.Linear(features="identity"), masks=CAUSAL),
    "gated": AttentionSpec(method=spec.Linear(rule="gated"), masks=CAUSAL),
    "delta": AttentionSpec(method=spec.Linear(rule="delta"), masks=CAUSAL),
    "gated delta": AttentionSpec(method=spec.Linear(rule="gated_delta"), masks=CAUSAL),
    "performer": AttentionSpec(method=spec.Performer()),
    "performer, causal": AttentionSpec(method=spec.Performer(), masks=CAUSAL),
    "linformer": AttentionSpec(method=spec.Linformer(rank=64, length=4096)),
    "linformer, shared": AttentionSpec(method=spec.Linformer(rank=16, length=4096, shared=True)),
    "nystrom": AttentionSpec(method=spec.Nystrom(landmarks=64)),
    "nystrom, few": AttentionSpec(method=spec.Nystrom(landmarks=16, iterations=2)),
}


def raw(name, *, batch=2, queries=1024, keys=1024, heads=4, kv_heads=4, head_dim=32, value_dim=32, itemsize=4, **more):
    described = more.pop("spec", METHODS.get(name))
    sent = set(more.pop("sent", ()))
    method = described.method
    if method.name == "linear":
        sent |= ({"gate"} if "gated" in method.rule else set()) | ({"beta"} if "delta" in method.rule else set())
        sent -= set() if method.normalized else {"initial_normalizer"}
    more |= {"spec": described, "sent": frozenset(sent), "threads": 1}
    return Workload(batch, queries, keys, heads, kv_heads, head_dim, value_dim, itemsize, **more)


def module(name, width=128, heads=4, kv_heads=4, **more):
    head = width // heads
    sizes = Sizes(width, heads, kv_heads, head, head, width, width, BIASES, METHODS[name])
    work = raw(name, heads=heads, kv_heads=kv_heads, head_dim=head, value_dim=head, **more)
    return replace(work, sizes=sizes, inputs=frozenset({"query"}), sent=work.sent - {"gate", "beta"})


# ── FLOPs ────────────────────────────────────────────────────────────────────────────────────────────────────────────

SHAPES = {
    "square": {"queries": 300, "keys": 300},
    "more keys": {"queries": 100, "keys": 300, "kv_heads": 2},
    "more queries": {"queries": 300, "keys": 100},
    "decode": {"queries": 1, "keys": 200, "past": 199, "kv_heads": 1},
    "chunk": {"queries": 130, "keys": 400, "past": 270, "value_dim": 20},
    "one token": {"queries": 1, "keys": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_matrix_products_are_what_pytorch_counts(name, shape):
    sizes = SHAPES[shape]
    if raw(name).sent and "past" in sizes:
        sizes = {**sizes, "past": 0}  # the gates of a past are not known
    works = [raw(name, **sizes)]
    if "value_dim" not in sizes and sizes["queries"] == sizes["keys"] - sizes.get("past", 0):
        works.append(module(name, **{"kv_heads": 2} | sizes))
    if name != "linear" and METHODS[name].method.name == "linear":
        works.append(raw(name, sent=STATE - {"return_state"}, **sizes))
    for work in works:
        request = Request(work)
        with FlopCounterMode(display=False) as forward:
            request.forward("materialized")
        assert flops(work, masked=False).matmul == forward.get_total_flops()
        with FlopCounterMode(display=False) as both:
            request.backward("materialized")
        backward = both.get_total_flops() - forward.get_total_flops()
        assert backward_flops(work, masked=False, fused=False).matmul == backward


def test_a_gate_for_each_feature_is_counted_too():
    work = raw("gated", queries=100, keys=100, fine_gate=True)
    with FlopCounterMode(display=False) as counted:
        Request(work).forward("materialized")
    assert flops(work, masked=False).matmul == counted.get_total_flops()
    assert flops(work, masked=False).normalizer > flops(replace(work, fine_gate=False), masked=False).normalizer


def test_elementwise_work_by_its_definition():
    """One head, 2 tokens of width 1: elu + 1 (3 each, of 2 queries and 2 keys), a pair zeroed or not (4), 2 columns."""
    work = raw("linear, causal", batch=1, queries=2, keys=2, heads=1, kv_heads=1, head_dim=1, value_dim=1)
    stages = flops(work, masked=False)
    assert stages.normalizer == 3 * 4 + 4 + 2 * 2
    assert stages.scores == 2 * 4
    assert stages.values == 2 * 4 * 2  # one chunk: no state is read or left
    assert stages.total == stages.matmul + stages.normalizer


@pytest.mark.parametrize("name", METHODS)
def test_cost_grows_with_the_length_and_not_with_its_square(name):
    work = raw(name, queries=2**16, keys=2**16)
    found = growth(work, "length", [2**16, 2**18], name, Roofline(Rates(1e12, 1e11, 1e-5)))
    limit = 1.03 if METHODS[name].method.name != "nystrom" else 1.05
    assert 0.95 < found.flops_exponent < limit
    assert 0.95 < found.peak_bytes_exponent < limit
    assert found.time_order.startswith("O(n·")
    assert "n²" not in found.memory_order
    exact = exactly(work)
    assert flops(work, masked=False).total < flops(exact, masked=False).total / 10
    assert peak_bytes(work, name) < peak_bytes(exact, "materialized") / 10


@pytest.mark.parametrize("name", METHODS)
def test_sizes_beyond_any_machine_are_counted_all_the_same(name):
    work = raw(name, queries=2**31 - 1, keys=2**31 - 1)
    assert flops(work, masked=False).total > 2**40
    assert peak_bytes(work, name) > 2**35
    assert gradient_peak_bytes(work, name) > peak_bytes(work, name)


def test_a_report_of_the_error_costs_exact_attention_besides():
    rates = Rates(1e9, 1e9, 1e-5)
    work = raw("performer, causal")
    told = replace(work, reported=True)
    assert peak_bytes(told, "performer") > peak_bytes(work, "performer")
    more = predicted_seconds(told, "performer", rates) - predicted_seconds(work, "performer", rates)
    assert more >= predicted_seconds(exactly(work), "materialized", rates)
    longer = raw("performer, causal", queries=2**14, keys=2**14, reported=True)
    assert peak_bytes(longer, "performer") < peak_bytes(exactly(longer), "materialized") / 5  # it goes block by block


def test_directions_are_drawn_in_memory_that_is_counted():
    described = AttentionSpec(method=spec.Performer(features=2**14))
    work = raw("", spec=described, queries=1, keys=1, head_dim=64, value_dim=1)
    assert peak_bytes(work, "performer") > 4 * 8 * 2**14 * 64


def test_what_a_module_learns_is_counted():
    assert parameter_count(module("gated delta")) == 4 * (128 * 128 + 128) + 2 * (4 * 128 + 4)
    assert parameter_count(module("linformer")) == 4 * (128 * 128 + 128) + 2 * 64 * 4096
    assert parameter_count(raw("linformer, shared")) == 16 * 4096


@pytest.mark.parametrize("name", METHODS)
def test_traffic_covers_what_comes_and_goes(name):
    work = raw(name)
    everything = 4 * 2 * 4 * 1024 * 32 * 4
    assert everything < moved_bytes(work, name) < 60 * everything


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────

VARIED = {
    "raw": {},
    "short": {"queries": 256, "keys": 256},
    "grouped": {"kv_heads": 1},
    "bfloat16": {"itemsize": 2},
    "float64": {"itemsize": 8, "queries": 512, "keys": 512},
    "padded": {"padded": True},
    "cross": {"queries": 64, "keys": 700},
    "wide values": {"value_dim": 48},
}
WORKLOADS = {f"{name}: {varied}": raw(name, **VARIED[varied]) for name, varied in product(METHODS, VARIED)}
WORKLOADS |= {f"{name}: module": module(name, heads=4, kv_heads=2) for name in METHODS}
WORKLOADS |= {f"{name}: chunk": raw(name, queries=128, keys=640, past=512) for name in METHODS if not raw(name).sent}
WORKLOADS |= {
    "linear: state": raw("linear, causal", sent=STATE),
    "gated: by feature": raw("gated", fine_gate=True),
    "delta: state": raw("delta", sent=STATE),
    "performer: bilinear": raw("", spec=AttentionSpec(method=spec.Performer(features=64), score=spec.Bilinear())),
    "nystrom: every token": raw("nystrom", queries=64, keys=64),
}


OFTEN = [f"{name}: {each}" for name in METHODS for each in ("raw", "short", "module", "bfloat16")]


QUICK = {f"{name}: short" for name in METHODS} | {"linear: state", "gated: by feature", "linformer: module"}


def each(names):
    """The workloads of these names, as parameters of a test; all but a few are a long walk."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture
def measured(name):
    """The most bytes that each pass held at a time, over this workload and others."""
    return _measured(name in QUICK)


@cache
def _measured(quick):
    """One profile of all of them: to start one takes long."""
    passes = {}
    for name, work in WORKLOADS.items():
        if (name in QUICK) != quick:
            continue
        request, kernel = Request(work), work.spec.method.name
        passes["forward", name] = partial(request.forward, kernel)
        passes["backward", name] = partial(request.backward, kernel)
        if name in OFTEN:
            passes["report", name] = partial(Request(replace(work, reported=True)).forward, kernel)
            passes["second", name] = partial(request.backward, kernel, twice=True)
    return dict(zip(passes, peaks([*passes.values()]), strict=True))


UNDER, OVER = 0.02, 0.05
SLACK = 2**16
"""Bytes, whatever the size."""


def assert_tight(estimate: int, actual: int) -> None:
    low, high = (1 - UNDER) * actual - SLACK, (1 + OVER) * actual + SLACK
    assert low <= estimate <= high, f"{estimate / actual:.3f} of the {actual} bytes measured"


@pytest.mark.parametrize("name", each(WORKLOADS))
def test_forward_peak_is_what_is_allocated(name, measured):
    work = WORKLOADS[name]
    assert_tight(peak_bytes(work, work.spec.method.name), measured["forward", name])


@pytest.mark.parametrize("name", each(WORKLOADS))
def test_gradient_peak_is_what_is_allocated(name, measured):
    work = WORKLOADS[name]
    assert_tight(gradient_peak_bytes(work, work.spec.method.name), measured["backward", name])


@pytest.mark.parametrize("name", each(OFTEN))
def test_a_report_of_the_error_and_gradients_of_gradients_stay_within_their_estimates(name, measured):
    work, kernel = WORKLOADS[name], WORKLOADS[name].spec.method.name
    assert_tight(peak_bytes(replace(work, reported=True), kernel), measured["report", name])
    assert_tight(gradient_peak_bytes(work, kernel, twice=True), measured["second", name])


@pytest.mark.parametrize("name", each(WORKLOADS))
def test_what_does_more_is_never_estimated_to_need_less(name):
    work = WORKLOADS[name]
    taps = frozenset({"output", "q", "k", "v", "context"})
    kernel = work.spec.method.name
    gradient, tapped = gradient_peak_bytes(work, kernel), names_of(work, taps=True)
    assert peak_bytes(work, kernel) <= peak_bytes(replace(work, taps=taps), kernel)
    assert peak_bytes(work, kernel) <= peak_bytes(replace(work, edits=(("context", "scale"),)), kernel)
    assert peak_bytes(work, kernel) <= gradient <= gradient_peak_bytes(work, kernel, tapped)
    checked = gradient_peak_bytes(work, kernel, checked=True)
    assert gradient < checked <= gradient_peak_bytes(work, kernel, tapped, checked=True)
