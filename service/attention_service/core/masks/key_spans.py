"""Stretches of keys: entries of a tensor, and sums into it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_service.core.problem import Span


def pick_spans(x: Tensor, dim: int, spans: Sequence[Span]) -> Tensor:
    """The keys of these spans along one dimension; a view if they are side by side."""
    joined = join(spans)
    if len(joined) == 1:
        return x.narrow(dim, joined[0].start, len(joined[0]))
    return torch.cat([x.narrow(dim, span.start, len(span)) for span in joined or [range(0)]], dim)


def add_to_spans(total: Tensor, dim: int, spans: Sequence[Span], x: Tensor) -> None:
    """Add to the keys of these spans what ``pick_spans`` would take there; keys beyond the end are left out."""
    at = 0
    for span in join(spans):
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
    return torch.cat([torch.arange(each.start, each.stop, device=device) for each in join(spans) or [range(0)]])
