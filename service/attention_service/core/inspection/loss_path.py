"""A number L of the output, and its gradients with respect to the context along the path from zero to all weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from attention_service.core.blocks import SCORES_AT_ONCE
from attention_service.core.cancellation import checkpoint
from attention_service.core.multihead import merge_heads
from attention_service.core.pullback import pullback

Edited = Callable[[Tensor], Tensor]
"""The context after its edits, from that before them."""
Loss = Callable[[Tensor], Tensor]
"""L of each sequence, ``[B]``, from the context after its edits; of a batch that comes several times too."""
_WITH_HEADS = 4


def inner_product(output: Tensor, upstream: Tensor | None) -> Tensor:
    """L = Σ output · upstream of each sequence, ``[B]``; an upstream of None stands for ones."""
    return _sums(output if upstream is None else output * upstream)


def log_likelihood(output: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """L = Σ log softmax(weight · output + bias)[target] of each sequence, ``[B]``.

    weight ``[C, W]``, where W is the width of the output, heads side by side; targets ``[B, Q]``, −1 to count nothing.
    The output may be that of so many batches of targets.
    """
    targets = targets.repeat(len(output) // max(len(targets), 1), 1)
    merged = merge_heads(output) if output.ndim == _WITH_HEADS else output
    scores = linear(merged, weight, bias)  # [B, Q, C]
    scores = scores.to(_wide(scores.dtype))
    log_p = scores.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1) - scores.logsumexp(-1)
    return _sums(log_p.masked_fill(targets < 0, 0))


def _sums(x: Tensor) -> Tensor:
    return x.to(_wide(x.dtype)).flatten(1).sum(1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Path:
    """L and its gradients where the weights are α·A, with A the weights as they are at α = 1."""

    gradient: Tensor
    """∂L/∂context at α = 1, before the edits of the context: ``[B, H, Q, V]``."""
    after_edits: Tensor
    """∂L/∂context after them."""
    mean: Tensor
    """The mean of ∂L/∂context before the edits over the points of the path."""
    ends: tuple[Tensor, Tensor]
    """L at α = 0 and at α = 1."""

    def completeness(self, context: Tensor) -> dict[str, Tensor]:
        """The sum of the integrated attributions, the change of L along the path, and their difference, ``[B]`` each.

        Σ A ⊙ mean(∂L/∂A) over the keys is the context times the mean of its gradients, whatever the number of keys.
        """
        attributed = inner_product(context, self.mean)
        expected = self.ends[1] - self.ends[0]
        return {"attributed": attributed, "expected": expected, "gap": attributed - expected}


def path_of(context: Tensor, edited: Edited, loss: Loss, points: int = 1, at_once: int = 1) -> Path:
    """Differentiate L at the points α = k/points, k = 1 … points, where the context is α times ``[B, H, Q, V]``.

    at_once: the points that are one batch, in which the sequences come once for each point.
    """
    at_one, gradient, after_edits = _differentiated(context, edited, loss)
    mean, wide = gradient, _wide(context.dtype)
    if points > 1:
        mean = gradient / points
        for start in range(1, points, at_once):
            checkpoint()
            alphas = torch.arange(start, min(start + at_once, points), dtype=wide, device=context.device) / points
            batch = (context[None] * alphas.view(-1, 1, 1, 1, 1)).to(context.dtype)  # [points, B, H, Q, V]
            by_point = _differentiated(batch.flatten(0, 1), edited, loss)[1].view_as(batch)
            mean.add_(by_point[0] if len(batch) == 1 else by_point.sum(0), alpha=1 / points)
            del batch, by_point
    at_zero = loss(edited(torch.zeros_like(context)))
    return Path(gradient, after_edits, mean, (at_zero, at_one))


def points_at_once(points: int, numbers: int) -> int:
    """Return the points of a path that are one batch, of which each has so many numbers."""
    return max(1, min(points - 1, SCORES_AT_ONCE // max(1, numbers)))


def _differentiated(context: Tensor, edited: Edited, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """L, and its gradients with respect to the context before and after its edits."""
    before = context.detach().requires_grad_()
    after = edited(before).view_as(before)
    loss_value = loss(after)
    gradient, after_edits = pullback([loss_value], [before, after], [torch.ones_like(loss_value)])
    return loss_value.detach(), gradient, after_edits
