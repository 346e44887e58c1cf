"""Vector-Jacobian products as from ``torch.autograd.grad``, without its lazy imports."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def pullback(
    outputs: Sequence[Tensor],
    at: Sequence[Tensor],
    upstreams: Sequence[Tensor],
    *,
    again: bool = False,
    keep: bool = False,
) -> list[Tensor]:
    """∂ Σ ⟨output, upstream⟩ with respect to each of ``at``: zeros for one that no output depends on.

    upstreams: one of each output's shape. ``again``: to be differentiated. ``keep``: keep the graph for another
    pullback. Raises ValueError.
    """
    gradients = pullback_where_used(outputs, at, upstreams, again=again, keep=keep)
    return [
        torch.zeros_like(x, requires_grad=again) if gradient is None else gradient
        for x, gradient in zip(at, gradients, strict=True)
    ]


def pullback_where_used(
    outputs: Sequence[Tensor],
    at: Sequence[Tensor],
    upstreams: Sequence[Tensor],
    *,
    again: bool = False,
    keep: bool = False,
) -> Sequence[Tensor | None]:
    """Compute ``pullback``, but None for a tensor that no output depends on.

    ``torch.autograd.grad`` compares the shapes by way of symbolic ones, for which it imports sympy: 30 MiB, and a fifth
    of a second of the first request.
    """
    for output, upstream in zip(outputs, upstreams, strict=True):
        if output.shape != upstream.shape:
            raise ValueError(f"upstream: expected shape {list(output.shape)}, got {list(upstream.shape)}")
    on_graph = tuple(x for x in at if x.requires_grad)  # HRM-Text runs some layers without a graph
    if not on_graph:
        return [None] * len(at)
    gradients = iter(
        _engine_run_backward(
            tuple(outputs), tuple(upstreams), again or keep, again, on_graph, True, accumulate_grad=False
        )
    )
    return [next(gradients) if x.requires_grad else None for x in at]
