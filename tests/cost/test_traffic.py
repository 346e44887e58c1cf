"""Bytes, elementary functions and operations of the rehearsal against those of real passes on the CPU."""

from dataclasses import replace
from time import process_time

import pytest
import torch
from tests.cost.counting import Counting, executed
from tests.cost.peaks import DTYPES

from attention_contract import positions, spec
from attention_contract.positions import QKNorm, RelativeBias, Rope
from attention_contract.schemas.complexity import Shape
from attention_contract.schemas.modules import Biases
from attention_contract.spec import AttentionSpec, Causal, Dot, GlobalTokens, SlidingWindow, Softmax
from attention_service.core.kernels import KERNELS, unsuitable
from attention_service.core.kernels.fused.cpu_blocks import takes_sizes
from attention_service.core.masks import MASKS
from attention_service.core.multihead import Sizes
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.problem import added_keys
from attention_service.core.scores import SCORES
from attention_service.cost import (
    Rates,
    Roofline,
    Traffic,
    Workload,
    cost_of,
    gradient_traffic,
    traffic,
)
from attention_service.cost.taps import tap_costs

KERNEL_NAMES = [kernel.name for kernel in KERNELS if kernel.name != "flex"]  # flex counts as blocked does
BIASES = Biases(q_proj=True, k_proj=True, v_proj=True, o_proj=True)
WINDOW = [SlidingWindow(left=2, right=1)]
CAUSAL = [Causal()]


def work_of(of: AttentionSpec | None = None, *, module=True, biases=BIASES, batch=2, queries=5, keys=7, **more):
    """A workload of small sizes; ``keys`` are the new ones."""
    of = AttentionSpec() if of is None else of
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 6, "value_dim": 6, "itemsize": 4, "threads": 1}
    sizes |= {name: more.pop(name) for name in tuple(more) if name in sizes}
    widths = [sizes[name] for name in ("heads", "kv_heads", "head_dim", "value_dim")]
    all_keys = keys + more.get("past", 0) + added_keys(of)
    known = Sizes(24, *widths, 24, 24, biases, of) if module else None
    return Workload(batch, queries, all_keys, spec=of, sizes=known, **sizes, **more)


def assert_counted_exactly(work: Workload, kernel: str) -> None:
    """Compare every count, forward and backward."""
    forward, backward = executed(work, kernel)
    assert traffic(work, kernel) == forward.traffic
    assert gradient_traffic(work, kernel) == backward.traffic


def assert_counted_nearly(work: Workload) -> None:
    """Compare every count of the blocked kernel, where the largest block of each kind stands for others."""
    for counted, told in zip(executed(work, "blocked"), (traffic, gradient_traffic), strict=True):
        found = told(work, "blocked")
        assert found.moved == pytest.approx(counted.traffic.moved, rel=0.05)
        assert found.transcendentals == pytest.approx(counted.traffic.transcendentals, rel=0.02)
        assert found.operations == pytest.approx(counted.traffic.operations, rel=0.15)


def able(work: Workload) -> list[str]:
    """The kernels that compute it."""
    dtype = DTYPES[work.itemsize]
    return [name for name in KERNEL_NAMES if not unsuitable(name, work.spec, dtype, dropout=work.dropped)]


def check(work: Workload) -> None:
    for kernel in able(work):
        if kernel == "blocked" and work.batched_offsets:
            assert_counted_nearly(work)
        else:
            assert_counted_exactly(work, kernel)


# ── the convention ───────────────────────────────────────────────────────────────────────────────────────────────────

X = torch.rand(3, 4)
ROW = torch.rand(4).expand(3, 4)
Q, K = torch.rand(1, 2, 5, 8), torch.rand(1, 2, 7, 8)
FUSED_CALL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@pytest.mark.parametrize(
    ("run", "read", "written", "functions", "operations"),
    [
        (lambda: X.mT.reshape(2, 6)[1:], 48, 48, 0, 1),  # the copy that reshape makes; views are free
        (lambda: X + ROW, 48 + 16, 48, 0, 1),  # an expanded tensor is read once
        (lambda: X + X, 48, 48, 0, 1),
        (lambda: torch.zeros_like(X), 0, 48, 0, 1),
        (lambda: X.clone().copy_(ROW), 48 + 16, 96, 0, 2),
        (lambda: X[torch.tensor([0, 2])], 32 + 16, 32, 0, 1),
        (X.exp, 48, 48, 12, 1),
        (lambda: X**2, 48, 48, 0, 1),
        (lambda: X**1.5, 48, 48, 12, 1),
        (lambda: X.softmax(-1), 48, 48, 12, 1),
        (lambda: FUSED_CALL(Q, K, K, 0.0, False), 320 + 448, 320 + 40, 70, 1),
        (lambda: FUSED_CALL(Q, K, K, 0.0, True), 320 + 448, 320 + 40, 2 * 15, 1),
    ],
)
def test_the_convention_of_counting(run, read, written, functions, operations):
    with Counting() as mode:
        run()
    assert mode.traffic == Traffic(read, written, functions, operations)


# ── exact attention ──────────────────────────────────────────────────────────────────────────────────────────────────

APART = [spec.AnyOf(of=[*WINDOW, GlobalTokens(positions=[0, 2], projections="separate")])]
WORKLOADS = {
    "module": work_of(),
    "self-attention": work_of(keys=5, inputs=frozenset({"query"})),
    "raw, one sequence": work_of(module=False, batch=1, kv_heads=4),
    "without biases": work_of(biases=Biases(), kv_heads=1),
    "wide values": work_of(value_dim=9),
    "narrow values": work_of(value_dim=3),
    "decode": work_of(queries=1, keys=1, past=6),
    "after a past, float64": work_of(past=3, itemsize=8),
    "raw bfloat16": work_of(module=False, itemsize=2),
    "causal bfloat16": work_of(AttentionSpec(masks=CAUSAL), itemsize=2),
    "narrow heads, turned": work_of(
        AttentionSpec(position=Rope(), masks=WINDOW), module=False, batch=1, head_dim=2, value_dim=2
    ),
    "padded": work_of(padded=True),
    "softcap": work_of(AttentionSpec(softcap=5.0, masks=WINDOW)),
    "wider softmax": work_of(AttentionSpec(normalizer=Softmax(temperature=2.0, dtype="float64"))),
    "norm over all heads": work_of(AttentionSpec(qk_norm=QKNorm(over="all_heads", unit_offset=True)), itemsize=2),
    "added keys": work_of(AttentionSpec(add_bias_kv=True, add_zero_attn=True, masks=WINDOW)),
    "offsets": work_of(AttentionSpec(masks=WINDOW), batched_offsets=True, batched_places=True),
    "dropout": work_of(dropped=True),
    "projections of their own": work_of(AttentionSpec(masks=APART)),
    "bool mask": work_of(request_mask_elements=2 * 4 * 5 * 7, bool_mask=True),
    "float mask": work_of(request_mask_elements=5 * 7),
    "mask of keys": work_of(request_mask_elements=2 * 7, bool_mask=True),
}


@pytest.mark.parametrize("work", WORKLOADS.values(), ids=WORKLOADS)
def test_requests_are_counted_exactly(work):
    check(work)


OPTIONS = {
    "learned": {"length": 64},
    "additive": {"hidden": 5},
    "global_tokens": {"positions": [0, 3]},
    "prefix_lm": {"length": 3},
    "block": {"size": 2, "neighbours": 1},
    "strided": {"stride": 2},
    "fixed": {"stride": 3, "summary": 1},
    "random_blocks": {"size": 2, "count": 2, "seed": 1},
    "documents": {"lengths": [2, 3]},
    "any": {"of": [{"name": "sliding_window", "left": 1}, {"name": "global_tokens", "positions": [0]}]},
    "all": {"of": [{"name": "strided", "stride": 2}, {"name": "causal"}]},
}
"""What an entry cannot do without, and what makes it do something in a few tokens."""


def of_each(registry) -> list:
    """The options of every entry."""
    return [entry.options(**OPTIONS.get(entry.name, {})) for entry in registry]


NTK = positions.NtkScaling(factor=2.0, original_max_position_embeddings=4)
LONGROPE = positions.LongRopeScaling(
    factor=2.0, original_max_position_embeddings=16, short_factor=[1.0] * 3, long_factor=[2.0] * 3
)
ENTRIES = [
    *(AttentionSpec(score=each) for each in of_each(SCORES)),
    *(AttentionSpec(normalizer=each) for each in of_each(NORMALIZERS)),
    *(AttentionSpec(position=each) for each in of_each(POSITIONS)),
    *(AttentionSpec(masks=[each]) for each in of_each(MASKS)),
]
VARIANTS = [
    *(AttentionSpec(score=each) for each in (spec.ScaledDot(scale=-1.0), spec.Gaussian(sigma="learned"))),
    AttentionSpec(score=spec.Cosine(scale="learned"), normalizer=Softmax(sinks=True, temperature=2.0)),
    AttentionSpec(score=Dot(), normalizer=spec.Entmax15(temperature=2.0)),
    *(AttentionSpec(position=Rope(scaling=each)) for each in (NTK, LONGROPE)),
    AttentionSpec(position=Rope(style="interleaved", dim=4)),
]


def named(of: AttentionSpec) -> str:
    return str(of.model_dump(exclude_defaults=True, mode="json"))


@pytest.mark.parametrize("of", [*ENTRIES, *VARIANTS], ids=named)
def test_every_entry_is_counted_exactly(of):
    check(work_of(of))
    check(work_of(of, module=False, padded=True, batched_offsets=True, batched_places=True))


TAPS = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "lse", "weights", "context")


@pytest.mark.parametrize("tap", TAPS)
def test_every_tap_and_selection_is_counted_exactly(tap):
    learned_by_head = AttentionSpec(score=spec.Bilinear(), position=RelativeBias(), masks=WINDOW)
    for of, selected in ((AttentionSpec(masks=WINDOW), (None, None)), (learned_by_head, (2, 3))):
        work = work_of(of, taps=frozenset({"output", tap}))
        check(replace(work, selected_heads=selected[0], selected_queries=selected[1]))


# ── many tiles ───────────────────────────────────────────────────────────────────────────────────────────────────────

LONG = {
    "module": False,
    "batch": 5,
    "queries": 600,
    "keys": 700,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 4,
    "value_dim": 4,
}
WIDE = [spec.AnyOf(of=[SlidingWindow(left=64, right=64), GlobalTokens(positions=[0, 3])])]
PATTERNS = {
    "causal": CAUSAL,
    "window": [SlidingWindow(left=100, right=0)],
    "with global tokens": WIDE,
    "prefix": [spec.PrefixLM(length=100)],
    "blocks": [spec.Block(size=128)],
    "strided": [spec.Strided(stride=64), Causal()],
    "random": [spec.RandomBlocks(size=64, count=2, seed=1)],
    "documents": [spec.Documents(lengths=[200, 300])],
}


@pytest.mark.parametrize("masks", PATTERNS.values(), ids=PATTERNS)
def test_every_block_of_the_blocked_kernel_is_counted(masks):
    """In blocks of the fused kernel, and by stages, where a softcap keeps the fused kernel out."""
    assert_counted_nearly(work_of(AttentionSpec(masks=masks), **LONG))
    assert_counted_nearly(work_of(AttentionSpec(masks=masks, softcap=5.0), **LONG))


WIDE_ENDING = AttentionSpec(masks=[Causal(align="bottom_right")])
MANY_BLOCKS = {
    "dense": work_of(AttentionSpec(), **LONG),
    "sinks": work_of(AttentionSpec(masks=WIDE, normalizer=Softmax(sinks=True)), **LONG),
    "sigmoid": work_of(AttentionSpec(masks=WIDE, normalizer=spec.Sigmoid()), **LONG),
    "entmax": work_of(AttentionSpec(normalizer=spec.Entmax15()), **LONG),
    "relative bias": work_of(AttentionSpec(masks=WIDE, position=RelativeBias()), **LONG),
    "mostly padding": work_of(AttentionSpec(masks=WIDE), padded=True, real_keys=192, **LONG),
    "added keys": work_of(
        AttentionSpec(masks=WIDE, add_bias_kv=True, add_zero_attn=True, position=positions.Alibi()), **LONG
    ),
    "dropout": work_of(AttentionSpec(masks=WIDE), dropped=True, **LONG),
    "decode": work_of(AttentionSpec(masks=CAUSAL), **LONG | {"queries": 1, "keys": 1, "past": 2000}),
    "blocks that look nowhere": work_of(WIDE_ENDING, **LONG | {"queries": 700, "keys": 64}),
}
IN_BLOCKS = {
    "wide values": work_of(AttentionSpec(masks=WIDE), **LONG | {"value_dim": 6, "module": True}),
    "half type": work_of(AttentionSpec(masks=WIDE), **LONG | {"itemsize": 2, "module": True}),
    "log-sum-exp": work_of(AttentionSpec(masks=WIDE), taps=frozenset({"output", "lse"}), **LONG),
    "negative scale": work_of(AttentionSpec(masks=WIDE, score=spec.ScaledDot(scale=-0.3)), **LONG),
}


@pytest.mark.parametrize("work", (MANY_BLOCKS | IN_BLOCKS).values(), ids=MANY_BLOCKS | IN_BLOCKS)
def test_what_the_blocked_kernel_does_in_a_block_is_counted(work):
    assert_counted_nearly(work)


def test_blocks_of_the_fused_kernel_take_the_exponentials_of_their_pairs():
    for work in IN_BLOCKS.values():
        assert takes_sizes(work)
        for counted in executed(replace(work, taps=frozenset({"output"})), "blocked"):
            assert counted.traffic.transcendentals == KERNELS["blocked"].make().executed(work).pairs * work.heads


def test_additive_scores_are_cut_into_blocks_as_large_as_on_average():
    work = work_of(AttentionSpec(masks=WIDE, score=spec.Additive(hidden=3)), **LONG)
    for counted, told in zip(executed(work, "blocked"), (traffic, gradient_traffic), strict=True):
        found = told(work, "blocked")
        assert found.transcendentals == counted.traffic.transcendentals
        assert found.moved == pytest.approx(counted.traffic.moved, rel=0.01)


# ── methods ──────────────────────────────────────────────────────────────────────────────────────────────────────────

METHODS = {
    "linear": AttentionSpec(method=spec.Linear()),
    "linear, causal": AttentionSpec(method=spec.Linear(), masks=CAUSAL),
    "relu": AttentionSpec(method=spec.Linear(features="relu"), masks=CAUSAL),
    "identity": AttentionSpec(method=spec.Linear(features="identity"), masks=CAUSAL),
    "l2, scaled": AttentionSpec(method=spec.Linear(features="l2", scale=0.5), masks=CAUSAL),
    "gated": AttentionSpec(method=spec.Linear(rule="gated"), masks=CAUSAL),
    "delta": AttentionSpec(method=spec.Linear(rule="delta"), masks=CAUSAL),
    "gated delta": AttentionSpec(method=spec.Linear(rule="gated_delta"), masks=CAUSAL),
    "performer": AttentionSpec(method=spec.Performer(features=10)),
    "performer, causal": AttentionSpec(method=spec.Performer(features=10), masks=CAUSAL),
    "linformer": AttentionSpec(method=spec.Linformer(rank=3, length=4000)),
    "linformer, shared": AttentionSpec(method=spec.Linformer(rank=3, length=4000, shared=True)),
    "nystrom": AttentionSpec(method=spec.Nystrom(landmarks=3)),
    "nystrom, no iteration": AttentionSpec(method=spec.Nystrom(landmarks=2, iterations=0)),
    "nystrom, few": AttentionSpec(method=spec.Nystrom(landmarks=2, iterations=2)),
}
STATE = frozenset({"initial_state", "initial_normalizer", "return_state"})


def approximate(described, **more):
    """A workload of a method, with the gates that its rule reads."""
    work = work_of(described, **more)
    rule = getattr(described.method, "rule", "")
    gates = ({"gate"} if "gated" in rule else set()) | ({"beta"} if "delta" in rule else set())
    sent = work.sent | (gates if work.sizes is None else set())
    return replace(work, sent=sent if getattr(described.method, "normalized", False) else sent - {"initial_normalizer"})


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_counted_exactly(name):
    described = METHODS[name]
    for more in (
        {"keys": 5, "inputs": frozenset({"query"})},
        {"module": False, "itemsize": 2, "padded": True, "kv_heads": 4},
        {"module": False, "queries": 1300, "keys": 300, "batch": 1, "value_dim": 9},
    ):
        assert_counted_exactly(approximate(described, **more), "materialized")
    if getattr(described.method, "rule", "sum") == "sum":  # gates of a past are not known
        assert_counted_exactly(approximate(described, queries=1, keys=1, past=6), "materialized")
    if described.method.name == "linear" and described.masks:
        for sent in (STATE, STATE - {"return_state"}):
            work = approximate(described, module=False, sent=sent, queries=300, keys=200, batch=1)
            assert_counted_exactly(work, "materialized")
    if getattr(described.method, "rule", "") in {"gated", "gated_delta"}:
        assert_counted_exactly(approximate(described, module=False, fine_gate=True, sent=STATE), "materialized")


# ── the account of a shape ───────────────────────────────────────────────────────────────────────────────────────────


def test_flex_counts_as_the_blocked_kernel():
    work = work_of(AttentionSpec(masks=WINDOW))
    assert traffic(work, "flex") == traffic(work, "blocked")


LONGEST = {"queries": 2**30, "keys": 2**30, "batch": 2**20}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KERNEL_NAMES, "gated delta", "performer, causal", "nystrom"])
def test_counting_takes_no_time_whatever_the_size(name):
    if name in METHODS:
        work, kernel = approximate(METHODS[name], **LONGEST), "materialized"
    else:
        work, kernel = work_of(AttentionSpec(masks=CAUSAL, position=Rope()), **LONGEST), name
    start = process_time()
    assert traffic(work, kernel).moved > 2**50
    assert gradient_traffic(work, kernel).moved > 2**50
    assert process_time() - start < 5


CLOCK = Roofline(Rates(flops_per_s=1e12, bytes_per_s=1e11, overhead_s=1e-5))


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_the_account_of_a_shape_holds_its_counts(kernel):
    work = work_of(AttentionSpec(masks=WINDOW), past=3, taps=frozenset({"output", "weights", "lse"}))
    cost = cost_of(
        work, Shape(batch=2, queries=5, keys=7, past=3), kernel, CLOCK, gradients=kernel, decode="materialized"
    )
    plain = replace(work, taps=frozenset({"output"}))
    step = replace(plain, queries=1, past=work.sequence_keys - 1)
    found = cost.executed
    passes = (found.forward, traffic(plain, kernel)), (found.backward, gradient_traffic(plain, kernel))
    for told, counted in (*passes, (found.decode, traffic(step, "materialized"))):
        assert (told.bytes_read, told.bytes_written) == (counted.read, counted.written)
        assert (told.transcendentals, told.operations) == (counted.transcendentals, counted.operations)
    assert (found.forward.flops, found.backward.flops) == (cost.executed_flops, cost.executed_backward_flops)
    assert cost.intensity == found.forward.flops / (found.forward.bytes_read + found.forward.bytes_written)


def test_returning_the_weights_costs_what_is_gone_through_again():
    work = work_of(AttentionSpec(score=Dot()), module=False, taps=frozenset({"output", "weights"}))
    shape = Shape(batch=2, queries=5, keys=7)
    fused, materialized = (cost_of(work, shape, kernel, CLOCK).taps["weights"] for kernel in ("fused", "materialized"))
    pairs = work.pairs * work.heads
    assert fused.flops == pairs * (2 * work.head_dim + 5)
    with_weights, _ = executed(work, "fused")
    without, _ = executed(replace(work, taps=frozenset({"output"})), "fused")
    assert fused.bytes_moved == with_weights.traffic.moved - without.traffic.moved
    assert fused.output_bytes == materialized.output_bytes == 4 * pairs
    assert fused.predicted_ms > 0
    assert (materialized.flops, materialized.bytes_moved, materialized.predicted_ms) == (0, 0, 0)


def test_the_scores_again_are_those_of_the_selection():
    work = work_of(AttentionSpec(score=Dot()), module=False, taps=frozenset({"output", "scores"}))
    some = replace(work, selected_heads=2, selected_queries=3)
    every, narrowed = (tap_costs(each, "fused", CLOCK)["scores"] for each in (work, some))
    assert narrowed.flops * work.heads * work.queries == every.flops * 2 * 3
    assert narrowed.output_bytes < every.output_bytes
