"""Memory of the materialized kernel with gradients: the way through the stages, and back."""

from attention_service.core.additive import BLOCK
from attention_service.core.cost.encoding import position_cost
from attention_service.core.cost.factors_memory import Factors, Rows
from attention_service.core.cost.gradient_ends import (
    end_of_forward,
    project_backward,
    project_out_backward,
)
from attention_service.core.cost.held import Held
from attention_service.core.cost.pairs import (
    masks_of,
    normalizer_cost,
    score_cost,
    score_itemsize,
    softmax_itemsize,
)
from attention_service.core.cost.phases import Ledger
from attention_service.core.cost.preparing_memory import Apart
from attention_service.core.cost.stages_memory import bias_elements, stages
from attention_service.core.cost.tensors import mask_bytes
from attention_service.core.cost.workload import Workload


def materialized_gradients(ledger: Ledger, work: Workload, *, taps: bool, mask: bool) -> None:
    """The stages and their backward pass."""
    e, c, pairs = work.itemsize, score_itemsize(work), work.pairs * work.heads
    rows, factors = Rows(work.heads, work.queries), Factors.of(work, Rows(work.heads, work.queries))
    score, held = score_cost(work), Held.of(work)
    stages(ledger, work, rows, masks_of(work), frozenset({"context"}), graph=True, traced=taps)
    end_of_forward(ledger, work, merged=True)
    plain = not score.query_width
    saved_q = not (plain and (score.scaled or factors.laid_query or c != e))
    saved_k = bool(score.key_width) or not (factors.laid_key or c != e or work.padded)
    saved_v = not (work.padded or (Apart.of(work).v and work.batch > 1))
    for name, stays in (("q", saved_q or taps), ("k", saved_k or taps), ("v", saved_v or taps)):
        if not stays:
            ledger.drop(name)
    if work.apart and not taps:  # the factors and values that are laid out for products are counted with the others
        ledger.drop("apart")
    project_out_backward(ledger, work, taps=taps)
    _edits_backward(ledger, work, "context", held.context, taps=taps)
    of_v = work.batch * work.kv_heads * work.keys * work.value_dim * e
    if work.apart:  # a gradient of all weights for those of the queries apart as well
        ledger.phase("backward of the context", of_weights=2 * pairs * e, of_values=2 * of_v)
        ledger.hold(gradients=of_v)
    ledger.phase("backward of the context", of_weights=pairs * e, of_values=of_v)
    ledger.hold(gradients=of_v)
    ledger.drop("flowing", "values")
    if not taps:
        ledger.drop("v")
    ledger.hold(flowing=pairs * e)
    if taps and work.sizes is not None:
        ledger.hold(gradients=held.context)
    _weights_backward(ledger, work, taps=taps)
    _hidden_backward(ledger, work, rows, pairs * c, taps=taps, mask=mask)
    _score_backward(ledger, work, factors)
    project_backward(ledger, work, taps=taps, mask=mask)


def _weights_backward(ledger: Ledger, work: Workload, *, taps: bool) -> None:
    """From the weights back to the masked scores."""
    e, c, n, pairs = work.itemsize, score_itemsize(work), softmax_itemsize(work), work.pairs * work.heads
    normalizer = normalizer_cost(work)
    if work.dropped:
        ledger.phase("backward of dropout", of_weights=pairs * e)
        ledger.drop("dropout")
    if (normalizer.apart or e != n) and not taps:
        ledger.drop("weights")
    if work.edits_of("weights") and not (taps or normalizer.apart or e != n):  # what the values were weighed by
        ledger.lessen("edited", pairs * e)
    _edits_backward(ledger, work, "weights", pairs * e, taps=taps)
    if e != n:
        ledger.phase("backward of the weights", of_weights=pairs * n)
    if taps:
        ledger.hold(gradients=pairs * e)
        if e == n:
            ledger.drop("flowing")
    kept = ledger.held.pop("normalized", 0) or ledger.held.pop("weights", 0)
    ledger.drop("flowing")
    shared = pairs * n if taps and e == n and not normalizer.fills else 0  # the gradient of the weights is the tap's
    ledger.phase("backward of the weights", normalizing=pairs * normalizer.held_backward - shared)
    if taps and not normalizer.apart and e == n:
        ledger.hold(weights=kept)
    ledger.hold(flowing=pairs * c)


def _score_backward(ledger: Ledger, work: Workload, factors: Factors) -> None:
    """From the scores back to queries and keys."""
    c, score = score_itemsize(work), score_cost(work)
    of_q = factors.query or work.batch * work.heads * work.queries * work.head_dim * c
    of_k = factors.key or work.batch * work.kv_heads * work.keys * work.head_dim * c
    layers = score.backward_layers * min(BLOCK, work.pairs * work.heads * score.layer) * c
    if work.apart:
        ledger.phase("backward of queries apart", of_scores=2 * work.pairs * work.heads * c)
    ledger.phase("backward of the scores", of_queries=of_q, of_keys=of_k, layers=layers)
    ledger.drop("flowing", "graph")
    ledger.phase("backward of q and k", flowing=of_q + of_k + (factors.wide or of_q))


def _hidden_backward(ledger: Ledger, work: Workload, rows: Rows, scores: int, *, taps: bool, mask: bool) -> None:
    """From the masked scores back to the scores."""
    _edits_backward(ledger, work, "masked_scores", scores, taps=taps)
    masks = masks_of(work)
    if masks.any:
        ledger.phase("backward of the mask", of_scores=scores)
        if taps:
            ledger.hold(gradients=scores)
        if mask:
            ledger.hold(gradients=mask_bytes(work))
        ledger.drop("mask")
    if (elements := bias_elements(work)) and (kept := position_cost(work).pair_kept):
        of_bias = elements * score_itemsize(work) if elements < rows.pairs(work) else 0
        ledger.phase("backward of the bias", of_bias=of_bias)
        ledger.lessen("graph", elements // work.heads * kept)
    _edits_backward(ledger, work, "capped_scores", scores, taps=taps)
    if work.spec.softcap is not None:
        ledger.phase("backward of the softcap", of_scores=scores * (2 if taps else 1))
        ledger.drop("capped")
        if taps:
            ledger.hold(gradients=scores)
    _edits_backward(ledger, work, "scores", scores, taps=taps)


_ON_THE_WAY_BACK = {"set": 1, "value": 1, "scale": 2, "renormalize": 5}


def _edits_backward(ledger: Ledger, work: Workload, tap: str, size: int, *, taps: bool) -> None:
    """Where a tap was left as it was its gradient comes back, and by what it was multiplied or divided.

    ``taps``: that of the tap itself stays beside them.
    """
    if edits := work.edits_of(tap):
        steps = max(_ON_THE_WAY_BACK[does] + (taps and does in {"scale", "renormalize"}) for does in edits)
        ledger.phase("backward of the edits", of_edits=size * steps)
        if not taps:
            ledger.drop("edited")
