"""Stretches of keys: entries of a tensor, and sums into it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attention_service.core.problem import Span
from attention_service.core.tensors import to_device

MANY = 64
"""Spans of which each is not worth an operation of its own."""


def pick_spans(x: Tensor, dim: int, spans: Sequence[Span]) -> Tensor:
    """The keys of these spans along one dimension; a view if they are side by side."""
    joined = join(spans)
    if len(joined) == 1:
        return x.narrow(dim, joined[0].start, len(joined[0]))
    if len(joined) > MANY:
        order = sorted(range(x.ndim), key=x.stride, reverse=True)
        ordered = x.permute(order)
        if ordered.is_contiguous():  # of any other tensor, ``index_select`` makes a copy
            picked = ordered.index_select(order.index(dim), to_device(_indices(joined), x.device))
            return picked.permute([order.index(axis) for axis in range(x.ndim)])
    return torch.cat([x.narrow(dim, span.start, len(span)) for span in joined or [range(0)]], dim)


def add_to_spans(total: Tensor, dim: int, spans: Sequence[Span], x: Tensor) -> None:
    """Add to the keys of these spans what ``pick_spans`` would take there; keys beyond the end are left out."""
    at, joined = 0, join(spans)
    if len(joined) > MANY:
        indices = _indices(joined)
        indices = indices[indices < total.shape[dim]]
        total.index_add_(dim, to_device(indices, total.device), x.narrow(dim, 0, len(indices)))
        return
    for span in joined:
        size = max(0, min(span.stop, total.shape[dim]) - span.start)
        if size:
            total.narrow(dim, span.start, size).add_(x.narrow(dim, at, size))
        at += len(span)


def join(spans: Sequence[Span]) -> list[range]:
    """Return the spans, joined where they touch."""
    joined: list[range] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = range(joined[-1].start, span.stop)
        else:
            joined.append(range(span.start, span.stop))
    return joined


def places(spans: Sequence[Span], device: torch.device) -> Tensor:
    """Return the indices of the keys of these spans, int64."""
    joined = join(spans) or [range(0)]
    if len(joined) > MANY:
        return to_device(_indices(joined), device)
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in joined])


def _indices(joined: Sequence[range]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.arange(span.start, span.stop) for span in joined]))
