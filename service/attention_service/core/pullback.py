"""Vector-Jacobian products as from ``torch.autograd.grad``, without its lazy imports."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def pullback(output: Tensor, at: Sequence[Tensor], upstream: Tensor, *, again: bool = False) -> list[Tensor]:
    """∂⟨output, upstream⟩ with respect to each of ``at``: zeros for one that the output does not depend on.

    upstream: of the output's shape. ``again``: to be differentiated. Raises ValueError.
    """
    found = pullback_where_used(output, at, upstream, again=again)
    return [
        torch.zeros_like(x, requires_grad=again) if gradient is None else gradient
        for x, gradient in zip(at, found, strict=True)
    ]


def pullback_where_used(
    output: Tensor, at: Sequence[Tensor], upstream: Tensor, *, again: bool = False
) -> Sequence[Tensor | None]:
    """Compute ``pullback``, but None for a tensor that the output does not depend on.

    ``torch.autograd.grad`` compares the shapes by way of symbolic ones, for which it imports sympy: 30 MiB, and a fifth
    of a second of the first request.
    """
    if output.shape != upstream.shape:
        raise ValueError(f"upstream: expected shape {list(output.shape)}, got {list(upstream.shape)}")
    return _engine_run_backward((output,), (upstream,), again, again, tuple(at), True, accumulate_grad=False)
