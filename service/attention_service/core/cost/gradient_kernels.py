"""Memory of the fused and the blocked kernel with gradients: one call, and its way back."""

from attention_service.core.cost.blocked_memory import backward_tile, blocked
from attention_service.core.cost.fused_blocks_memory import fused_blocks, fused_blocks_backward, in_layout
from attention_service.core.cost.fused_memory import (
    fused,
    fused_backward_workspace,
    fused_factors,
    fused_width,
    keeps_layout,
)
from attention_service.core.cost.gradient_ends import (
    end_of_forward,
    project_backward,
    project_out_backward,
)
from attention_service.core.cost.held import Held
from attention_service.core.cost.memory import far_rows
from attention_service.core.cost.pairs import (
    fused_masks,
    score_cost,
    score_itemsize,
)
from attention_service.core.cost.phases import Ledger
from attention_service.core.cost.tensors import mask_bytes
from attention_service.core.cost.tiles import by_fused
from attention_service.core.cost.workload import Workload


def fused_gradients(ledger: Ledger, work: Workload, *, mask: bool) -> None:
    """The call, and its backward pass: a gradient of each argument."""
    held, masks = Held.of(work), fused_masks(work)
    if mask:
        _written_out(ledger, work)
        return
    fused(ledger, work, graph=True)
    far_rows(ledger, work, graph=True)
    if score_cost(work).query_width:
        each, c = work.batch * work.itemsize, score_cost(work)
        ledger.hold(graph=each * (work.heads * work.queries * c.query_kept + work.kv_heads * work.keys * c.key_kept))
    _keep_arguments(ledger, work)
    end_of_forward(ledger, work, merged=not keeps_layout(work), keeps_context=True)
    project_out_backward(ledger, work, taps=False)
    _far_backward(ledger, work)
    ledger.drop("apart")  # which the blocked kernel keeps with the problem
    if masks.any:
        ledger.phase("backward of the mask", flowing=held.context)
        ledger.drop("flowing")
        ledger.hold(flowing=held.context)
    if fused_width(work) > work.value_dim:  # it was made as wide
        ledger.drop("flowing")
    values = held.kv * work.value_dim // (work.head_dim + work.value_dim)
    width = fused_width(work) if work.threads else 0
    of_values = values * max(width, work.value_dim) // max(work.value_dim, 1)
    score = score_cost(work)
    made = bool(fused_factors(work))
    of_q = held.q * max(width, made * score.query_width or work.head_dim) // max(work.head_dim, 1)
    of_k = (held.kv - values) * max(width, made * score.key_width or work.head_dim) // max(work.head_dim, 1)
    of_factors = of_q + of_k
    workspace = fused_backward_workspace(work)
    ledger.phase("backward of attention", gradients=of_factors + of_values, workspace=workspace)
    ledger.drop("graph", "mask", "padding", "factors", "arguments", "context", "flowing")
    ledger.hold(gradients=held.kv * work.value_dim // (work.head_dim + work.value_dim))
    project_backward(ledger, work, taps=False, mask=mask)


def _keep_arguments(ledger: Ledger, work: Workload) -> None:
    """Of q, k and v those that the call was given: of others, only copies are kept."""
    wide, made = fused_width(work) if work.threads else 0, score_cost(work)
    factors = fused_factors(work) > 0
    narrow = ((made.query_width if factors else 0) or work.head_dim) < wide
    if narrow or (factors and not made.reads):
        ledger.drop("q", "k")
    if work.padded:
        ledger.drop("k", "v")
    if work.value_dim < wide:
        ledger.drop("v")


def _written_out(ledger: Ledger, work: Workload) -> None:
    """PyTorch's own stages, which it takes where the mask needs a gradient; half types are widened in them."""
    held, masks, pairs = Held.of(work), fused_masks(work), work.pairs * work.heads
    a = max(work.itemsize, 4)
    grown = a // work.itemsize
    groups = work.heads // work.kv_heads
    told = masks.combined * a
    ledger.hold(graph=masks.combined + told + masks.together)
    ledger.phase("mask", mask=2 * masks.combined * a + (masks.combined * a if masks.together else 0))
    ledger.hold(factors=(held.q + held.kv * groups) * grown)
    if grown == 1 and groups == 1:  # the values serve as they are
        ledger.lessen("factors", held.kv * work.value_dim // (work.head_dim + work.value_dim))
    ledger.phase("weights", scores=pairs * a, weights=pairs * a)
    ledger.hold(weights=pairs * a)
    ledger.hold(context=held.context)
    ledger.phase("context", context=held.context * grown)
    ledger.drop("q", "k")  # scaled, they are other tensors
    if grown > 1 or groups > 1:
        ledger.drop("v")
    end_of_forward(ledger, work, merged=True)
    project_out_backward(ledger, work, taps=False)
    of_values = held.kv * groups * grown * work.value_dim // (work.head_dim + work.value_dim)
    ledger.phase("backward of attention", of_values=of_values, of_weights=pairs * a)
    ledger.drop("flowing")
    if grown > 1 or groups > 1:
        ledger.lessen("factors", of_values)
    ledger.phase("backward of attention", of_values=of_values, of_weights=pairs * a, of_scores=pairs * a)
    ledger.drop("weights")
    ledger.phase("backward of the mask", of_values=of_values, of_scores=pairs * a, of_mask=2 * told + masks.combined)
    ledger.drop("factors", "q", "k", "v", "graph", "flowing")
    project_backward(ledger, work, taps=False, mask=True)


def _far_backward(ledger: Ledger, work: Workload) -> None:
    """Through the rows of queries apart, whose gradients of all q, k and v, near and far, wait for the kernel's."""
    if not work.apart:
        return
    held = Held.of(work)
    ledger.phase("backward of queries apart", flowing=held.context)
    ledger.drop("far")
    ledger.hold(waiting=2 * held.far)


def blocked_gradients(ledger: Ledger, work: Workload, *, mask: bool) -> None:
    """The call, and its backward pass: a sum for each gradient, narrowed at the end where it is wider."""
    held = Held.of(work)
    if by_fused(work):
        _fused_blocks(ledger, work, held)
        return
    blocked(ledger, work, graph=True)
    far_rows(ledger, work, graph=True)
    end_of_forward(ledger, work, merged=True, keeps_context=True)
    project_out_backward(ledger, work, taps=False)
    _far_backward(ledger, work)
    widened = score_itemsize(work) // work.itemsize
    summed = held.q + held.kv + (mask_bytes(work) if mask else 0)
    ledger.hold(sums=summed * widened)
    backward_tile(ledger, work, mask=mask)
    if widened > 1:
        ledger.phase("backward of attention", gradients=summed)
    ledger.drop("sums", "context", "lse", "flowing", "q", "k", "v")
    ledger.hold(gradients=held.kv * work.value_dim // (work.head_dim + work.value_dim))
    project_backward(ledger, work, taps=False, mask=mask)


def _fused_blocks(ledger: Ledger, work: Workload, held: Held) -> None:
    """Blocks of the fused kernel, forward and back."""
    fused_blocks(ledger, work, graph=True)
    far_rows(ledger, work, graph=True)
    kept = score_cost(work)
    if kept.query_width:
        each = work.batch * work.itemsize
        ledger.hold(
            graph=each * (work.heads * work.queries * kept.query_kept + work.kv_heads * work.keys * kept.key_kept)
        )
    end_of_forward(ledger, work, merged=not in_layout(work), keeps_context=True)
    project_out_backward(ledger, work, taps=False)
    _far_backward(ledger, work)
    fused_blocks_backward(ledger, work)
    ledger.drop("sums", "context", "graph", "flowing", "arguments", "factors", "q", "k", "v")
    ledger.hold(gradients=held.kv * work.value_dim // (work.head_dim + work.value_dim))
    project_backward(ledger, work, taps=False, mask=False)
