"""Bytes, elementary functions and operations of the rehearsal against those of real passes on the CPU."""

from time import process_time

import pytest
import torch
from tests.cost.counting import Counting, executed
from tests.cost.workloads import OUTPUT, forward_of, forward_seen, gradients_seen, raw

from attention_contract import positions, spec
from attention_contract.positions import QKNorm, RelativeBias, Rope
from attention_contract.schemas.modules import Biases
from attention_contract.spec import AttentionSpec, Causal, Dot, GlobalTokens, SlidingWindow, Softmax
from attention_service.core.kernels import KERNELS, Needs, unsuitable
from attention_service.core.kernels.fused.cpu_blocks import takes_sizes
from attention_service.core.masks import MASKS
from attention_service.core.masks.visibility import EVERYTHING
from attention_service.core.multihead import Sizes
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.problem import Selection
from attention_service.core.scores import SCORES
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.cost import Traffic
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.planning.rehearsals import seen

KERNEL_NAMES = [kernel.name for kernel in KERNELS]
BIASES = Biases(q_proj=True, k_proj=True, v_proj=True, o_proj=True)
WINDOW = [SlidingWindow(left=2, right=1)]
CAUSAL = [Causal()]


def work_of(of: AttentionSpec | None = None, *, module=True, biases=BIASES, **more) -> BoundRequest:
    """A blank request of small sizes."""
    of = AttentionSpec() if of is None else of
    more = {"batch": 2, "queries": 5, "new_keys": 7, "heads": 4, "kv_heads": 2, "head_dim": 6, "value_dim": 6} | more
    widths = [more[name] for name in ("heads", "kv_heads", "head_dim", "value_dim")]
    return raw(of, sizes=Sizes(24, *widths, 24, 24, biases, of) if module else None, **more)


def counted(bound: BoundRequest, kernel: str, taps=OUTPUT, selection=EVERYTHING) -> tuple[Traffic, Traffic]:
    """The counts of both passes."""
    forward = seen(bound, kernel, lambda bound, by: forward_of(bound, by, taps, selection)).total()
    backward = gradients_seen(bound, kernel, mask=False).of("backward of attention", "gradients")
    return tuple(Traffic(*x.numbers[:4]) for x in (forward, backward))


def assert_counted_exactly(bound: BoundRequest, kernel: str, taps=OUTPUT, selection=EVERYTHING) -> None:
    """Compare every count, forward and backward."""
    stated = executed(bound, kernel, taps, selection)
    assert counted(bound, kernel, taps, selection) == tuple(Traffic(*each.traffic.numbers[:4]) for each in stated)


def assert_counted_nearly(bound: BoundRequest, taps=OUTPUT) -> None:
    """Compare every count of the blocked kernel, where the largest block of each kind stands for others."""
    for stated, found in zip(executed(bound, "blocked", taps), counted(bound, "blocked", taps), strict=True):
        assert found.moved == pytest.approx(stated.traffic.moved, rel=0.05)
        assert found.transcendentals == pytest.approx(stated.traffic.transcendentals, rel=0.02)
        assert found.operations == pytest.approx(stated.traffic.operations, rel=0.15)


def able(bound: BoundRequest) -> list[str]:
    """The kernels that compute it."""
    needs = Needs(dropout=bound.dropped)
    return [name for name in KERNEL_NAMES if not unsuitable(name, bound.spec, TORCH_DTYPES[bound.dtype], needs)]


def check(bound: BoundRequest, taps=OUTPUT, selection=EVERYTHING) -> None:
    for kernel in able(bound):
        if kernel == "blocked" and bound.batched_offsets:
            assert_counted_nearly(bound)
        else:
            assert_counted_exactly(bound, kernel, taps, selection)


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
    assert mode.traffic.numbers[:4] == (read, written, functions, operations)


# ── exact attention ──────────────────────────────────────────────────────────────────────────────────────────────────

APART = [spec.AnyOf(of=[*WINDOW, GlobalTokens(positions=[0, 2], projections="separate")])]
WORKLOADS = {
    "module": work_of(),
    "self-attention": work_of(new_keys=5, inputs=("query",)),
    "raw, one sequence": work_of(module=False, batch=1, kv_heads=4),
    "without biases": work_of(biases=Biases(), kv_heads=1),
    "wide values": work_of(value_dim=9),
    "narrow values": work_of(value_dim=3),
    "decode": work_of(queries=1, new_keys=1, past=6),
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
    "offsets": work_of(AttentionSpec(masks=WINDOW), offsets=(0, 1)),
    "dropout": work_of(dropped=True),
    "projections of their own": work_of(AttentionSpec(masks=APART)),
    "bool mask": work_of(mask=(2, 4, 5, 7), bool_mask=True),
    "float mask": work_of(mask=(1, 1, 5, 7)),
    "mask of keys": work_of(mask=(2, 1, 1, 7), bool_mask=True),
}


@pytest.mark.sampled(work=8)
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


@pytest.mark.sampled(of=14)
@pytest.mark.parametrize("of", [*ENTRIES, *VARIANTS], ids=named)
def test_every_entry_is_counted_exactly(of):
    """Places and masks differ between the sequences of a batch; the rest is the same in a module as without one."""
    if of.masks or of.position.name != "none":
        check(work_of(of, module=False, padded=True, offsets=(0, 1)))
    else:
        check(work_of(of))


TAPS = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "lse", "weights", "context")


@pytest.mark.sampled(tap=3)
@pytest.mark.parametrize("tap", TAPS)
def test_every_tap_and_selection_is_counted_exactly(tap):
    learned_by_head = AttentionSpec(score=spec.Bilinear(), position=RelativeBias(), masks=WINDOW)
    selected = Selection((0, 1), (0, 1, 2))
    for of, selection in ((AttentionSpec(masks=WINDOW), EVERYTHING), (learned_by_head, selected)):
        check(work_of(of), frozenset({"output", tap}), selection)


# ── many tiles ───────────────────────────────────────────────────────────────────────────────────────────────────────

LONG = {
    "module": False,
    "batch": 5,
    "queries": 600,
    "new_keys": 700,
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


SOME = {"causal", "with global tokens", "random"}
"""Patterns whose blocks every run counts; the cuts of all of them are in ``test_blocked_costs``."""


@pytest.mark.sampled(masks=1)
@pytest.mark.parametrize(
    "masks",
    [pytest.param(x, marks=() if name in SOME else pytest.mark.slow, id=name) for name, x in PATTERNS.items()],
)
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
    "decode": work_of(AttentionSpec(masks=CAUSAL), **LONG | {"queries": 1, "new_keys": 1, "past": 2000}),
    "blocks that look nowhere": work_of(WIDE_ENDING, **LONG | {"queries": 700, "new_keys": 64}),
}
IN_BLOCKS = {
    "wide values": work_of(AttentionSpec(masks=WIDE), **LONG | {"value_dim": 6, "module": True}),
    "half type": work_of(AttentionSpec(masks=WIDE), **LONG | {"itemsize": 2, "module": True}),
    "log-sum-exp": work_of(AttentionSpec(masks=WIDE), **LONG),
    "negative scale": work_of(AttentionSpec(masks=WIDE, score=spec.ScaledDot(scale=-0.3)), **LONG),
}


SELDOM = {"entmax", "sigmoid", "relative bias", "added keys", "dropout", "half type", "negative scale"}
"""Entries that ``test_every_entry_is_counted_exactly``, or its requests, count in one block in every run."""


@pytest.mark.sampled(name=3)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in MANY_BLOCKS | IN_BLOCKS],
)
def test_what_the_blocked_kernel_does_in_a_block_is_counted(name):
    taps = {"output", "lse"} if name == "log-sum-exp" else OUTPUT
    assert_counted_nearly((MANY_BLOCKS | IN_BLOCKS)[name], taps)


@pytest.mark.slow
def test_blocks_of_the_fused_kernel_take_the_exponentials_of_their_pairs():
    for work in IN_BLOCKS.values():
        assert takes_sizes(work)
        for stated in executed(work, "blocked"):
            assert stated.traffic.transcendentals == KERNELS["blocked"].make().executed(work).pairs * work.heads


@pytest.mark.slow
def test_additive_scores_are_cut_into_blocks_as_large_as_on_average():
    work = work_of(AttentionSpec(masks=WIDE, score=spec.Additive(hidden=3)), **LONG)
    for stated, found in zip(executed(work, "blocked"), counted(work, "blocked"), strict=True):
        assert found.transcendentals == stated.traffic.transcendentals
        assert found.moved == pytest.approx(stated.traffic.moved, rel=0.01)


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
    """A request by a method, without a state's normalizer where there is none."""
    if not getattr(described.method, "normalized", False) and "sent" in more:
        more["sent"] -= {"initial_normalizer"}
    return work_of(described, **more)


@pytest.mark.sampled(name=5)
@pytest.mark.parametrize("name", METHODS)
def test_methods_are_counted_exactly(name):
    described = METHODS[name]
    for more in (
        {"new_keys": 5, "inputs": ("query",)},
        {"module": False, "itemsize": 2, "padded": True, "kv_heads": 4},
        {"module": False, "queries": 1300, "new_keys": 300, "batch": 1, "value_dim": 9},
    ):
        assert_counted_exactly(approximate(described, **more), described.method.name)
    if getattr(described.method, "rule", "sum") == "sum":  # gates of a past are not known
        assert_counted_exactly(approximate(described, queries=1, new_keys=1, past=6), described.method.name)
    if described.method.name == "linear" and described.masks:
        for sent in (STATE, STATE - {"return_state"}):
            work = approximate(described, module=False, sent=sent, queries=300, new_keys=200, batch=1)
            assert_counted_exactly(work, described.method.name)
    if getattr(described.method, "rule", "") in {"gated", "gated_delta"}:
        assert_counted_exactly(approximate(described, module=False, fine_gate=True, sent=STATE), described.method.name)


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_the_longest_sizes_are_counted_quickly(kernel):
    start = process_time()
    work = work_of(AttentionSpec(masks=WINDOW), queries=2**30, new_keys=2**30, batch=2**20)
    assert forward_seen(work, kernel).total().moved > 2**50
    assert process_time() - start < 5
