"""The peak estimates against what PyTorch's profiler sees allocated on the CPU, operators' own buffers included.

The walk over every registered combination, as it is served, is in ``tools.peak_walk``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import pytest
from tests.cost.peaks import Run, filled, peaks, run
from tests.cost.workloads import (
    METHODS,
    OUTPUT,
    STATE,
    approximate,
    forward_of,
    forward_seen,
    gradients_of,
    gradients_seen,
    module,
    raw,
    resized,
)

from attention_contract.positions import Alibi, QKNorm, RelativeBias, Rope
from attention_contract.schemas.attention import Edit
from attention_contract.spec import (
    Additive,
    AnyOf,
    AttentionSpec,
    Causal,
    Entmax15,
    GlobalTokens,
    SlidingWindow,
    Softmax,
    Strided,
)
from attention_service.core.attention import taps_of
from attention_service.core.kernels import Needs, unsuitable
from attention_service.core.masks.visibility import EVERYTHING
from attention_service.core.problem import Selection
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.cost import input_bytes, kv_cache_bytes, kv_cache_bytes_per_token, output_bytes
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.operations.forward import Forward
from attention_service.runtime.planning.rehearsals import seen

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
STRIPES = AttentionSpec(masks=[Strided(stride=128)])
ENTMAX_WINDOW = WINDOW.model_copy(update={"normalizer": Entmax15()})
TURNED_NORM = AttentionSpec(
    position=Rope(dim=48, style="interleaved"), qk_norm=QKNorm(over="all_heads"), masks=[Causal()]
)
TURNED_WINDOW = AttentionSpec(position=Rope(), masks=[Causal(), SlidingWindow(left=300)])
FEW_METHODS = ["linear, causal", "gated delta", "linformer", "nystrom"]
QUICK = {
    "raw": raw(),
    "padded": raw(padded=True, of=CAUSAL),
    "module": module(),
    "decode": module(batch=2, queries=1, new_keys=1, past=1999, of=CAUSAL),
    "rope": raw(batch=1, queries=400, new_keys=400, of=AttentionSpec(position=Rope())),
    "projections": module(),
    **{name: approximate(name, queries=256, new_keys=256) for name in FEW_METHODS},
}
SLOW = {
    "bfloat16": raw(itemsize=2),
    "entmax15": raw(queries=256, new_keys=256, of=AttentionSpec(normalizer=Entmax15())),
    "every tap": raw(of=WINDOW),
    "linear: state": approximate("linear, causal", sent=STATE),
    "window": raw(of=WINDOW),
    "module, in slices": module(width=1024, heads=8, kv_heads=8, batch=1, queries=560, new_keys=560),
    "alibi": raw(of=AttentionSpec(position=Alibi())),
    "performer, causal": approximate("performer, causal", queries=256, new_keys=256),
    "gated: by feature": approximate("gated", fine_gate=True, queries=256, new_keys=256),
    "narrow heads, turned": module(width=8, queries=2048, new_keys=2048, of=TURNED_WINDOW),
    "longformer": raw(of=LONGFORMER),
    "stripes": raw(batch=1, queries=128, new_keys=10240, of=STRIPES),
    "offsets": raw(batch=4, of=WINDOW, offsets=(0, 1, 2, 3)),
    "bias of heads": raw(mask=(2, 4, 512, 512)),
    "module, cross": module(queries=256, new_keys=2800, inputs=("query", "key", "value")),
    "module, short": module(
        width=512, heads=8, kv_heads=8, batch=16, queries=64, new_keys=64, of=AttentionSpec(position=Rope())
    ),
    "many tiles": raw(batch=1, heads=2, kv_heads=1, queries=2048, new_keys=2048, of=WINDOW),
    "many tiles, entmax15": raw(batch=1, heads=1, kv_heads=1, queries=1500, new_keys=1500, of=ENTMAX_WINDOW),
    "additive": module(kv_heads=2, of=AttentionSpec(score=Additive())),
    "sinks": module(of=WINDOW.model_copy(update={"normalizer": Softmax(sinks=True)})),
    "dropout": raw(queries=1024, new_keys=1024, dropped=True),
    "added keys": raw(of=AttentionSpec(add_bias_kv=True, add_zero_attn=True)),
    "turned norm": module(itemsize=2, of=TURNED_NORM),
    "relative_bias": module(of=AttentionSpec(position=RelativeBias())),
    "selected": raw(of=WINDOW),
    **{f"{name}: module": module(of, width=128, kv_heads=2) for name, of in METHODS.items()},
    **{f"{name}: cross": approximate(name, queries=64, new_keys=700, value_dim=48, padded=True) for name in METHODS},
}
TAPS = {
    "every tap": (ALL_TAPS, EVERYTHING),
    "projections": (frozenset({"q", "k", "v"}), Selection((0, 1))),
    "selected": (frozenset({"weights", "masked_scores"}), Selection((0, 1), tuple(range(32)))),
}
"""Taps and selections of forward passes that return more than the output."""
WORKLOADS = QUICK | SLOW


@dataclass(frozen=True)
class Pass:
    """One pass over one request: what it is planned for, and the run."""

    way: str
    kernel: str
    name: str
    estimate: int
    run: Run


def able(bound: BoundRequest) -> list[str]:
    """The kernels that compute it, or its method."""
    if bound.spec.method.name != "exact":
        return [bound.spec.method.name]
    needs = Needs(dropout=bound.dropped)
    return [each for each in KERNELS if not unsuitable(each, bound.spec, TORCH_DTYPES[bound.dtype], needs)]


def passes(name: str) -> Iterator[Pass]:
    """Every kind of pass over one request."""
    bound = WORKLOADS[name]
    real, kernels = filled(bound), able(bound)

    def forward(kernel: str, make: Callable[..., Forward]) -> Pass:
        whole = seen(bound, kernel, make, whole="report_error" in make.keywords)
        return Pass("forward", kernel, name, whole.peak_bytes, lambda: run(make(real, kernel)))

    def backward(way: str, kernel: str, **how: bool) -> Pass:
        found = gradients_seen(bound, kernel, **how).peak_bytes
        return Pass(way, kernel, name, found, lambda: run(gradients_of(real, kernel, **how)))

    taps, selection = TAPS.get(name, (OUTPUT, EVERYTHING))
    for kernel in kernels:
        yield forward(kernel, partial(forward_of, taps=taps, selection=selection))
    if name in TAPS:
        return
    for kernel in kernels:
        yield backward("backward", kernel)
    last = kernels[-1]
    yield backward("second", last, twice=True)
    if last == "materialized":
        yield backward("taps", last, taps=True)
        edits = [Edit(tap="weights", set=0.0)]
        yield forward(last, partial(forward_of, edits=edits, compare="unedited"))
    elif not bound.fine_gate:
        yield forward(last, partial(forward_of, report_error=True))


def assert_tight(measured: list[tuple[Pass, int]]) -> None:
    """Hold every estimate against what was measured."""
    off = []
    for each, actual in measured:
        low, high = (1 - UNDER) * actual - SLACK, (1 + OVER) * actual + SLACK
        if not low <= each.estimate <= high:
            off.append((each.way, each.kernel, f"{each.estimate / actual:.3f} of {actual}", each.name))
    assert not off


def test_a_comparison_of_many_chunks_is_planned_as_it_is():
    """With a gate for each feature a chunk has few tokens, and the comparison grows with the square of the length."""
    bound = approximate("gated", fine_gate=True, queries=512, new_keys=512)
    real = filled(bound)
    actual = peaks([lambda: run(forward_of(real, "linear", report_error=True))])[0]
    assert forward_seen(bound, "linear", report_error=True).peak_bytes == pytest.approx(actual, rel=0.02)


@cache
def _measured(quick: bool) -> dict[str, list[tuple[Pass, int]]]:
    """One profile of all of them: to start one takes long."""
    made = [(name, each) for name in (QUICK if quick else SLOW) for each in passes(name)]
    found: dict[str, list[tuple[Pass, int]]] = {name: [] for name, _ in made}
    for (name, each), most in zip(made, peaks([each.run for _, each in made]), strict=True):
        found[name].append((each, most))
    return found


@pytest.mark.long
@pytest.mark.sampled(name=6)
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_peak_is_what_is_allocated(name):
    assert_tight(_measured(name in QUICK)[name])


# ── what the estimates have in common ────────────────────────────────────────────────────────────────────────────────


ORDERED = ["padded", "decode", "entmax15", "nystrom", "linear: state"]
"""One request of each kind; the passes of the others are held by what PyTorch allocates."""


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.slow
def test_more_takes_more_memory(name):
    bound = {**QUICK, **SLOW}[name]
    exact = bound.spec.method.name == "exact"
    taps = ALL_TAPS.intersection({"output", *taps_of(bound.spec)})
    for kernel in able(bound):
        forward, gradient = forward_seen(bound, kernel), gradients_seen(bound, kernel)
        assert forward.peak_bytes <= forward_seen(bound, kernel, taps).peak_bytes
        assert forward.peak_bytes <= gradient.peak_bytes
        for empty in (resized(bound, queries=0), resized(bound, batch=0)):
            assert 0 < forward_seen(empty, kernel).peak_bytes <= forward.peak_bytes
            assert gradients_seen(empty, kernel).peak_bytes > 0
        for found in (forward, gradient):
            assert all(size > 0 for held in found.phases.values() for size in held.values())
    tapped, checked = (gradients_seen(bound, kernel, **{how: True}).peak_bytes for how in ("taps", "checked"))
    assert gradient.peak_bytes <= tapped
    assert gradient.peak_bytes < checked <= gradients_seen(bound, kernel, taps=True, checked=True).peak_bytes
    edits = [Edit(tap="weights" if exact else "context", scale=2.0)]
    assert forward.peak_bytes <= forward_seen(bound, kernel, edits=edits).peak_bytes


@pytest.mark.parametrize("name", [name for name, bound in QUICK.items() if not bound.sent & STATE])
def test_inputs_and_outputs_are_what_comes_and_goes(name):
    bound, (taps, _) = QUICK[name], TAPS.get(name, (OUTPUT, EVERYTHING))
    sent = {name: array for name, array in (bound.arrays | bound.learned).items() if name != "key_mask"}
    assert input_bytes(bound) == sum(array.nbytes for array in sent.values() if array.dtype.kind != "i")
    answered = run(forward_of(filled(bound), able(bound)[-1], taps))
    assert output_bytes(bound, taps) == sum(x.nbytes for x in answered.values())


LIMIT = 8 * 2**20


@pytest.mark.sampled(kernel=1)
@pytest.mark.parametrize(
    ("kernel", "backward"), [("fused", False), ("materialized", False), ("fused", True), ("blocked", True)]
)
def test_the_longest_sequence_that_fits_is_the_one_that_the_estimate_allows(kernel, backward):
    """Within 2 %: of the lengths beside the longest by the estimate, the shorter fits and the longer does not."""
    cost_of, made = (gradients_seen, gradients_of) if backward else (forward_seen, forward_of)

    def of_length(length: int) -> BoundRequest:
        return raw(batch=1, heads=2, kv_heads=2, queries=length, new_keys=length)

    low, high = 64, 2**17
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost_of(of_length(middle), kernel).peak_bytes <= LIMIT else (low, middle)
    requests = [filled(of_length(length)) for length in (int(low * 0.98), int(low * 1.02) + 1)]
    shorter, longer = peaks([partial(lambda each: run(made(each, kernel)), each) for each in requests])
    assert shorter <= LIMIT < longer


@pytest.mark.slow
def test_sizes_beyond_any_machine_are_counted_all_the_same():
    bound = module(WINDOW, queries=2**31, new_keys=2**31)
    assert forward_seen(bound, "materialized").peak_bytes > 8 * bound.pairs * bound.heads
    for name in FEW_METHODS:
        bound = approximate(name, queries=2**31 - 1, new_keys=2**31 - 1)
        kernel = able(bound)[0]
        assert gradients_seen(bound, kernel).peak_bytes > forward_seen(bound, kernel).peak_bytes > 2**35


@pytest.mark.parametrize(
    ("layers", "kv_heads", "published"),
    [(32, 32, 512), (32, 8, 128), (80, 8, 320)],
    ids=["Llama 2 7B", "Llama 3 8B", "Llama 3 70B"],
)
def test_kv_cache_per_token_of_published_models(layers, kv_heads, published):
    """KiB for each token in half precision over all layers, with heads 128 wide."""
    work = raw(heads=64, kv_heads=kv_heads, head_dim=128, value_dim=128, itemsize=2, new_keys=4096)
    assert layers * kv_cache_bytes_per_token(work) == published * 1024
    assert kv_cache_bytes(work) == work.batch * 4096 * kv_cache_bytes_per_token(work)


@pytest.mark.slow
def test_stripes_are_taken_by_few_operations():
    """A block looks at every second cell of 131,072 keys, which are 1,024 spans."""
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "queries": 2**17, "new_keys": 2**17}
    for counted in (forward_seen, gradients_seen):
        stripes, dense = (
            counted(raw(of, **sizes), "blocked").total().operations
            for of in (STRIPES, AttentionSpec(masks=[Strided(stride=32)]))
        )
        assert stripes < 4 * dense
