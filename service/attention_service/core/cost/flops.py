"""Floating-point operations by stage, forward and backward.

A matrix product of ``[m, k]`` by ``[k, n]`` is 2·m·k·n. That leaves room for a bias: k products need k − 1 additions,
and the bias is the k-th. What is left out: the additions by which gradients of one tensor in several roles, or of
biases, are summed (less than one in the width of the model).
"""

from attention_contract.schemas.complexity import PassFlops, StageFlops
from attention_contract.spec import ScaledDot, Softmax
from attention_service.core.cost.pairs import normalizer_cost
from attention_service.core.cost.workload import Workload
from attention_service.core.masks import allowed_pairs


def flops(work: Workload, *, masked: bool) -> StageFlops:
    """One forward pass, over every pair or over those that the spec's masks allow.

    Normalizer, for each pair of each head: scale 1 (unless the score has none); softcap 3 (divide, tanh, multiply);
    masks 1 (add); temperature 1 (divide, unless 1); softmax 5 (maximum, subtract, exp, sum, divide), or what another
    normalizer says that it takes.
    """
    pairs = pair_count(work, masked=masked) * work.heads
    project_in, project_out = _projections(work)
    return _stages(
        projections=project_in,
        scores=2 * pairs * work.head_dim,
        normalizer=pairs * (_before_normalizer(work) + normalizer_cost(work).flops),
        values=2 * pairs * work.value_dim,
        output_projection=project_out,
    )


def backward_flops(work: Workload, *, masked: bool, fused: bool) -> StageFlops:
    """The gradients with respect to inputs and parameters: each matrix product of the forward pass becomes two.

    Normalizer, for each pair of each head: softmax 4 (w·∂w, its sum over the keys, subtract, multiply by w), or what
    another says that it takes; scale 1; temperature 1; softcap 5 (multiply, square, subtract, multiply, divide).

    A fused kernel keeps no weights and recomputes them from the scores: one product, scale, softcap, masks and
    temperature as in the forward pass, and 2 for exp(s − lse). It finds Σ w·∂w from the output instead, with 2·V for
    each query, which leaves 2 of the softmax's 4 for each pair. Source: Dao et al. 2022, algorithm 4. Of
    another normalizer, which no fused kernel here computes, the whole would have to be repeated.
    """
    pairs = pair_count(work, masked=masked) * work.heads
    normalizer = normalizer_cost(work)
    per_pair = normalizer.backward_flops + _scaled(work) + _tempered(work) + (5 if work.spec.softcap is not None else 0)
    per_row = 0
    if fused:
        per_pair += _before_normalizer(work)
        if isinstance(work.spec.normalizer, Softmax):
            per_row = 2 * work.value_dim  # for each pair, the 2 that this saves are spent on exp(s − lse)
        else:
            per_pair += normalizer.flops
    project_in, project_out = _projections(work)
    return _stages(
        projections=2 * project_in,
        scores=(6 if fused else 4) * pairs * work.head_dim,
        normalizer=pairs * per_pair + work.batch * work.heads * work.queries * per_row,
        values=4 * pairs * work.value_dim,
        output_projection=2 * project_out,
    )


def forward_pass(work: Workload) -> PassFlops:
    """The forward pass over all pairs and over the allowed ones."""
    return PassFlops(dense=flops(work, masked=False), masked=flops(work, masked=True))


def backward_pass(work: Workload, *, fused: bool) -> PassFlops:
    """The backward pass over all pairs and over the allowed ones."""
    return PassFlops(
        dense=backward_flops(work, masked=False, fused=fused), masked=backward_flops(work, masked=True, fused=fused)
    )


def pair_count(work: Workload, *, masked: bool) -> int:
    """Query-key pairs of one head over the batch; ``masked``: those that the spec's masks allow, at the offset P."""
    if not masked or not work.spec.masks:
        return work.pairs
    return work.batch * allowed_pairs(work.spec.masks, work.queries, work.keys, past=work.past)


def _scaled(work: Workload) -> int:
    score = work.spec.score
    return int(isinstance(score, ScaledDot) and score.scale != 1)


def _tempered(work: Workload) -> int:
    return int(work.spec.normalizer.temperature != 1)


def _before_normalizer(work: Workload) -> int:
    softcap = 3 if work.spec.softcap is not None else 0
    masks = int(bool(work.spec.masks) or work.request_mask_elements > 0)
    return _scaled(work) + softcap + masks + _tempered(work)


def _projections(work: Workload) -> tuple[int, int]:
    """FLOPs of the projections of queries, keys and values, and of the output projection."""
    s = work.sizes
    if s is None:
        return 0, 0
    queries = work.batch * work.queries
    keys = work.batch * work.new_keys
    into = queries * s.d_model * s.heads * s.head_dim
    into += keys * s.kv_heads * (s.key_width * s.head_dim + s.value_width * s.value_dim)
    return 2 * into, 2 * queries * s.heads * s.value_dim * s.d_model


def _stages(*, projections: int, scores: int, normalizer: int, values: int, output_projection: int) -> StageFlops:
    matmul = projections + scores + values + output_projection
    return StageFlops(
        projections=projections,
        scores=scores,
        normalizer=normalizer,
        values=values,
        output_projection=output_projection,
        matmul=matmul,
        total=matmul + normalizer,
    )
