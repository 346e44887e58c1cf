"""The peak estimates against what PyTorch's profiler sees allocated on the CPU, operators' own buffers included.

The walk over every registered combination, as it is served, is in ``tests.runtime.peak_walk``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
from tests.cost.peaks import DTYPES, Request, Run, peaks
from tests.cost.workloads import METHODS, STATE, approximate, module, raw

from attention_contract.positions import Alibi, QKNorm, RelativeBias, Rope
from attention_contract.spec import (
    Additive,
    AnyOf,
    AttentionSpec,
    Causal,
    Entmax15,
    GlobalTokens,
    SlidingWindow,
    Softmax,
)
from attention_service.core.kernels import unsuitable
from attention_service.cost import (
    Workload,
    gradient_peak_bytes,
    gradient_phases,
    input_bytes,
    kv_cache_bytes,
    kv_cache_bytes_per_token,
    memory_phases,
    output_bytes,
    peak_bytes,
)
from attention_service.cost.gradient_memory import names_of
from attention_service.cost.memory_phases import peak_of
from attention_service.cost.stand_ins import inputs_of, parameters_of

KERNELS = ("fused", "blocked", "materialized")
GRADIENT_TAPS = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context")
ALL_TAPS = frozenset({"output", "lse", *GRADIENT_TAPS})
UNDER, OVER = 0.02, 0.30
"""The workspace of operators is bounded, and a few blocks of the blocked kernel stand for all."""
SLACK = 2**16
"""Bytes that an estimate may be off by whatever the size: indices, flags of rows, the leftovers of a last tile."""

CAUSAL = AttentionSpec(masks=[Causal()])
WINDOW = AttentionSpec(masks=[Causal(), SlidingWindow(left=64)])
LONGFORMER = AttentionSpec(masks=[AnyOf(of=[SlidingWindow(left=32, right=32), GlobalTokens(positions=[0, 1])])])
ENTMAX_WINDOW = WINDOW.model_copy(update={"normalizer": Entmax15()})
TURNED_NORM = AttentionSpec(
    position=Rope(dim=48, style="interleaved"), qk_norm=QKNorm(over="all_heads"), masks=[Causal()]
)
TURNED_WINDOW = AttentionSpec(position=Rope(), masks=[Causal(), SlidingWindow(left=300)])
FEW_METHODS = ["linear, causal", "gated delta", "performer, causal", "linformer", "nystrom"]
QUICK = {
    "raw": raw(),
    "window": raw(spec=WINDOW),
    "bfloat16": raw(itemsize=2),
    "padded": raw(padded=True, spec=CAUSAL),
    "module": module(),
    "module, in slices": module(1024, 8, 8, batch=1, queries=560, keys=560),
    "decode": module(batch=2, queries=1, keys=2000, past=1999, spec=CAUSAL),
    "entmax15": raw(spec=AttentionSpec(normalizer=Entmax15())),
    "narrow heads, turned": module(8, 4, 4, queries=2048, keys=2048, spec=TURNED_WINDOW),
    "rope": raw(batch=1, queries=400, keys=400, spec=AttentionSpec(position=Rope())),
    "alibi": raw(spec=AttentionSpec(position=Alibi())),
    "every tap": raw(spec=WINDOW, taps=ALL_TAPS),
    "projections": module(taps=frozenset({"q", "k", "v"}), selected_heads=2),
    **{name: approximate(name, queries=256, keys=256) for name in FEW_METHODS},
    "linear: state": approximate("linear, causal", sent=STATE),
    "gated: by feature": approximate("gated", fine_gate=True, queries=512, keys=512),
}
SLOW = {
    "longformer": raw(spec=LONGFORMER),
    "offsets": raw(batch=4, spec=WINDOW, batched_offsets=True),
    "bias of heads": raw(request_mask_elements=2 * 4 * 512 * 512),
    "module, cross": module(queries=256, keys=2800, inputs=frozenset({"query", "key", "value"})),
    "module, short": module(512, 8, 8, batch=16, queries=64, keys=64, spec=AttentionSpec(position=Rope())),
    "many tiles": raw(batch=1, heads=2, kv_heads=1, queries=2048, keys=2048, spec=WINDOW),
    "many tiles, entmax15": raw(batch=1, heads=1, kv_heads=1, queries=1500, keys=1500, spec=ENTMAX_WINDOW),
    "additive": module(kv_heads=2, spec=AttentionSpec(score=Additive())),
    "sinks": module(spec=WINDOW.model_copy(update={"normalizer": Softmax(sinks=True)})),
    "dropout": raw(queries=1024, keys=1024, dropped=True),
    "added keys": raw(keys=514, spec=AttentionSpec(add_bias_kv=True, add_zero_attn=True)),
    "turned norm": module(itemsize=2, spec=TURNED_NORM),
    "relative_bias": module(spec=AttentionSpec(position=RelativeBias())),
    "selected": raw(spec=WINDOW, taps=frozenset({"weights", "masked_scores"}), selected_heads=2, selected_queries=32),
    **{f"{name}: module": module(128, kv_heads=2, spec=of) for name, of in METHODS.items()},
    **{f"{name}: cross": approximate(name, queries=64, keys=700, value_dim=48, padded=True) for name in METHODS},
}
WORKLOADS = QUICK | SLOW


@dataclass(frozen=True)
class Pass:
    """One pass over one request."""

    way: str
    kernel: str
    work: Workload
    run: Run

    @property
    def estimate(self) -> int:
        """Bytes."""
        if self.way == "forward":
            return peak_bytes(self.work, self.kernel)
        names = names_of(self.work, taps=self.way == "taps")
        phases = gradient_phases(self.work, self.kernel, names, twice=self.way == "second")
        return peak_of(tuple(phase for phase in phases if phase.name != "taps again"))  # which these do not return


def able(work: Workload) -> list[str]:
    """The kernels that compute it, or its method."""
    if work.spec.method.name != "exact":
        return [work.spec.method.name]
    return [each for each in KERNELS if not unsuitable(each, work.spec, DTYPES[work.itemsize], dropout=work.dropped)]


def passes(work: Workload) -> Iterator[Pass]:
    """Every kind of pass over one request."""
    request, kernels = Request(work), able(work)
    for kernel in kernels:
        yield Pass("forward", kernel, work, partial(request.forward, kernel))
    if work.taps != frozenset({"output"}):
        return
    for kernel in kernels:
        yield Pass("backward", kernel, work, partial(request.backward, kernel))
    yield Pass("second", kernels[-1], work, partial(request.backward, kernels[-1], twice=True))
    if kernels[-1] == "materialized":
        yield Pass("taps", kernels[-1], work, partial(request.backward, kernels[-1], taps=True))
        compared = replace(work, edits=(("weights", "set"),), compared=True)
        yield Pass("forward", kernels[-1], compared, partial(Request(compared).forward, kernels[-1]))
    elif not work.fine_gate:
        reported = replace(work, reported=True)
        yield Pass("forward", kernels[-1], reported, partial(Request(reported).forward, kernels[-1]))


def assert_tight(measured: list[tuple[Pass, int]]) -> None:
    """Hold every estimate against what was measured."""
    off = []
    for each, actual in measured:
        low, high = (1 - UNDER) * actual - SLACK, (1 + OVER) * actual + SLACK
        if not low <= each.estimate <= high:
            off.append((each.way, each.kernel, f"{each.estimate / actual:.3f} of {actual}", each.work))
    assert not off


@pytest.mark.parametrize("length", [512, 1024])
def test_a_comparison_of_many_chunks_is_planned_as_it_is(length):
    """With a gate for each feature a chunk has few tokens, and the comparison grows with the square of the length."""
    work = approximate("gated", fine_gate=True, queries=length, keys=length, reported=True)
    actual = peaks([partial(Request(work).forward, "materialized")])[0]
    assert peak_bytes(work, "materialized") == pytest.approx(actual, rel=0.02)


@cache
def _measured(quick: bool) -> dict[str, list[tuple[Pass, int]]]:
    """One profile of all of them: to start one takes long."""
    made = [(name, each) for name, work in (QUICK if quick else SLOW).items() for each in passes(work)]
    found: dict[str, list[tuple[Pass, int]]] = {name: [] for name, _ in made}
    for (name, each), most in zip(made, peaks([each.run for _, each in made]), strict=True):
        found[name].append((each, most))
    return found


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_peak_is_what_is_allocated(name):
    assert_tight(_measured(name in QUICK)[name])


# ── what the estimates have in common ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", QUICK)
def test_more_takes_more_memory(name):
    work = replace(QUICK[name], taps=frozenset({"output"}))
    exact = work.spec.method.name == "exact"
    for kernel in able(work):
        forward, gradient = peak_bytes(work, kernel), gradient_peak_bytes(work, kernel)
        taps = ALL_TAPS if exact else frozenset({"output", "q", "k", "v", "context"})
        assert forward <= peak_bytes(replace(work, taps=taps), kernel)
        assert forward <= gradient
        for empty in (
            replace(work, queries=0),
            work.resized(value_dim=0),
            replace(work, batch=0),
        ):
            assert 0 < peak_bytes(empty, kernel) <= forward
            assert gradient_peak_bytes(empty, kernel) > 0
        for phases in (memory_phases(work, kernel), gradient_phases(work, kernel)):
            assert len({phase.name for phase in phases}) == len(phases)
            assert all(size > 0 for phase in phases for size in phase.tensors.values())
    tapped_names = names_of(work, taps=True)
    checked = gradient_peak_bytes(work, kernel, checked=True)
    assert gradient <= gradient_peak_bytes(work, kernel, tapped_names)
    assert gradient < checked <= gradient_peak_bytes(work, kernel, tapped_names, checked=True)
    assert forward <= peak_bytes(replace(work, edits=(("weights" if exact else "context", "scale"),)), kernel)


@pytest.mark.parametrize("name", [name for name, work in QUICK.items() if not work.sent & STATE])
def test_inputs_and_outputs_are_what_comes_and_goes(name):
    work = QUICK[name]
    sent = inputs_of(work) | ({} if work.sizes else parameters_of(work))
    assert input_bytes(work) == sum(
        x.nbytes for name, x in sent.items() if name != "key_mask" and x.dtype != torch.int64
    )
    answered = Request(work).forward(able(work)[-1])
    assert output_bytes(work) == sum(x.nbytes for x in answered.values())


LIMIT = 8 * 2**20


@pytest.mark.parametrize(
    ("kernel", "backward"), [("fused", False), ("materialized", False), ("fused", True), ("blocked", True)]
)
def test_the_longest_sequence_that_fits_is_the_one_that_the_estimate_allows(kernel, backward):
    """Within 2 %: of the lengths beside the longest by the estimate, the shorter fits and the longer does not."""
    start, needs = raw(batch=1, heads=2, kv_heads=2), gradient_peak_bytes if backward else peak_bytes
    low, high = 64, 2**17
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needs(start.at("length", middle), kernel) <= LIMIT else (low, middle)
    requests = [Request(start.at("length", length)) for length in (int(low * 0.98), int(low * 1.02) + 1)]
    shorter, longer = peaks([partial(each.backward if backward else each.forward, kernel) for each in requests])
    assert shorter <= LIMIT < longer


def test_sizes_beyond_any_machine_are_counted_all_the_same():
    work = module(queries=2**31, keys=2**31, spec=WINDOW)
    assert peak_bytes(work, "materialized") > 8 * work.pairs * work.heads
    assert gradient_peak_bytes(work, "materialized", names_of(work, taps=True), checked=True) > 2**62
    for name in METHODS:
        work = approximate(name, queries=2**31 - 1, keys=2**31 - 1)
        assert gradient_peak_bytes(work, able(work)[0]) > peak_bytes(work, able(work)[0]) > 2**35


@pytest.mark.parametrize(
    ("layers", "kv_heads", "published"),
    [(32, 32, 512), (32, 8, 128), (80, 8, 320)],
    ids=["Llama 2 7B", "Llama 3 8B", "Llama 3 70B"],
)
def test_kv_cache_per_token_of_published_models(layers, kv_heads, published):
    """KiB for each token in half precision over all layers, with heads 128 wide."""
    work = raw(heads=64, kv_heads=kv_heads, head_dim=128, value_dim=128, itemsize=2, keys=4096)
    assert layers * kv_cache_bytes_per_token(work) == published * 1024
    assert kv_cache_bytes(work) == work.batch * 4096 * kv_cache_bytes_per_token(work)


def test_output_counts_the_selected_part_of_the_taps():
    work = raw(taps=frozenset({"output", "weights", "k", "lse"}), kv_heads=2, selected_heads=3, selected_queries=5)
    elements = 2 * 4 * 512 * 64 + 2 * 3 * 5 * 512 + 2 * 3 * 512 * 64 + 2 * 3 * 5
    assert output_bytes(work) == 4 * elements
