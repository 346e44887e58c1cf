"""FLOPs against PyTorch's counter, against the operations of real passes, and against published numbers."""

import pytest
import torch
from tests.cost.counting import executed
from tests.cost.test_traffic import ENTRIES, able, named
from tests.cost.test_traffic import work_of as small
from tests.cost.workloads import METHODS, STATE, approximate, module, raw
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from attention_contract.positions import Alibi, QKNorm, RelativeBias, Rope, Sinusoidal
from attention_contract.schemas.modules import Biases
from attention_contract.spec import (
    Additive,
    AnyOf,
    AttentionSpec,
    Causal,
    Documents,
    Dot,
    Entmax15,
    GlobalTokens,
    Sigmoid,
    SlidingWindow,
    Softmax,
    Sparsemax,
)
from attention_service.core.attention import attend
from attention_service.core.masks.pair_count import allowed_pairs
from attention_service.core.multihead import Sizes, initial_parameters, parameter_shapes, project, project_out
from attention_service.core.problem import Problem
from attention_service.cost import (
    SECOND_PASSES,
    backward_flops,
    executed_backward_flops,
    executed_flops,
    flops,
    pair_count,
    parameter_count,
)
from attention_service.cost.flops import EVERYTHING
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.planning.blank_requests import with_spec

NO_BIAS = Biases()
ALL_BIASES = Biases(q_proj=True, k_proj=True, v_proj=True, o_proj=True)


def sizes_of(d_model=24, heads=4, kv_heads=4, head_dim=6, value_dim=6, key_width=24, value_width=24, biases=ALL_BIASES):
    return Sizes(d_model, heads, kv_heads, head_dim, value_dim, key_width, value_width, biases)


def work_of(sizes=None, of=None, **more):
    small = {"batch": 2, "queries": 10, "new_keys": 10, "heads": 4, "kv_heads": 4, "head_dim": 6, "value_dim": 6}
    if sizes is not None:
        small |= {name: getattr(sizes, name) for name in ("heads", "kv_heads", "head_dim", "value_dim")}
    return raw(of, sizes=sizes, **small | more)


WORKLOADS = {
    "raw": work_of(),
    "raw grouped": work_of(kv_heads=2, new_keys=7),
    "raw multi-query, wide values": work_of(kv_heads=1, value_dim=9),
    "module": work_of(sizes_of()),
    "module without biases": work_of(sizes_of(biases=NO_BIAS)),
    "cross attention": work_of(sizes_of(key_width=10, value_width=14), queries=5, new_keys=13),
    "decode": work_of(sizes_of(kv_heads=2), queries=1, new_keys=1, past=11),
    "everything": work_of(
        sizes_of(20, 6, 2, 5, 7, 11, 13, Biases(q_proj=True, o_proj=True)), batch=3, queries=4, new_keys=6, past=3
    ),
}


def meta_pass(work: BoundRequest, wrt=EVERYTHING) -> tuple[int, int]:
    """What PyTorch counts for one attention with a materialized matrix of weights: forward and backward."""

    def meta(*shape: int, of: str = "inputs") -> torch.Tensor:
        return torch.empty(shape, device="meta", requires_grad=of in wrt)

    parameters = {}
    if work.sizes is not None:
        parameters = {name: meta(*shape, of="parameters") for name, shape in parameter_shapes(work.sizes).items()}
        widths = (work.sizes.d_model, work.sizes.key_width, work.sizes.value_width)
        lengths = (work.queries, work.new_keys, work.new_keys)
        inputs = [meta(work.batch, length, width) for length, width in zip(lengths, widths, strict=True)]
    past_key = meta(work.batch, work.kv_heads, work.past, work.head_dim)
    past_value = meta(work.batch, work.kv_heads, work.past, work.value_dim)
    by_head = (
        meta(work.batch, work.heads, work.queries, work.head_dim),
        meta(work.batch, work.kv_heads, work.new_keys, work.head_dim),
        meta(work.batch, work.kv_heads, work.new_keys, work.value_dim),
    )
    with FlopCounterMode(display=False) as forward:
        q, k, v = by_head if work.sizes is None else project(parameters, work.sizes, *inputs)
        group = work.heads // work.kv_heads
        k = torch.cat([past_key, k], 2).repeat_interleave(group, 1)
        v = torch.cat([past_value, v], 2).repeat_interleave(group, 1)
        output = (q @ k.mT).softmax(-1) @ v
        if work.sizes is not None:
            output = project_out(parameters, output)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


# ── matrix products ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.sampled(work=3)
@pytest.mark.parametrize("work", WORKLOADS.values(), ids=WORKLOADS)
def test_dense_products_are_what_pytorch_counts(work):
    forward, backward = meta_pass(work)
    assert flops(work, masked=False).matmul == forward
    assert backward_flops(work, masked=False, fused=False).matmul == backward
    if work.sizes is not None:
        for wrt in ({"inputs"}, {"parameters"}):
            counted = backward_flops(work, masked=False, fused=False, wrt=wrt)
            assert counted.matmul == meta_pass(work, wrt)[1]
    q = (work.batch, work.heads, work.queries, work.head_dim)
    k = (work.batch, work.kv_heads, work.keys, work.head_dim)
    v = (work.batch, work.kv_heads, work.keys, work.value_dim)
    stages = backward_flops(work, masked=False, fused=True)
    assert stages.scores + stages.values == sdpa_backward_flop_count((*q[:3], work.value_dim), q, k, v)


SHAPES = {
    "square": {"queries": 300, "new_keys": 300},
    "more keys": {"queries": 100, "new_keys": 300, "kv_heads": 2},
    "more queries": {"queries": 300, "new_keys": 100, "value_dim": 20},
    "one token": {"queries": 1, "new_keys": 1},
}


@pytest.mark.sampled(name=6)
@pytest.mark.parametrize("name", METHODS)
def test_products_of_a_method_are_what_pytorch_counts(name):
    works = [approximate(name, **sizes) for sizes in SHAPES.values()]
    works.append(module(METHODS[name], width=128, kv_heads=2, queries=200, new_keys=200))
    if not works[0].sent & {"gate", "beta"}:  # the gates of a past are not known
        works.append(approximate(name, queries=130, new_keys=130, past=270))
    if METHODS[name].method.name == "linear" and METHODS[name].masks:
        works.append(approximate(name, queries=300, new_keys=300, sent=STATE - {"return_state"}))
    if name.startswith("gated"):
        works += [approximate(name, queries=length, new_keys=length, fine_gate=True) for length in (16, 100)]
        works.append(approximate(name, queries=40, new_keys=100, fine_gate=True, sent=STATE - {"return_state"}))
    for work in works:
        forward, backward = executed(work, METHODS[name].method.name)
        assert flops(work, masked=False).matmul == forward.matmul
        assert backward_flops(work, masked=False, fused=False).matmul == backward.matmul


def test_gradients_of_gradients_are_two_more_backward_passes():
    work = work_of(kv_heads=2, of=AttentionSpec(score=Dot()))
    q, k, v = (torch.rand(2, heads, 10, 6, requires_grad=True) for heads in (4, 2, 2))
    context = attend(Problem(q, k, v, work.spec), kernel="materialized").context
    first = torch.autograd.grad(context.sum(), [q, k, v], create_graph=True)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(sum((x * x).sum() for x in first), [q, k, v])
    assert counter.get_total_flops() == SECOND_PASSES * backward_flops(work, masked=False, fused=False).matmul


# ── all operations ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("of", ENTRIES, ids=named)
def test_every_entry_counts_the_operations_of_its_passes(of):
    """Products exactly and the rest nearly: a scale is multiplied to the queries, a distance takes two columns more."""
    work = small(of, module=False, queries=64, new_keys=64)
    for kernel in able(work):
        forward, backward = executed(work, kernel)
        assert executed_flops(work, kernel) == pytest.approx(forward.flops, rel=0.12)
        weighed = kernel == "blocked" and of.normalizer.name != "softmax"  # whose context is not made again
        assert executed_backward_flops(work, kernel) == pytest.approx(backward.flops, rel=0.1 if weighed else 0.12)
    assert flops(work, masked=False).matmul == forward.matmul
    assert backward_flops(work, masked=False, fused=False).matmul == backward.matmul
    for stated, counted in (
        (flops(work, masked=False), forward),
        (backward_flops(work, masked=False, fused=False), backward),
    ):
        assert abs(stated.total - counted.flops) <= 2 * work.pairs * work.heads


@pytest.mark.parametrize(
    ("spec", "forward", "backward", "backward_fused"),
    [
        (AttentionSpec(score=Dot()), 5, 4, 4),
        (AttentionSpec(), 6, 5, 6),
        (AttentionSpec(normalizer=Softmax(temperature=2.0)), 7, 6, 8),
        (AttentionSpec(softcap=50.0), 9, 10, 14),
        (AttentionSpec(masks=[SlidingWindow(left=100)]), 7, 5, 7),
        (AttentionSpec(score=Additive(hidden=5)), 5 + 10, 4 + 40, 54),
        (AttentionSpec(score=Dot(), normalizer=Sigmoid(temperature=2.0)), 5, 4, 9),
        (AttentionSpec(score=Dot(), normalizer=Sparsemax()), 9 + 4, 4, 17),  # ⌈log 10⌉ comparisons of a sort
        (AttentionSpec(score=Dot(), normalizer=Entmax15(temperature=2.0)), 20 + 4, 10, 34),
    ],
)
def test_elementwise_work_per_pair(spec, forward, backward, backward_fused):
    work = work_of(of=spec)
    pairs = work.pairs * work.heads
    rows = work.batch * work.heads * work.queries if isinstance(spec.normalizer, Softmax) else 0
    assert flops(work, masked=False).normalizer == forward * pairs
    assert backward_flops(work, masked=False, fused=False).normalizer == backward * pairs
    fused = backward_flops(work, masked=False, fused=True).normalizer
    assert fused == backward_fused * pairs + 2 * work.value_dim * rows


VECTORS = 2 * (4 * 10 + 2 * 10)  # queries and keys of two sequences, by head
NORM = 27 * VECTORS  # of 6 numbers each: square, sum, scale and weigh, and 3 for the mean


@pytest.mark.parametrize(
    ("spec", "forward", "backward"),
    [
        (AttentionSpec(), 0, 0),
        (AttentionSpec(position=Rope()), 18 * VECTORS + 10 * 9, 18 * VECTORS),
        (AttentionSpec(position=Rope(dim=2)), 6 * VECTORS + 10 * 3, 6 * VECTORS),
        (AttentionSpec(position=Sinusoidal()), 6 * VECTORS + 2 * 10 * 9, 0),
        (AttentionSpec(position=Alibi()), 2 * 2 * 4 * 10 * 10, 0),
        (AttentionSpec(position=RelativeBias()), 2 * 4 * 10 * 10, 2 * 4 * 10 * 10),
        (AttentionSpec(qk_norm=QKNorm()), NORM, 48 * VECTORS),
        (AttentionSpec(qk_norm=QKNorm(over="all_heads")), 24 * VECTORS + 3 * 2 * 20, 48 * VECTORS),
    ],
)
def test_positions_and_norms_count_what_they_do(spec, forward, backward):
    work = work_of(kv_heads=2, of=spec)
    assert flops(work, masked=False).position == forward
    assert backward_flops(work, masked=False, fused=False).position == backward


MASKS = {
    "causal bottom right": [Causal(align="bottom_right")],
    "causal window": [Causal(), SlidingWindow(left=2)],
    "documents": [Documents(lengths=[3, 4])],
    "longformer": [AnyOf(of=[SlidingWindow(left=1, right=1), GlobalTokens(positions=[0])])],
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", ["raw grouped", "everything"])
def test_masked_counts_only_allowed_pairs(name, masks):
    work = with_spec(WORKLOADS[name], AttentionSpec(masks=masks))
    allowed = allowed_pairs(masks, work.queries, work.keys, past=work.past) * work.batch
    dense, counted = flops(work, masked=False), flops(work, masked=True)
    assert pair_count(work, masked=True) == allowed
    for stage in ("scores", "normalizer", "values"):
        assert getattr(counted, stage) * work.pairs == getattr(dense, stage) * allowed
    assert counted.projections == dense.projections
    assert counted.output_projection == dense.output_projection
    for stages in (counted, dense):
        assert stages.matmul == stages.projections + stages.scores + stages.values + stages.output_projection
        assert stages.total == stages.matmul + stages.position + stages.normalizer


def test_a_bias_is_counted_for_the_pairs_that_masks_allow():
    work = work_of(of=AttentionSpec(position=Alibi(), masks=[Causal()]))
    assert flops(work, masked=True).position == 2 * 4 * 2 * 55


# ── published numbers ────────────────────────────────────────────────────────────────────────────────────────────────


def test_flash_attention_paper_counts():
    """4·S²·D·H for each sequence, half of it when causal, 2.5 times for the backward pass (Dao 2023, section 4.1)."""
    batch, length, heads, width = 4, 2048, 16, 64
    work = raw(batch=batch, queries=length, new_keys=length, heads=heads, kv_heads=heads)
    published = 4 * length**2 * width * heads * batch
    forward = flops(work, masked=False).matmul
    assert forward == published
    assert backward_flops(work, masked=False, fused=True).matmul == 2.5 * forward
    causal = with_spec(work, AttentionSpec(masks=[Causal()]))
    diagonal = 2 * length * width * heads * batch
    assert flops(causal, masked=True).matmul == published // 2 + diagonal


def test_huge_sizes_are_exact():
    length = 10**9
    work = work_of(queries=length, new_keys=length, batch=1, heads=1, kv_heads=1, head_dim=1, value_dim=1)
    assert flops(work, masked=False).matmul == 4 * 10**18


# ── parameters ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", WORKLOADS)
def test_parameters_are_those_of_the_module(name):
    sizes = WORKLOADS[name].sizes
    parameters = {} if sizes is None else initial_parameters(sizes, 0, torch.float32)
    assert parameter_count(work_of(sizes)) == sum(tensor.numel() for tensor in parameters.values())


def test_parameters_of_a_method_are_counted():
    assert parameter_count(module(METHODS["gated delta"], width=128)) == 4 * (128 * 128 + 128) + 2 * (4 * 128 + 4)
    assert parameter_count(module(METHODS["linformer"], width=128)) == 4 * (128 * 128 + 128) + 2 * 64 * 4096
    assert parameter_count(approximate("linformer, shared")) == 16 * 4096
    assert parameter_count(work_of(of=AttentionSpec(score=Additive(hidden=5)))) == 4 * (6 * 5 + 6 * 5 + 5)
