"""Floating-point operations by stage, forward and backward.

A matrix product of ``[m, k]`` by ``[k, n]`` is 2·m·k·n. That leaves room for a bias: k products need k − 1 additions,
and the bias is the k-th. The sums of gradients of one tensor in several roles, and of biases, are not counted: they are
fewer than one in the width of the model.
"""

from collections.abc import Collection

from attention_contract.schemas.costs.complexity import PassFlops, StageFlops
from attention_contract.spec import Softmax
from attention_service.core.masks.pair_count import allowed_pairs
from attention_service.cost.approximate import approximated, method_flops
from attention_service.cost.attention import SizedAttention
from attention_service.cost.kernels import kernel_of
from attention_service.cost.pairs import PAIR_TAPS, mask_elements, normalizer_cost, score_cost
from attention_service.cost.position_cost import position_cost, token_flops
from attention_service.cost.tensor_bytes import projections

EVERYTHING = frozenset({"inputs", "parameters"})
"""Kinds of leaves that gradients are with respect to."""
_ORDER = ("scores", "capped_scores", "masked_scores", "lse", "weights")
"""Taps over pairs, in the order of the computation."""


def flops(x: SizedAttention, *, masked: bool) -> StageFlops:
    """Count one forward pass, over every pair or over those that the spec's masks allow.

    Scores: the matrix products that the score states for pairs, queries and keys. Queries with projections of their
    own count twice in scores and values: once with all others, and once with their own keys.

    Normalizer, for each pair of each head: the score's elementwise work (a scale 1); softcap 3 (divide, tanh,
    multiply); masks 1 (add); temperature 1 (divide, unless 1); softmax 5 (maximum, subtract, exp, sum, divide), or the
    cost that another normalizer states; dropout 1 (divide). The score's elementwise work on queries and keys is added.

    Position: the work of the encoding and of the norm of queries and keys per token, and a bias for each pair.

    A method that approximates states its own cost, whatever ``masked``.
    """
    if approximated(x) is not None:
        return method_flops(x, backward=False)
    pairs = pair_count(x, masked=masked) * x.heads
    project_in, project_out = projections(x)
    products, others = _of_tokens(x)
    return _stages(
        projections=project_in,
        position=token_flops(x)[0] + pairs * position_cost(x).pair,
        scores=(pairs + _apart_pairs(x)) * score_cost(x).pair_products + products,
        normalizer=pairs * (_before_normalizer(x) + normalizer_cost(x).flops + x.dropped) + others,
        values=2 * (pairs + _apart_pairs(x)) * x.value_dim,
        output_projection=project_out,
    )


def backward_flops(x: SizedAttention, *, masked: bool, fused: bool, wrt: Collection[str] = EVERYTHING) -> StageFlops:
    """Count the gradients of inputs and parameters: each matrix product of the forward pass becomes two.

    A projection has one product for each of them that gradients are requested for, by ``wrt``; the rest always has two.

    Normalizer, for each pair of each head: softmax 4 (w·∂w, its sum over the keys, subtract, multiply by w), or what
    the cost that another normalizer states; the score's own, a scale 1; temperature 1; softcap 5 (multiply, square,
    subtract, multiply, divide); dropout 1. The score's work on queries and keys counts twice.

    A fused kernel keeps no weights and recomputes them from the scores: one product, scale, softcap, masks and
    temperature as in the forward pass, and 2 for exp(s − lse). It finds Σ w·∂w from the output instead, with 2·V for
    each query, which leaves 2 of the softmax's 4 for each pair. Source: Dao et al. 2022, algorithm 4. No fused kernel
    here computes another normalizer, which would have to be repeated as a whole.
    """
    if approximated(x) is not None:
        return method_flops(x, backward=True)
    pairs = pair_count(x, masked=masked) * x.heads
    normalizer = normalizer_cost(x)
    score = score_cost(x)
    per_pair = normalizer.backward_flops + score.pair_backward_flops + _tempered(x) + x.dropped
    per_pair += 5 if x.spec.softcap is not None else 0
    per_row = 0
    if fused:
        per_pair += _before_normalizer(x)
        if isinstance(x.spec.normalizer, Softmax):
            per_row = 2 * x.value_dim  # for each pair, the 2 that this saves are spent on exp(s − lse)
        else:
            per_pair += normalizer.flops
    project_in, project_out = projections(x)
    products, others = _of_tokens(x)
    backward = score.pair_backward_products
    backward = 2 * score.pair_products if backward is None else backward
    again = score.pair_products if fused else 0
    return _stages(
        projections=len(wrt) * project_in,
        position=token_flops(x)[1] + pairs * position_cost(x).pair_backward,
        scores=(pairs + _apart_pairs(x)) * (backward + again) + 2 * products,
        normalizer=pairs * per_pair + x.batch * x.heads * x.queries * per_row + 2 * others,
        values=4 * (pairs + _apart_pairs(x)) * x.value_dim,
        output_projection=(1 + ("parameters" in wrt)) * project_out,
    )


def tap_flops(x: SizedAttention, taps: Collection[str], kernel: str) -> int:
    """FLOPs of the stages that are recomputed for the taps that a kernel does not keep.

    For each pair: the score's, the softcap's 3, 1 for masks, the bias's, and the
    normalizer's, of which the log-sum-exp needs all but the division; each only as far as the last tap needs.
    """
    missing = PAIR_TAPS.intersection(taps) - kernel_of(x, kernel).keeps
    if approximated(x) is not None or not missing:
        return 0
    last = max(_ORDER.index(tap) for tap in missing)
    score = score_cost(x)
    pair = score.pair_products + score.pair_flops
    if last >= 1 and x.spec.softcap is not None:
        pair += 3
    if last >= 2:
        pair += (mask_elements(x) > 0) + position_cost(x).pair
    if last >= 3:
        pair += (x.spec.normalizer.temperature != 1) + normalizer_cost(x).flops - (last == 3)
    read_by = x.heads if score.by_query_head else min(x.heads, x.kv_heads)
    tokens = x.heads * x.queries * (score.query_products + score.query_flops)
    tokens += read_by * x.keys * (score.key_products + score.key_flops)
    return x.batch * (x.heads * x.queries * x.keys * pair + tokens)


def executed_flops(x: SizedAttention, kernel: str) -> int:
    """FLOPs of one forward pass with this kernel: every pair, except the skipped ones."""
    return _executed(flops(x, masked=False), x, kernel)


def executed_backward_flops(x: SizedAttention, kernel: str, wrt: Collection[str] = EVERYTHING) -> int:
    """FLOPs of one backward pass with this kernel, with recomputation."""
    fused = kernel_of(x, kernel).recomputes
    return _executed(backward_flops(x, masked=False, fused=fused, wrt=wrt), x, kernel)


def _executed(stages: StageFlops, x: SizedAttention, kernel: str) -> int:
    """FLOPs that the kernel executes."""
    attention = stages.scores + stages.normalizer + stages.values
    share = kernel_of(x, kernel).executed(x).pairs / x.pairs if x.pairs else 1.0
    return stages.total if share == 1 else stages.total - attention + round(attention * share)


SECOND_PASSES = 2
"""Backward passes that equal the gradient of gradients. The attention's four own products have six factors beside the
given ∂L/∂output, and the path from the weights back to q and k takes two more products."""


def forward_pass(x: SizedAttention) -> PassFlops:
    """The forward pass over all pairs and over the allowed ones."""
    return PassFlops(dense=flops(x, masked=False), masked=flops(x, masked=True))


def backward_pass(x: SizedAttention, *, fused: bool) -> PassFlops:
    """The backward pass over all pairs and over the allowed ones."""
    return PassFlops(
        dense=backward_flops(x, masked=False, fused=fused), masked=backward_flops(x, masked=True, fused=fused)
    )


def pair_count(x: SizedAttention, *, masked: bool) -> int:
    """Query-key pairs of one head over the batch; ``masked``: those that the spec's masks allow, at the offset P."""
    if not masked or not x.spec.masks:
        return x.pairs
    allowed = allowed_pairs(x.spec.masks, x.queries, x.sequence_keys, past=x.past)
    return x.batch * (allowed + x.queries * x.added_keys)


def _apart_pairs(x: SizedAttention) -> int:
    """Pairs that are computed once more, for queries with projections of their own."""
    return x.batch * x.heads * x.apart * x.keys


def _of_tokens(x: SizedAttention) -> tuple[int, int]:
    """FLOPs of the score on queries and keys, independent of the pairs: matrix products, and the rest."""
    score = score_cost(x)
    queries = x.batch * x.heads * x.queries
    keys = x.batch * (x.heads if score.by_query_head else x.kv_heads) * x.keys
    products = queries * score.query_products + keys * score.key_products
    return products, queries * score.query_flops + keys * score.key_flops


def _tempered(x: SizedAttention) -> int:
    return int(x.spec.normalizer.temperature != 1)


def _before_normalizer(x: SizedAttention) -> int:
    softcap = 3 if x.spec.softcap is not None else 0
    masks = int(bool(x.spec.masks or x.mask_shape))
    return score_cost(x).pair_flops + softcap + masks + _tempered(x)


def _stages(
    *, projections: int, position: int, scores: int, normalizer: int, values: int, output_projection: int
) -> StageFlops:
    matmul = projections + scores + values + output_projection
    return StageFlops(
        projections=projections,
        position=position,
        scores=scores,
        normalizer=normalizer,
        values=values,
        output_projection=output_projection,
        matmul=matmul,
        total=matmul + position + normalizer,
    )
