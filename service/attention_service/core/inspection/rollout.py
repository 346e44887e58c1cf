"""Rollout and flow over layers of self-attention. Source: Abnar and Zuidema 2020, sections 3.1 and 3.2.

Notation: N layers, H heads, L tokens.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from attention_service.core.blocks import rows_at_once
from attention_service.core.cancellation import checkpoint
from attention_service.core.inspection.head_reader import UnfitNumbers
from attention_service.core.tensors import pick

Heads = Literal["mean", "max", "min"]
_WHOLE: Final = 2**30
"""The capacity of a share of 1: the flow of a token, at most that, is a 32-bit integer."""


def mixed(heads: Iterable[Tensor], combine: Heads, residual: float, discard: float = 0) -> Tensor:
    """Return residual · I + (1 − residual) · A ``[L, L]`` in float64, from the weights ``[L, L]`` of each head.

    discard: the share of the positive weights of each row of A to leave out, the smallest first. Raises
    UnfitNumbers.
    """
    made = torch.empty(0)
    for head, weights in enumerate(heads):
        checkpoint()
        float64_weights = weights.double()
        least, most = torch.aminmax(float64_weights)
        if not (least >= 0 and bool(most.isfinite())):
            raise UnfitNumbers("expected weights that are finite and not negative")
        if not head:
            made = float64_weights.clone()
        elif combine == "mean":
            made += float64_weights
        else:
            made = torch.maximum(made, float64_weights) if combine == "max" else torch.minimum(made, float64_weights)
    if discard:
        for rows in torch.split(made, rows_at_once(1, 1, len(made))):
            _leave_out(rows, discard)
    total = made.sum(-1, keepdim=True)  # a mean's divisor cancels with it
    made = torch.where(total > 0, made / total, 0)
    made *= 1 - residual
    made.diagonal().add_(torch.where(total[:, 0] > 0, residual, 1.0))
    return made


def _leave_out(rows: Tensor, share: float) -> None:
    """Put zeros in place of this share of the positive numbers of each row, the smallest first."""
    checkpoint()
    order = rows.argsort(dim=-1, stable=True)
    zeros = (rows <= 0).sum(-1, keepdim=True)
    dropped = zeros + ((rows.shape[-1] - zeros) * share).long()
    small = torch.arange(rows.shape[-1], device=rows.device) < dropped  # by rank
    rows.masked_fill_(torch.zeros_like(small).scatter_(-1, order, small), 0)


def relevance(heads: Iterable[Tensor]) -> Tensor:
    """Return I + the mean over the heads of their positive parts, ``[L, L]`` in float64.

    The product over the layers is R ← R + relevance · R from R = I. Source: Chefer et al. 2021, eqs. 5 and 6. Raises
    UnfitNumbers.
    """
    made, count = torch.empty(0), 0
    for count, head in enumerate(heads, 1):
        checkpoint()
        positive = head.double().clamp(min=0)
        if not bool(head.isfinite().all()):
            raise UnfitNumbers("expected finite numbers")
        made = positive if count == 1 else made.add_(positive)
    made /= count
    made.diagonal().add_(1)
    return made


def rolled_out(layers: Iterable[Tensor], queries: Sequence[int]) -> Tensor:
    """Return these rows of M_N · … · M_1, ``[queries, L]``, from the M ``[L, L]`` of each layer, the last first."""
    rows: Tensor | None = None
    for layer in layers:
        checkpoint()
        rows = pick(layer, 0, queries) if rows is None else rows @ layer
    if rows is None:
        raise TypeError("there is at least one layer")
    return rows


def flows(layers: Iterable[Tensor], queries: Sequence[int]) -> Tensor:
    """Return the maximum flow of these tokens of the last layer to each input, ``[queries, L]``.

    layers: the M ``[L, L]`` of each, the last first.
    """
    from scipy.sparse.csgraph import maximum_flow  # noqa: PLC0415 - few need it

    levels = [layer.cpu().numpy() for layer in layers]
    tokens = len(levels[0])
    graph = _graph(levels)
    maximum_flows = torch.empty(len(queries), tokens, dtype=torch.float64)
    for row, query in enumerate(queries):
        for token in range(tokens):
            checkpoint()
            sink = len(levels) * tokens + token
            maximum_flows[row, token] = maximum_flow(graph, query, sink, method="dinic").flow_value / _WHOLE
    return maximum_flows


def _graph(levels: "list[np.ndarray[tuple[int, int], np.dtype[np.float64]]]") -> Any:
    """The capacities of the edges from each token of a level to those of the next, which is one layer further down."""
    from scipy.sparse import csr_array  # noqa: PLC0415

    tokens, count = len(levels[0]), len(levels)
    capacities = np.rint(np.concatenate(levels) * _WHOLE).astype(np.int32)  # [N·L, L]
    first = (np.arange(1, count + 1, dtype=np.int32) * tokens).repeat(tokens)
    below = first[:, None] + np.arange(tokens, dtype=np.int32)
    starts = np.concatenate([np.arange(0, count * tokens + 1) * tokens, np.full(tokens, count * tokens**2)])
    size = (count + 1) * tokens
    return csr_array((capacities.ravel(), below.ravel(), starts.astype(np.int32)), shape=(size, size))
