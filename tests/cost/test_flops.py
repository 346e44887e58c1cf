"""FLOPs against PyTorch's own counter on the meta device, and against published numbers."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from attention_contract.positions import Alibi, LearnedPosition, QKNorm, RelativeBias, Rope, Sinusoidal
from attention_contract.schemas.modules import Biases
from attention_contract.spec import (
    Additive,
    AnyOf,
    AttentionSpec,
    Bilinear,
    Causal,
    Cosine,
    Documents,
    Dot,
    Entmax15,
    Gaussian,
    GlobalTokens,
    ScaledDot,
    Sigmoid,
    SlidingWindow,
    Softmax,
    Sparsemax,
    Strided,
)
from attention_service.core.attention import attend
from attention_service.core.learned import learned_of
from attention_service.core.masks import allowed_pairs
from attention_service.core.multihead import Sizes, initial_parameters, parameter_shapes, project, project_out
from attention_service.core.types import Problem
from attention_service.cost import SECOND_PASSES, Workload, backward_flops, flops, pair_count, parameter_count

NO_BIAS = Biases()
ALL_BIASES = Biases(q_proj=True, k_proj=True, v_proj=True, o_proj=True)


def sizes_of(d_model=24, heads=4, kv_heads=4, head_dim=6, value_dim=6, key_width=24, value_width=24, biases=ALL_BIASES):
    return Sizes(d_model, heads, kv_heads, head_dim, value_dim, key_width, value_width, biases)


def work_of(sizes=None, *, batch=2, queries=10, keys=10, heads=4, kv_heads=4, head_dim=6, value_dim=6, **more):
    if sizes is not None:
        heads, kv_heads, head_dim, value_dim = sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.value_dim
    return Workload(
        batch, queries, keys, heads, kv_heads, head_dim, value_dim, **({"itemsize": 4, "sizes": sizes} | more)
    )


WORKLOADS = {
    "raw": work_of(),
    "raw grouped": work_of(kv_heads=2, keys=7),
    "raw multi-query, wide values": work_of(kv_heads=1, value_dim=9),
    "module": work_of(sizes_of()),
    "module without biases": work_of(sizes_of(biases=NO_BIAS)),
    "grouped": work_of(sizes_of(kv_heads=2)),
    "wide values": work_of(sizes_of(value_dim=9)),
    "cross attention": work_of(sizes_of(key_width=10, value_width=14), queries=5, keys=13),
    "decode": work_of(sizes_of(kv_heads=2), queries=1, keys=12, past=11),
    "everything": work_of(
        sizes_of(20, 6, 2, 5, 7, 11, 13, Biases(q_proj=True, o_proj=True)), batch=3, queries=4, keys=9, past=3
    ),
}


def meta_pass(work: Workload) -> tuple[int, int]:
    """What PyTorch counts for one attention with a materialized matrix of weights: forward and backward."""

    def meta(*shape: int, of: str = "inputs") -> torch.Tensor:
        return torch.empty(shape, device="meta", requires_grad=of in work.wrt)

    parameters = {}
    if work.sizes is not None:
        parameters = {name: meta(*shape, of="parameters") for name, shape in parameter_shapes(work.sizes).items()}
        widths = (work.sizes.d_model, work.sizes.key_width, work.sizes.value_width)
        lengths = (work.queries, work.new_keys, work.new_keys)
        inputs = [meta(work.batch, length, width) for length, width in zip(lengths, widths, strict=True)]
    past_key = meta(work.batch, work.kv_heads, work.past, work.head_dim)
    past_value = meta(work.batch, work.kv_heads, work.past, work.value_dim)
    raw = (
        meta(work.batch, work.heads, work.queries, work.head_dim),
        meta(work.batch, work.kv_heads, work.new_keys, work.head_dim),
        meta(work.batch, work.kv_heads, work.new_keys, work.value_dim),
    )
    with FlopCounterMode(display=False) as forward:
        q, k, v = raw if work.sizes is None else project(parameters, work.sizes, *inputs)
        group = work.heads // work.kv_heads
        k = torch.cat([past_key, k], 2).repeat_interleave(group, 1)
        v = torch.cat([past_value, v], 2).repeat_interleave(group, 1)
        output = (q @ k.mT).softmax(-1) @ v
        if work.sizes is not None:
            output = project_out(parameters, output)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("work", WORKLOADS.values(), ids=WORKLOADS)
def test_dense_matmuls_are_what_pytorch_counts(work):
    forward, backward = meta_pass(work)
    assert flops(work, masked=False).matmul == forward
    assert backward_flops(work, masked=False, fused=False).matmul == backward


@pytest.mark.parametrize("wrt", [{"inputs"}, {"parameters"}], ids=" ".join)
@pytest.mark.parametrize("work", [work for work in WORKLOADS.values() if work.sizes is not None])
def test_projections_go_back_to_what_is_asked_for(work, wrt):
    work = replace(work, wrt=frozenset(wrt))
    assert backward_flops(work, masked=False, fused=False).matmul == meta_pass(work)[1]


@pytest.mark.parametrize("work", WORKLOADS.values(), ids=WORKLOADS)
def test_fused_backward_is_what_pytorch_counts_for_its_fused_kernels(work):
    q = (work.batch, work.heads, work.queries, work.head_dim)
    k = (work.batch, work.kv_heads, work.keys, work.head_dim)
    v = (work.batch, work.kv_heads, work.keys, work.value_dim)
    stages = backward_flops(work, masked=False, fused=True)
    assert stages.scores + stages.values == sdpa_backward_flop_count((*q[:3], work.value_dim), q, k, v)


def test_fused_kernels_on_meta_count_the_same():
    work = work_of(queries=16, keys=24, head_dim=8, value_dim=16)
    q, k, v = (
        torch.empty(2, 4, length, width, device="meta", dtype=torch.float16, requires_grad=True)
        for length, width in ((16, 8), (24, 8), (24, 16))
    )
    with FlopCounterMode(display=False) as forward:
        output = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0]
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert flops(work, masked=False).matmul == forward.get_total_flops()
    assert backward_flops(work, masked=False, fused=True).matmul == backward.get_total_flops()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("work", WORKLOADS.values(), ids=WORKLOADS)
def test_total_is_the_sum_of_the_stages(work, fused):
    for stages in (flops(work, masked=True), backward_flops(work, masked=True, fused=fused)):
        assert stages.matmul == stages.projections + stages.scores + stages.values + stages.output_projection
        assert stages.total == stages.matmul + stages.position + stages.normalizer


@pytest.mark.parametrize(
    ("spec", "forward", "backward", "backward_fused"),
    [
        (AttentionSpec(score=Dot()), 5, 4, 4),
        (AttentionSpec(score=ScaledDot(scale=1.0)), 5, 4, 4),
        (AttentionSpec(), 6, 5, 6),
        (AttentionSpec(normalizer=Softmax(temperature=2.0)), 7, 6, 8),
        (AttentionSpec(softcap=50.0), 9, 10, 14),
        (AttentionSpec(masks=[SlidingWindow(left=100)]), 7, 5, 7),
    ],
)
def test_elementwise_work_per_pair(spec, forward, backward, backward_fused):
    work = work_of(spec=spec)
    pairs = work.pairs * work.heads
    rows = work.batch * work.heads * work.queries
    assert flops(work, masked=False).normalizer == forward * pairs
    assert backward_flops(work, masked=False, fused=False).normalizer == backward * pairs
    fused = backward_flops(work, masked=False, fused=True).normalizer
    assert fused == backward_fused * pairs + 2 * work.value_dim * rows


@pytest.mark.parametrize(
    ("normalizer", "forward", "backward"),
    [(Sigmoid(), 4, 3), (Sigmoid(temperature=2.0), 5, 4), (Sparsemax(), 9, 4), (Entmax15(temperature=2.0), 20, 10)],
)
@pytest.mark.parametrize(("keys", "comparisons"), [(1, 0), (2, 1), (8, 3), (9, 4), (10**12, 40)])
def test_other_normalizers_count_their_operations_and_the_comparisons_of_a_sort(
    normalizer, forward, backward, keys, comparisons
):
    work = work_of(keys=keys, spec=AttentionSpec(score=Dot(), normalizer=normalizer))
    pairs = work.pairs * work.heads
    forward += 0 if isinstance(normalizer, Sigmoid) else comparisons
    assert flops(work, masked=False).normalizer == forward * pairs
    assert backward_flops(work, masked=False, fused=False).normalizer == backward * pairs
    fused = backward_flops(work, masked=False, fused=True).normalizer
    assert fused == (forward + backward) * pairs  # all of it repeated


SCORES = {
    "bilinear": Bilinear(),
    "additive": Additive(hidden=5),
    "gaussian": Gaussian(sigma="learned"),
    "cosine": Cosine(scale=3.0),
    "dot": Dot(),
}


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_products_of_a_score_are_what_pytorch_counts_of_the_stages(score, kv_heads):
    work = work_of(kv_heads=kv_heads, queries=5, keys=7, spec=AttentionSpec(score=score))

    def meta(*shape: int) -> torch.Tensor:
        return torch.rand(shape, requires_grad=True)

    q, k, v = (meta(2, heads, length, 6) for heads, length in ((4, 5), (kv_heads, 7), (kv_heads, 7)))
    learned = {name: meta(*each.shape) for name, each in learned_of(work.spec, work.widths).items()}
    problem = Problem(q, k, v, work.spec, learned=learned)
    with FlopCounterMode(display=False) as forward:
        context = attend(problem, kernel="materialized").context
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(context.sum(), [q, k, v, *learned.values()])
    assert flops(work, masked=False).matmul == forward.get_total_flops()
    assert backward_flops(work, masked=False, fused=False).matmul == backward.get_total_flops()
    assert parameter_count(work) == sum(x.numel() for x in learned.values())


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gradients_of_gradients_are_three_more_backward_passes(kv_heads):
    work = work_of(kv_heads=kv_heads, spec=AttentionSpec(score=Dot()))
    q, k, v = (torch.rand(2, heads, 10, 6, requires_grad=True) for heads in (4, kv_heads, kv_heads))
    context = attend(Problem(q, k, v, work.spec), kernel="materialized").context
    first = torch.autograd.grad(context.sum(), [q, k, v], create_graph=True)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(sum((x * x).sum() for x in first), [q, k, v])
    once = backward_flops(work, masked=False, fused=False).matmul
    assert counter.get_total_flops() == SECOND_PASSES * once


@pytest.mark.parametrize(
    ("score", "forward", "backward", "of_tokens"),
    [
        (Bilinear(), 5, 4, 0),
        (Additive(hidden=5), 5 + 10, 4 + 40, 0),
        (Gaussian(), 6, 5, 2 * 4 * (10 * 4 * 6 + 10 * 5 * 6)),
        (Cosine(), 6, 5, 2 * 4 * (10 * 3 * 6 + 10 * 3 * 6)),
    ],
)
def test_elementwise_work_of_a_score(score, forward, backward, of_tokens):
    work = work_of(spec=AttentionSpec(score=score))
    pairs = work.pairs * work.heads
    assert flops(work, masked=False).normalizer == forward * pairs + of_tokens
    assert backward_flops(work, masked=False, fused=False).normalizer == backward * pairs + 2 * of_tokens


MASKS = {
    "causal": [Causal()],
    "causal bottom right": [Causal(align="bottom_right")],
    "window": [SlidingWindow(left=2, right=1)],
    "causal window": [Causal(), SlidingWindow(left=2)],
    "strided": [Causal(), Strided(stride=3)],
    "documents": [Documents(lengths=[3, 4])],
    "longformer": [AnyOf(of=[SlidingWindow(left=1, right=1), GlobalTokens(positions=[0])])],
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_masked_counts_only_allowed_pairs(name, masks):
    work = replace(WORKLOADS[name], spec=AttentionSpec(masks=masks))
    allowed = allowed_pairs(masks, work.queries, work.keys, past=work.past) * work.batch
    dense, counted = flops(work, masked=False), flops(work, masked=True)
    assert pair_count(work, masked=True) == allowed
    for stage in ("scores", "normalizer", "values"):
        assert getattr(counted, stage) * work.pairs == getattr(dense, stage) * allowed
    assert counted.projections == dense.projections
    assert counted.output_projection == dense.output_projection


def test_flash_attention_paper_counts():
    """4·S²·D·H for each sequence, half of it when causal, 2.5 times for the backward pass (Dao 2023, section 4.1)."""
    batch, length, heads, width = 4, 2048, 16, 64
    work = work_of(
        batch=batch, queries=length, keys=length, heads=heads, kv_heads=heads, head_dim=width, value_dim=width
    )
    published = 4 * length**2 * width * heads * batch
    forward = flops(work, masked=False).matmul
    assert forward == published
    assert backward_flops(work, masked=False, fused=True).matmul == 2.5 * forward
    causal = replace(work, spec=AttentionSpec(masks=[Causal()]))
    diagonal = 2 * length * width * heads * batch
    assert flops(causal, masked=True).matmul == published // 2 + diagonal


@pytest.mark.parametrize(("milliseconds", "teraflops"), [(3.538, 661), (4.021, 582), (4.105, 570)])
def test_flash_attention_3_table_2(milliseconds, teraflops):
    """Shah et al. 2024, table 2: batch 4, 8448 tokens, 16 heads 128 wide, forward."""
    work = work_of(batch=4, queries=8448, keys=8448, heads=16, kv_heads=16, head_dim=128, value_dim=128)
    assert flops(work, masked=False).matmul / milliseconds / 1e9 == pytest.approx(teraflops, abs=0.5)


@pytest.mark.parametrize("d_model", [64, 512, 4096])
def test_attention_costs_as_much_as_projections_at_twice_the_width(d_model):
    sizes = sizes_of(d_model, 8, 8, d_model // 8, d_model // 8, d_model, d_model, NO_BIAS)
    stages = flops(work_of(sizes, queries=2 * d_model, keys=2 * d_model), masked=False)
    assert stages.scores + stages.values == stages.projections + stages.output_projection


def test_parameters_are_about_four_times_the_width_squared():
    sizes = sizes_of(512, 8, 8, 64, 64, 512, 512, NO_BIAS)
    assert parameter_count(work_of(sizes)) == 4 * 512**2
    assert parameter_count(work_of(replace(sizes, biases=ALL_BIASES))) == 4 * 512**2 + 4 * 512
    assert parameter_count(work_of()) == 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_parameters_are_those_of_the_module(name):
    sizes = WORKLOADS[name].sizes
    if sizes is not None:
        parameters = initial_parameters(sizes, 0, torch.float32)
        assert parameter_count(work_of(sizes)) == sum(tensor.numel() for tensor in parameters.values())


def test_huge_sizes_are_exact():
    length = 10**12
    work = work_of(queries=length, keys=length, batch=1, heads=1, kv_heads=1, head_dim=1, value_dim=1)
    assert flops(work, masked=False).matmul == 4 * 10**24


ROPE, HALF = Rope(), Rope(dim=2)
VECTORS = 2 * (4 * 10 + 2 * 10)  # queries and keys of two sequences, by head
NORM = 27 * VECTORS  # of 6 numbers each: square, sum, scale and weigh, and 3 for the mean


@pytest.mark.parametrize(
    ("spec", "forward", "backward"),
    [
        (AttentionSpec(), 0, 0),
        (AttentionSpec(position=ROPE), 18 * VECTORS + 10 * 9, 18 * VECTORS),
        (AttentionSpec(position=HALF), 6 * VECTORS + 10 * 3, 6 * VECTORS),
        (AttentionSpec(position=Sinusoidal()), 6 * VECTORS + 2 * 10 * 9, 0),
        (AttentionSpec(position=LearnedPosition(length=10)), 6 * VECTORS, 0),
        (AttentionSpec(position=Alibi()), 2 * 2 * 4 * 10 * 10, 0),
        (AttentionSpec(position=RelativeBias()), 2 * 4 * 10 * 10, 2 * 4 * 10 * 10),
        (AttentionSpec(qk_norm=QKNorm()), NORM, 48 * VECTORS),
        (AttentionSpec(qk_norm=QKNorm(over="all_heads")), 24 * VECTORS + 3 * 2 * 20, 48 * VECTORS),
        (AttentionSpec(position=ROPE, qk_norm=QKNorm()), NORM + 18 * VECTORS + 10 * 9, 66 * VECTORS),
    ],
)
def test_positions_and_norms_count_what_they_do(spec, forward, backward):
    work = work_of(kv_heads=2, spec=spec)
    assert flops(work, masked=False).position == forward
    assert backward_flops(work, masked=False, fused=False).position == backward


def test_an_encoding_is_added_once_to_what_stands_in_every_role():
    spec = AttentionSpec(position=Sinusoidal())
    work = work_of(sizes_of(), spec=spec)
    once = 2 * 10 * 24 + 10 * 36  # a sum for each number of both sequences, and the waves of ten places
    assert flops(replace(work, inputs=frozenset({"query"})), masked=False).position == once
    assert flops(work, masked=False).position == 3 * once
    apart = replace(work, inputs=frozenset({"query"}), batched_offsets=True, batched_places=True)
    assert flops(apart, masked=False).position == 2 * (once + 10 * 36)


def test_a_bias_is_counted_for_the_pairs_that_masks_allow():
    work = work_of(spec=AttentionSpec(position=Alibi(), masks=[Causal()]))
    assert flops(work, masked=True).position == 2 * 4 * 2 * 55
