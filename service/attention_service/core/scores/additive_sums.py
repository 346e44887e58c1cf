"""Sums over the hidden layer of additive attention, in blocks; the backward pass recomputes the layer."""

from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from attention_service.core.blocks import MAX_PARTS_APART, REPEATED

BLOCK = 2**20
"""Elements of the hidden layer ``[B, H, queries, keys, N]`` that are held at a time."""


def additive_scores(a: Tensor, c: Tensor, v: Tensor) -> Tensor:
    """Compute Σ_n v_n tanh(a_n + c_n) for every query and key.

    a ``[B, H, Q, N]``, c ``[B, H, K, N]`` and v ``[H, N]`` give ``[B, H, Q, K]``. The backward pass keeps only these
    and can be differentiated again. Source: Bahdanau et al. 2015, appendix A.1.2.
    """
    scores: Tensor = _Additive.apply(a, c, v)  # type: ignore[no-untyped-call]
    return scores


class _Additive(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, c: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(a, c, v)
        scores = a.new_empty(*a.shape[:3], c.shape[2])
        for (rows, down), (columns, across) in product(*_cuts(a, c)):
            with REPEATED.get()(down * across):
                hidden = _hidden(a[:, :, rows], c[:, :, columns])  # [B, H, q, k, N]
                scores[:, :, rows, columns] = (hidden.flatten(2, 3) @ v[..., None]).view(hidden.shape[:4])
        return scores

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With t = tanh(a + c): ∂v = Σ ∂s·t, and ∂s·v·(1 − t²) summed over the keys is ∂a, over the queries ∂c."""
        a, c, v = ctx.saved_tensors
        cuts = _cuts(a, c)
        queries, keys = (_left_out(x, of) for x, of in zip((a, c), cuts, strict=True))
        of_v = torch.zeros_like(v)
        for (rows, down), (columns, across) in product(*cuts):
            with REPEATED.get()(down * across):
                hidden = _hidden(a[:, :, rows], c[:, :, columns])
                given = upstream[:, :, rows, columns]
                of_v = of_v + (given.flatten(2)[:, :, None] @ hidden.flatten(2, 3)).squeeze(2).sum(0)
                inner = (1 - hidden.square()) * v[:, None, None] * given[..., None]
                queries[rows.start] = inner.sum(3) + queries.get(rows.start, 0)
                keys[columns.start] = inner.sum(2) + keys.get(columns.start, 0)
        of_a = torch.cat([*queries.values()], 2) if queries else torch.zeros_like(a)
        of_c = torch.cat([*keys.values()], 2) if keys else torch.zeros_like(c)
        return of_a, of_c, of_v


def _hidden(a: Tensor, c: Tensor) -> Tensor:
    return torch.tanh(a[:, :, :, None] + c[:, :, None])


Cuts = list[tuple[slice, int]]


def _cuts(a: Tensor, c: Tensor) -> tuple[Cuts, Cuts]:
    """Return blocks of queries and keys with multiplicities: whole rows of keys if one fits, else parts of a row.

    Meta tensors without a graph get the first two blocks and the last alone, since equal blocks need equal memory.
    """
    row = max(1, a.shape[0] * a.shape[1] * a.shape[3])
    columns = max(1, min(c.shape[2], BLOCK // row))
    rows = max(1, BLOCK // (row * columns))
    cuts = []
    for length, step in ((a.shape[2] if c.shape[2] else 0, rows), (c.shape[2], columns)):
        starts = range(0, length, step)
        few = a.is_meta and len(starts) > MAX_PARTS_APART and not torch.is_grad_enabled()
        counts = [(0, 1), (1, len(starts) - 2), (-1, 1)] if few else [(index, 1) for index in range(len(starts))]
        cuts.append([(slice(starts[at], min(starts[at] + step, length)), times) for at, times in counts])
    return cuts[0], cuts[1]


def _left_out(x: Tensor, cuts: Cuts) -> dict[int, Tensor]:
    """Return the gradients of the skipped blocks if only some blocks are computed; they are allocated already."""
    left = x.shape[2] - sum(cut.stop - cut.start for cut, _ in cuts)
    return {-1: x.new_empty(*x.shape[:2], left, x.shape[3])} if cuts and left else {}
