"""Bytes, elementary functions and operations against what PyTorch executes, operation by operation."""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import prod
from time import process_time
from typing import Any

import numpy as np
import pytest
import torch
from tests.cost.op_counting import Counted, count
from torch.utils._python_dispatch import _disable_current_modes

from attention_contract import positions, spec
from attention_contract.positions import QKNorm, RelativeBias, Rope
from attention_contract.schemas.complexity import Shape
from attention_contract.schemas.modules import Biases
from attention_contract.spec import AttentionSpec, Causal, Dot, GlobalTokens, SlidingWindow, Softmax
from attention_service.core.apart import separate_positions
from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS, tiles, unsuitable
from attention_service.core.kernels.tiling import Layout
from attention_service.core.kernels.touched import by_fused
from attention_service.core.learned import learned_of
from attention_service.core.masks import MASKS
from attention_service.core.methods import METHODS as METHOD_ENTRIES
from attention_service.core.methods.linear import running
from attention_service.core.multihead import Sizes, parameter_shapes, project, project_out
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.preparing import prepare
from attention_service.core.scores import SCORES
from attention_service.core.types import Dropout, Selection, added_keys
from attention_service.cost import (
    Rates,
    Roofline,
    Traffic,
    Workload,
    backward_flops,
    cost_of,
    flops,
    gradient_traffic,
    touched,
    traffic,
)
from attention_service.cost.taps import tap_costs

KERNEL_NAMES = [kernel.name for kernel in KERNELS if kernel.name != "flex"]  # flex counts as blocked does
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
BIASES = Biases(q_proj=True, k_proj=True, v_proj=True, o_proj=True)
WINDOW = [SlidingWindow(left=2, right=1)]


def work_of(of: AttentionSpec | None = None, *, module=True, biases=BIASES, batch=2, queries=5, keys=7, **more):
    """A workload of small sizes; ``keys`` are the new ones."""
    of = AttentionSpec() if of is None else of
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 6, "value_dim": 6, "itemsize": 4, "threads": 1}
    sizes |= {name: more.pop(name) for name in tuple(more) if name in sizes}
    widths = [sizes[name] for name in ("heads", "kv_heads", "head_dim", "value_dim")]
    all_keys = keys + more.get("past", 0) + added_keys(of)
    known = Sizes(24, *widths, 24, 24, biases, of) if module else None
    return Workload(batch, queries, all_keys, spec=of, sizes=known, **sizes, **more)


def executed(work: Workload, kernel: str, mask: torch.Tensor | None = None) -> tuple[Counted, Counted]:
    """What PyTorch executes, forward and on the way back to every input and parameter."""
    dtype = DTYPES[work.itemsize]
    sizes = work.sizes

    def leaf(*shape: int) -> torch.Tensor:
        return torch.rand(shape).to(dtype).requires_grad_()

    if sizes is None:
        new = {"query": (work.heads, work.queries, work.head_dim), "key": (work.kv_heads, work.new_keys, work.head_dim)}
        new["value"] = (work.kv_heads, work.new_keys, work.value_dim)
        shapes: Mapping[str, tuple[int, ...]] = {
            name: learned.shape for name, learned in learned_of(work.spec, work.widths).items()
        }
    else:
        new = {"query": (work.queries, 24), "key": (work.new_keys, 24), "value": (work.new_keys, 24)}
        shapes = parameter_shapes(sizes)
    tensors = {name: leaf(work.batch, *shape) for name, shape in new.items() if name in work.inputs}
    if work.past:
        tensors["past_key"] = leaf(work.batch, work.kv_heads, work.past, work.head_dim)
        tensors["past_value"] = leaf(work.batch, work.kv_heads, work.past, work.value_dim)
    parameters = {name: leaf(*shape) for name, shape in shapes.items()}
    leaves = [*tensors.values(), *parameters.values()]
    if work.padded:
        real = torch.ones(work.batch, work.told_keys, dtype=torch.bool)
        real[:, work.met_keys :] = False
        if work.told_keys > 1:  # a tile of nothing but padding would be passed over
            real[-1, -1] = False
        tensors["key_mask"] = real
    if work.batched_offsets:
        tensors["offsets"] = torch.arange(work.batch) + work.past
    if mask is not None:
        tensors["mask"] = mask if mask.dtype == torch.bool else mask.to(dtype)
    lead = (work.batch, work.kv_heads)
    state = {
        "gate": (*lead, work.new_keys, *([work.head_dim] if work.fine_gate else [])), "beta": (*lead, work.new_keys),
        "initial_state": (*lead, work.head_dim, work.value_dim), "initial_normalizer": (*lead, work.head_dim),
    }  # fmt: skip
    sent = {name: leaf(*shape) for name, shape in state.items() if name in work.sent}
    for name in sent.keys() & {"initial_state", "initial_normalizer"}:
        sent[name] = sent[name].detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    leaves += sent.values()
    tensors |= sent
    learned = {name: parameters[name] for name in learned_of(work.spec, work.widths)}
    by_head = (lambda *three: three) if sizes is None else partial(project, parameters, sizes)
    far = None
    if sizes is not None and separate_positions(work.spec.masks):
        far = partial(project, parameters, sizes, by="global")
    chosen = (work.selected_heads, work.selected_queries)
    selection = Selection(*(None if some is None else tuple(range(some)) for some in chosen))

    def run(taps: frozenset[str]) -> torch.Tensor:
        problem = prepare(work.spec, tensors, learned, by_head, projected=sizes is not None, apart=far)
        tokens = tensors.get("key", tensors["query"])
        wanted = "return_state" in work.sent
        problem = replace(problem, running=running(work.spec, tensors, parameters, tokens, wanted=wanted))
        if work.dropped:
            problem = replace(problem, dropout=Dropout(0.1, 3))
        attended = attend(problem, taps - {"output"}, selection, kernel=kernel)
        _ = [x.to(dtype) for x in attended.taps.values()]  # as the reply has them
        return attended.context if sizes is None else project_out(parameters, attended.context)

    for x in leaves:  # as a server that is asked for no gradients
        x.requires_grad_(False)
    with torch.no_grad():
        _, forward = count(partial(run, work.taps))
    for x in leaves:
        x.requires_grad_()
    output = run(frozenset())
    upstream = torch.ones_like(output)

    def differentiate() -> list[torch.Tensor]:
        found = torch.autograd.grad(output, leaves, upstream, allow_unused=True)
        return [x.to(dtype) for x in found if x is not None]

    _, backward = count(differentiate)
    return forward, backward


@pytest.fixture(autouse=True)
def _tiles_are_found_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides on the host which tiles there are is left out of the account."""
    found = Layout.kinds

    def kinds(*args: Any) -> Any:
        with _disable_current_modes():
            return found(*args)

    found_places = tiles.places

    def places(*args: Any) -> Any:
        with _disable_current_modes():
            return found_places(*args)

    monkeypatch.setattr(Layout, "kinds", kinds)
    monkeypatch.setattr(tiles, "places", places)


def of(counted: Counted) -> Traffic:
    return Traffic(counted.read, counted.written, counted.transcendentals, counted.operations)


def check(work: Workload, kernel: str, mask: torch.Tensor | None = None) -> None:
    """Every number is the same, forward and backward."""
    if unsuitable(kernel, work.spec, DTYPES[work.itemsize], dropout=work.dropped) is not None:
        pytest.skip("the kernel does not take it")
    forward, backward = executed(work, kernel, mask)
    assert traffic(work, kernel) == of(forward)
    assert gradient_traffic(work, kernel) == of(backward)


WORKLOADS = {
    "module": work_of(),
    "self-attention": work_of(keys=5, inputs=frozenset({"query"})),
    "raw": work_of(module=False),
    "raw, every head for itself": work_of(module=False, kv_heads=4),
    "multi-query": work_of(kv_heads=1),
    "one sequence": work_of(batch=1),
    "raw, one sequence, W of a score": work_of(AttentionSpec(score=spec.Bilinear()), module=False, batch=1),
    "without biases": work_of(biases=Biases(q_proj=False, k_proj=False, v_proj=False, o_proj=False)),
    "wide values": work_of(value_dim=9),
    "narrow values": work_of(value_dim=3),
    "after a past": work_of(past=3),
    "decode": work_of(queries=1, keys=1, past=6),
    "bfloat16": work_of(itemsize=2),
    "float64": work_of(itemsize=8),
    "raw bfloat16": work_of(module=False, itemsize=2),
    "padded": work_of(padded=True),
    "softcap": work_of(AttentionSpec(softcap=5.0, masks=WINDOW)),
    "temperature, wider softmax": work_of(AttentionSpec(normalizer=Softmax(temperature=2.0, dtype="float64"))),
    "norm by head": work_of(AttentionSpec(qk_norm=QKNorm())),
    "norm over all heads": work_of(AttentionSpec(qk_norm=QKNorm(over="all_heads", unit_offset=True)), itemsize=2),
    "added keys": work_of(AttentionSpec(add_bias_kv=True, add_zero_attn=True, masks=WINDOW)),
    "offsets": work_of(AttentionSpec(masks=WINDOW), batched_offsets=True, batched_places=True),
    "dropout": work_of(dropped=True),
    "apart": work_of(
        AttentionSpec(masks=[spec.AnyOf(of=[*WINDOW, GlobalTokens(positions=[0, 2], projections="separate")])])
    ),
}


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
@pytest.mark.parametrize("work", WORKLOADS.values(), ids=WORKLOADS)
def test_plain_combinations_are_counted_exactly(work, kernel):
    check(work, kernel)


OPTIONS = {
    "learned": {"length": 40},
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


def entries(registry, **more):
    return [pytest.param(entry.options(**OPTIONS.get(entry.name, {}), **more), id=entry.name) for entry in registry]


@pytest.mark.parametrize("module", [True, False])
@pytest.mark.parametrize("kernel", KERNEL_NAMES)
@pytest.mark.parametrize(
    "score",
    [
        *entries(SCORES),
        pytest.param(spec.ScaledDot(scale=-1.0), id="negative"),
        pytest.param(spec.Gaussian(sigma="learned"), id="learned sigma"),
        pytest.param(spec.Cosine(scale="learned"), id="learned scale"),
    ],
)
def test_every_score(score, kernel, module):
    check(work_of(AttentionSpec(score=score), module=module), kernel)


@pytest.mark.parametrize("module", [True, False])
@pytest.mark.parametrize("kernel", KERNEL_NAMES)
@pytest.mark.parametrize(
    "normalizer",
    [*entries(NORMALIZERS, temperature=2.0), pytest.param(Softmax(sinks=True, temperature=2.0), id="sinks")],
)
def test_every_normalizer(normalizer, kernel, module):
    check(work_of(AttentionSpec(score=Dot(), normalizer=normalizer), module=module), kernel)


@pytest.mark.parametrize("normalizer", entries(NORMALIZERS))
def test_every_normalizer_of_padded_sequences(normalizer):
    check(work_of(AttentionSpec(normalizer=normalizer), padded=True), "materialized")


ROPES = {
    "interleaved": Rope(style="interleaved", dim=4),
    "linear": Rope(scaling=positions.LinearScaling(factor=2.0)),
    "ntk": Rope(scaling=positions.NtkScaling(factor=2.0)),
    "dynamic ntk": Rope(scaling=positions.NtkScaling(factor=2.0, original_max_position_embeddings=4)),
    "llama3": Rope(scaling=positions.Llama3Scaling(factor=8.0, original_max_position_embeddings=16)),
    "yarn": Rope(scaling=positions.YarnScaling(factor=4.0, original_max_position_embeddings=16)),
    "longrope": Rope(
        scaling=positions.LongRopeScaling(
            factor=2.0, original_max_position_embeddings=16, short_factor=[1.0] * 3, long_factor=[2.0] * 3
        )
    ),
}


@pytest.mark.parametrize("work", [work_of, partial(work_of, module=False, batched_offsets=True, batched_places=True)])
@pytest.mark.parametrize("kernel", KERNEL_NAMES)
@pytest.mark.parametrize("position", [*entries(POSITIONS), *(pytest.param(x, id=name) for name, x in ROPES.items())])
def test_every_position(position, kernel, work):
    check(work(AttentionSpec(position=position)), kernel)


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
@pytest.mark.parametrize("mask", entries(MASKS))
def test_every_mask(mask, kernel):
    check(work_of(AttentionSpec(masks=[mask])), kernel)


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 1, 5, 7), (2, 1, 1, 7)])
def test_masks_of_a_request(shape, boolean, kernel):
    work = work_of(request_mask_elements=prod(shape), bool_mask=boolean)
    check(work, kernel, torch.rand(shape) > 0.1 if boolean else torch.randn(shape))


TAPS = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "lse", "weights", "context")


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
@pytest.mark.parametrize("selected", [(None, None), (2, None), (None, 3), (2, 3)])
@pytest.mark.parametrize("tap", TAPS)
def test_every_tap_and_selection(tap, selected, kernel):
    work = work_of(AttentionSpec(masks=WINDOW), taps=frozenset({"output", tap}))
    check(replace(work, selected_heads=selected[0], selected_queries=selected[1]), kernel)


@pytest.mark.parametrize("kernel", ["materialized", "blocked"])
def test_learned_tensors_of_the_selected_heads(kernel):
    of_heads = AttentionSpec(score=spec.Bilinear(), position=RelativeBias(), masks=WINDOW)
    work = work_of(of_heads, module=False, taps=frozenset({"weights", "k"}), selected_heads=2, selected_queries=2)
    check(work, kernel)


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
WIDE = spec.AnyOf(of=[SlidingWindow(left=64, right=64), GlobalTokens(positions=[0, 3])])
PATTERNS = {
    "none": [],
    "causal": [Causal()],
    "window": [SlidingWindow(left=100, right=0)],
    "with global tokens": [WIDE],
    "prefix": [spec.PrefixLM(length=100)],
    "blocks": [spec.Block(size=128)],
    "strided": [spec.Strided(stride=64), Causal()],
    "random": [spec.RandomBlocks(size=64, count=2, seed=1)],
    "documents": [spec.Documents(lengths=[200, 300])],
}


@pytest.mark.parametrize("masks", PATTERNS.values(), ids=PATTERNS)
def test_every_tile_of_the_blocked_kernel_is_counted(masks):
    check(work_of(AttentionSpec(masks=masks), **LONG), "blocked")


MANY_TILES = {
    "sinks": work_of(AttentionSpec(masks=[WIDE], normalizer=Softmax(sinks=True)), **LONG),
    "sigmoid": work_of(AttentionSpec(masks=[WIDE], normalizer=spec.Sigmoid()), **LONG),
    "sparsemax": work_of(AttentionSpec(masks=[WIDE], normalizer=spec.Sparsemax()), **LONG),
    "entmax": work_of(AttentionSpec(normalizer=spec.Entmax15()), **LONG),
    "gaussian": work_of(AttentionSpec(masks=[WIDE], score=spec.Gaussian(sigma="learned")), **LONG),
    "bilinear": work_of(AttentionSpec(masks=[WIDE], score=spec.Bilinear()), **LONG),
    "relative bias": work_of(AttentionSpec(masks=[WIDE], position=RelativeBias()), **LONG),
    "padded": work_of(AttentionSpec(masks=[WIDE]), padded=True, **LONG),
    "mostly padding": work_of(AttentionSpec(masks=[WIDE]), padded=True, real_keys=192, **LONG),
    "added keys": work_of(
        AttentionSpec(masks=[WIDE], add_bias_kv=True, add_zero_attn=True, position=positions.Alibi()), **LONG
    ),
    "dropout": work_of(AttentionSpec(masks=[WIDE]), dropped=True, **LONG),
    "bfloat16": work_of(AttentionSpec(masks=[SlidingWindow(left=100)]), **LONG | {"module": True, "itemsize": 2}),
    "decode": work_of(AttentionSpec(masks=[Causal()]), **LONG | {"queries": 1, "keys": 1, "past": 2000}),
    "blocks that look nowhere": work_of(
        AttentionSpec(masks=[Causal(align="bottom_right")]), **LONG | {"queries": 700, "keys": 64}
    ),
}


@pytest.mark.parametrize("work", MANY_TILES.values(), ids=MANY_TILES)
def test_what_the_blocked_kernel_does_in_a_tile(work):
    check(work, "blocked")


def test_additive_scores_are_cut_into_blocks_as_large_as_on_average():
    work = work_of(AttentionSpec(masks=[WIDE], score=spec.Additive(hidden=3)), **LONG)
    for counted, told in zip(executed(work, "blocked"), (traffic, gradient_traffic), strict=True):
        found = told(work, "blocked")
        assert found.transcendentals == counted.transcendentals
        assert found.moved == pytest.approx(counted.read + counted.written, rel=0.01)


def _some(rng):
    """A spec of any registered entries that fit one another, and sizes for it."""

    def any_of(registry):
        entry = rng.choice(list(registry))
        return entry.options(**OPTIONS.get(entry.name, {}))

    masks = [any_of(MASKS) for _ in range(rng.integers(3))]
    made = AttentionSpec(
        score=any_of(SCORES), normalizer=any_of(NORMALIZERS), position=any_of(POSITIONS), masks=masks,
        softcap=rng.choice([None, 4.0]), qk_norm=rng.choice([None, QKNorm()]), add_zero_attn=bool(rng.integers(2)),
    )  # fmt: skip
    sizes = {name: int(rng.integers(1, 6)) for name in ("batch", "queries", "keys")} | {"past": int(rng.integers(3))}
    heads = int(rng.choice([1, 2, 4]))
    sizes |= {"heads": heads, "kv_heads": int(rng.choice([1, heads])), "value_dim": int(rng.choice([4, 6, 8]))}
    kernel = str(rng.choice(KERNEL_NAMES))
    taps = frozenset({"output", str(rng.choice(TAPS[:6]))})
    more = {"padded": bool(rng.integers(2)), "dropped": bool(rng.integers(2)), "itemsize": int(rng.choice([2, 4, 8]))}
    return work_of(made, module=bool(rng.integers(2)), taps=taps, **sizes, **more), kernel


@pytest.mark.parametrize("seed", range(120))
def test_random_combinations_are_counted_exactly(seed):
    work, kernel = _some(np.random.default_rng(seed))
    if unsuitable(kernel, work.spec, DTYPES[work.itemsize], dropout=work.dropped) is not None:
        kernel = "materialized"
    check(work, kernel)


CAUSAL = [Causal()]
ENDING = [Causal(align="bottom_right")]
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
    "linformer": AttentionSpec(method=spec.Linformer(rank=3, length=40)),
    "linformer, shared": AttentionSpec(method=spec.Linformer(rank=3, length=7, shared=True)),
    "nystrom": AttentionSpec(method=spec.Nystrom(landmarks=3)),
    "nystrom, no iteration": AttentionSpec(method=spec.Nystrom(landmarks=2, iterations=0)),
    "nystrom, one iteration": AttentionSpec(method=spec.Nystrom(landmarks=2, iterations=1)),
    "nystrom, few": AttentionSpec(method=spec.Nystrom(landmarks=2, iterations=2)),
}


def approximate(name, **more):
    """A workload of a method, with the gates that its rule reads."""
    described = METHODS[name] if isinstance(name, str) else name
    work = work_of(described, **more)
    rule = getattr(described.method, "rule", "")
    gates = ({"gate"} if "gated" in rule else set()) | ({"beta"} if "delta" in rule else set())
    if work.sizes is not None:
        gates = set()
    sent = set(more.get("sent", ()))
    if sent and not getattr(described.method, "normalized", False):
        sent -= {"initial_normalizer"}
    return replace(work, sent=frozenset(gates | sent))


STATE = frozenset({"initial_state", "initial_normalizer", "return_state"})
PLACES = {
    "module": {},
    "self-attention": {"keys": 5, "inputs": frozenset({"query"})},
    "raw": {"module": False},
    "raw, every head for itself": {"module": False, "kv_heads": 4},
    "multi-query": {"kv_heads": 1},
    "one sequence": {"batch": 1},
    "wide values": {"module": False, "value_dim": 9},
    "after a past": {"past": 3},
    "decode": {"queries": 1, "keys": 1, "past": 6},
    "bfloat16": {"itemsize": 2},
    "raw bfloat16": {"itemsize": 2, "module": False},
    "float64": {"itemsize": 8},
    "padded": {"padded": True},
    "long": {"queries": 300, "keys": 300},
    "longer": {"queries": 1300, "keys": 2600, "module": False, "batch": 1},
    "longer questions": {"queries": 2600, "keys": 300, "batch": 1},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", METHODS)
def test_methods_are_counted_exactly(method, place):
    more = PLACES[place]
    if "past" in more and getattr(METHODS[method].method, "rule", "sum") != "sum":
        pytest.skip("gates of a past are not known")
    described = METHODS[method]
    if described.method.name == "linformer" and place.startswith("long"):
        described = described.model_copy(update={"method": described.method.model_copy(update={"length": 4000})})
    if "past" in more and described.method.name == "linformer":
        described = described.model_copy(update={"method": described.method.model_copy(update={"length": 40})})
    check(approximate(described, **more), "materialized")


RUNNING = [
    *(each for each in METHODS.values() if each.method.name == "linear" and each.masks),
    AttentionSpec(method=spec.Linear(), masks=ENDING),
    AttentionSpec(method=spec.Linear()),
]


@pytest.mark.parametrize("sent", [STATE, {"initial_state", "initial_normalizer"}, {"return_state"}], ids=len)
@pytest.mark.parametrize("sizes", [{}, {"queries": 1, "keys": 1}, {"queries": 300, "keys": 200, "batch": 1}], ids=str)
@pytest.mark.parametrize("index", range(len(RUNNING)))
def test_states_that_are_brought_and_wanted(index, sizes, sent):
    check(approximate(RUNNING[index], module=False, sent=sent, **sizes), "materialized")


@pytest.mark.parametrize("sizes", [{}, {"queries": 1, "keys": 1}, {"queries": 50, "keys": 40, "kv_heads": 4}], ids=str)
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
def test_a_gate_for_each_feature(rule, sizes):
    method = AttentionSpec(method=spec.Linear(rule=rule), masks=CAUSAL)
    check(approximate(method, module=False, fine_gate=True, sent=STATE, **sizes), "materialized")


@pytest.mark.parametrize("tap", ["q", "k", "v", "context"])
@pytest.mark.parametrize("selected", [(None, None), (2, 3)])
@pytest.mark.parametrize("method", ["linear, causal", "nystrom"])
def test_taps_of_methods(method, selected, tap):
    work = approximate(method, taps=frozenset({"output", tap}))
    check(replace(work, selected_heads=selected[0], selected_queries=selected[1]), "materialized")


def _approximation(rng):
    """A method, what else it takes, and sizes for it."""
    while True:
        described = METHODS[str(rng.choice(list(METHODS)))]
        method = described.method
        if method.name == "linformer":
            method = method.model_copy(update={"length": 12})
        score = rng.choice(list(SCORES)) if method.name != "linear" else SCORES["scaled_dot"]
        position = rng.choice(list(POSITIONS))
        made = AttentionSpec(
            method=method,
            score=score.options(**OPTIONS.get(score.name, {})),
            position=position.options(**OPTIONS.get(position.name, {})),
            masks=[Causal(align="bottom_right")] if described.masks and rng.integers(2) else described.masks,
            qk_norm=rng.choice([None, QKNorm()]),
        )
        if not any(METHOD_ENTRIES.of(method).refuses(made)):
            break
    sizes = {name: int(rng.integers(1, 6)) for name in ("batch", "queries", "keys")}
    heads = int(rng.choice([1, 2, 4]))
    sizes |= {"heads": heads, "kv_heads": int(rng.choice([1, heads])), "value_dim": int(rng.choice([4, 6, 8]))}
    if method.name == "linear":
        sizes["sent"] = frozenset(str(name) for name in STATE if rng.integers(2))
        if {"initial_state", "initial_normalizer"} & sizes["sent"]:
            sizes["sent"] |= {"initial_state", "initial_normalizer"}
    if getattr(method, "rule", "sum") == "sum":
        sizes["past"] = int(rng.integers(3))
    more = {"padded": bool(rng.integers(2)), "itemsize": int(rng.choice([2, 4, 8])), "module": bool(rng.integers(2))}
    return approximate(made, **sizes, **more)


@pytest.mark.parametrize("seed", range(120))
def test_random_combinations_of_methods_are_counted_exactly(seed):
    check(_approximation(np.random.default_rng(seed)), "materialized")


def test_flex_counts_as_the_blocked_kernel():
    work = work_of(AttentionSpec(masks=WINDOW))
    assert traffic(work, "flex") == traffic(work, "blocked")


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_counting_takes_no_time_and_no_memory_whatever_the_size(kernel):
    long = work_of(AttentionSpec(masks=[Causal()], position=Rope()), queries=2**30, keys=2**30, batch=2**20)
    start = process_time()
    assert traffic(long, kernel).moved > 2**50
    assert gradient_traffic(long, kernel).moved > 2**50
    assert process_time() - start < 5


@pytest.mark.parametrize("method", [name for name, of in METHODS.items() if of.method.name != "linformer"])
def test_counting_a_method_takes_no_time_either(method):
    long = approximate(method, queries=2**30, keys=2**30, batch=2**20)
    start = process_time()
    assert traffic(long, "materialized").moved > 2**50
    assert gradient_traffic(long, "materialized").moved > 2**50
    assert process_time() - start < 5


CLOCK = Roofline(Rates(flops_per_s=1e12, bytes_per_s=1e11, overhead_s=1e-5))


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_the_account_of_a_shape_holds_its_counts(kernel):
    work = work_of(AttentionSpec(masks=WINDOW), past=3, taps=frozenset({"output", "weights", "lse"}))
    cost = cost_of(
        work, Shape(batch=2, queries=5, keys=7, past=3), kernel, CLOCK, gradients=kernel, decode="materialized"
    )
    plain = replace(work, taps=frozenset({"output"}))
    step = replace(plain, queries=1, past=work.told_keys - 1)
    found = cost.executed
    passes = (found.forward, traffic(plain, kernel)), (found.backward, gradient_traffic(plain, kernel))
    for told, counted in (*passes, (found.decode, traffic(step, "materialized"))):
        assert (told.bytes_read, told.bytes_written) == (counted.read, counted.written)
        assert (told.transcendentals, told.operations) == (counted.transcendentals, counted.operations)
    assert (found.forward.flops, found.backward.flops) == (cost.executed_flops, cost.executed_backward_flops)
    assert cost.intensity == found.forward.flops / (found.forward.bytes_read + found.forward.bytes_written)


@pytest.mark.parametrize("method", METHODS)
def test_the_account_of_a_method_says_what_it_executes(method):
    work = approximate(method, keys=5)
    found = cost_of(work, Shape(batch=2, queries=5, keys=5), method, CLOCK, gradients=method).executed
    for told, counted in ((found.forward, traffic(work, method)), (found.backward, gradient_traffic(work, method))):
        assert (told.bytes_read, told.bytes_written) == (counted.read, counted.written)
        assert (told.transcendentals, told.operations) == (counted.transcendentals, counted.operations)
        assert told.flops > 0


def test_returning_the_weights_costs_what_is_gone_through_again():
    work = work_of(AttentionSpec(score=Dot()), module=False, taps=frozenset({"output", "weights"}))
    shape = Shape(batch=2, queries=5, keys=7)
    fused, materialized = (cost_of(work, shape, kernel, CLOCK).taps["weights"] for kernel in ("fused", "materialized"))
    pairs = work.pairs * work.heads
    assert fused.flops == pairs * (2 * work.head_dim + 5)
    with_weights, _ = executed(work, "fused")
    without, _ = executed(replace(work, taps=frozenset({"output"})), "fused")
    assert fused.bytes_moved == of(with_weights).moved - of(without).moved
    assert fused.output_bytes == materialized.output_bytes == 4 * pairs
    assert fused.predicted_ms > 0
    assert (materialized.flops, materialized.bytes_moved, materialized.predicted_ms) == (0, 0, 0)


@pytest.mark.parametrize(("heads", "queries"), [(2, None), (None, 3), (2, 3)])
def test_the_scores_again_are_those_of_the_selection(heads, queries):
    work = work_of(AttentionSpec(score=Dot()), module=False, taps=frozenset({"output", "scores"}))
    some = replace(work, selected_heads=heads, selected_queries=queries)
    every, narrowed = (tap_costs(each, "fused", CLOCK)["scores"] for each in (work, some))
    share = (heads or work.heads) * (queries or work.queries)
    assert narrowed.flops * work.heads * work.queries == every.flops * share
    assert narrowed.output_bytes < every.output_bytes


def test_one_tap_adds_nothing_to_another_that_goes_as_far():
    work = work_of(taps=frozenset({"output", "scores", "weights"}))
    found = tap_costs(work, "fused", CLOCK)
    assert found["scores"].flops == found["scores"].bytes_moved == 0
    assert found["weights"].flops > 0


ENTRIES = [
    *(AttentionSpec(score=each.values[0]) for each in entries(SCORES)),
    *(AttentionSpec(normalizer=each.values[0]) for each in entries(NORMALIZERS)),
    *(AttentionSpec(position=each.values[0]) for each in entries(POSITIONS)),
    *(AttentionSpec(masks=[each.values[0]]) for each in entries(MASKS)),
    *(work.spec for work in WORKLOADS.values()),
]


@pytest.mark.parametrize("index", range(len(ENTRIES)))
def test_matrix_products_of_every_entry_are_what_the_stages_execute(index):
    work = work_of(ENTRIES[index])
    forward, backward = executed(work, "materialized")
    assert flops(work, masked=False).matmul == forward.matmul
    assert backward_flops(work, masked=False, fused=False).matmul == backward.matmul


@pytest.mark.parametrize("masks", PATTERNS.values(), ids=PATTERNS)
def test_matrix_products_of_the_blocked_kernel_are_those_of_its_tiles(masks):
    # With a softcap: no counter tells the products of the fused kernel, which takes the blocks of a plain softmax.
    work = work_of(AttentionSpec(masks=masks, softcap=5.0), **LONG | {"module": True})
    forward, backward = executed(work, "blocked")
    share = Fraction(touched(work).pairs, work.pairs)
    for counted, stages in (
        (forward, flops(work, masked=False)),
        (backward, backward_flops(work, masked=False, fused=True)),
    ):
        outside = stages.projections + stages.output_projection
        assert counted.matmul == outside + share * (stages.scores + stages.values)


@pytest.mark.parametrize("masks", [masks for masks in PATTERNS.values() if masks], ids=[*PATTERNS][1:])
def test_exponentials_of_the_blocked_kernel_are_those_of_the_pairs_in_its_blocks(masks):
    work = work_of(AttentionSpec(masks=masks), **LONG | {"module": True})
    for counted in executed(work, "blocked"):
        assert counted.transcendentals == touched(work).pairs * work.heads


@pytest.mark.parametrize("masks", [masks for masks in PATTERNS.values() if masks], ids=[*PATTERNS][1:])
def test_every_tile_of_the_blocked_kernel_is_counted_where_no_fused_one_takes_it(masks):
    check(work_of(AttentionSpec(masks=masks, softcap=5.0), **LONG), "blocked")


IN_BLOCKS = {
    "every head for itself": {"kv_heads": 2},
    "blocks that look nowhere": {"keys": 60},
    "wide values": {"value_dim": 6, "module": True},
    "narrow values": {"value_dim": 2},
    "half type": {"itemsize": 2, "module": True},
    "float64": {"itemsize": 8},
    "module": {"module": True, "batch": 1},
    "log-sum-exp": {"taps": frozenset({"output", "lse"})},
    "added keys": {"added": True},
    "negative scale": {"score": spec.ScaledDot(scale=-0.3)},
    "bilinear": {"score": spec.Bilinear()},
    "temperature": {"normalizer": Softmax(temperature=2.0)},
}


@pytest.mark.parametrize("more", IN_BLOCKS.values(), ids=IN_BLOCKS)
def test_what_the_blocked_kernel_does_in_a_block_of_the_fused_one(more):
    more = dict(more)
    added = more.pop("added", False)
    parts = {name: more.pop(name) for name in ("score", "normalizer") if name in more}
    masks = [WIDE] if more.get("keys") != 60 else [SlidingWindow(left=64, right=64)]
    of = AttentionSpec(masks=masks, add_bias_kv=added, add_zero_attn=added, **parts)
    work = work_of(of, **LONG | more)
    assert by_fused(work)
    check(work, "blocked")


def test_pytorchs_own_counter_gives_nothing_for_the_fused_kernel_of_a_cpu():
    forward, _ = executed(work_of(module=False), "fused")
    assert forward.matmul == 0
    assert "_scaled_dot_product_flash_attention_for_cpu" in forward.names
