"""Sums over the hidden layer of additive attention, in blocks; the backward pass recomputes the layer."""

from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from attention_service.core.tape import Sketch, Tape

BLOCK = 2**20
"""Elements of the hidden layer ``[B, H, queries, keys, N]`` that are held at a time."""
_FEW = 3


def additive_scores(a: Tensor, c: Tensor, v: Tensor) -> Tensor:
    """Compute Σ_n v_n tanh(a_n + c_n) for every query and key.

    a ``[B, H, Q, N]``, c ``[B, H, K, N]`` and v ``[H, N]`` give ``[B, H, Q, K]``. The backward pass keeps only these
    and can be differentiated again. Source: Bahdanau et al. 2015, appendix A.1.2.
    """
    scores: Tensor = _Additive.apply(a, c, v)  # type: ignore[no-untyped-call]
    return scores


def sketched_sums(tape: Tape, a: Sketch, c: Sketch, v: Sketch) -> Sketch:
    """``additive_scores``, step by step, in as many blocks as there are on average."""
    batch, heads, queries, width = a.dims
    keys, e = c.dims[2], a.itemsize
    each = max(1, int(batch * heads * width))
    columns = max(1, min(keys, BLOCK // each))
    rows = max(1, BLOCK // (each * int(columns)))
    down, across = -(-queries // rows), -(-keys // columns)
    scores = Sketch((batch, heads, queries, keys), e, tracked=a.tracked or c.tracked or v.tracked)
    hidden = scores.size * width * e
    blocks = down * across
    entering = a.bytes * across + c.bytes * down  # each block of queries meets each of keys
    tape.does(entering, hidden, 0, blocks)
    tape.does(hidden, hidden, scores.size * width, blocks)
    each_v = v.bytes
    if batch > 1 and heads > 1:
        each_v = batch * v.bytes
        tape.does(v.bytes * blocks, each_v * blocks, 0, blocks)
    tape.does(hidden + each_v * blocks, scores.bytes, 0, blocks)
    tape.does(scores.bytes, scores.bytes, 0, blocks)

    def step() -> None:
        tape.does(0, v.bytes)
        tape.does(entering, hidden, 0, blocks)
        tape.does(hidden, hidden, scores.size * width, blocks)
        tape.does(scores.returned + hidden, batch * v.bytes * blocks, 0, blocks)
        tape.does(batch * v.bytes * blocks, v.bytes * blocks, 0, blocks)
        tape.does(2 * v.bytes * blocks, v.bytes * blocks, 0, blocks)
        tape.does(2 * hidden, 2 * hidden, 0, 2 * blocks)
        tape.does(hidden + v.bytes * blocks, hidden, 0, blocks)
        tape.does(hidden + scores.returned, hidden, 0, blocks)
        for x, others in ((a, across), (c, down)):
            tape.does(hidden, x.bytes * others, 0, blocks)
            tape.does(x.bytes * (2 * others - 1), x.bytes * others, 0, blocks)  # the first is added to a number
            tape.does(x.bytes, x.bytes)
        tape.give(v, v.size)
        tape.give(c, c.size)
        tape.give(a, a.size)

    return tape.later(scores, step) if scores.tracked else scores


class _Additive(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, c: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(a, c, v)
        scores = a.new_empty(*a.shape[:3], c.shape[2])
        for rows, columns in product(*_cuts(a, c)):
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
        for rows, columns in product(*cuts):
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


def _cuts(a: Tensor, c: Tensor) -> tuple[list[slice], list[slice]]:
    """Of queries and keys: whole rows of keys where one fits, parts of a row otherwise.

    Of tensors without numbers, which have sizes alone, the first two and the last, unless a graph keeps what is made
    of each.
    """
    each = max(1, a.shape[0] * a.shape[1] * a.shape[3])
    columns = max(1, min(c.shape[2], BLOCK // each))
    rows = max(1, BLOCK // (each * columns))
    found = []
    for length, step in ((a.shape[2] if c.shape[2] else 0, rows), (c.shape[2], columns)):
        cuts = [slice(start, min(start + step, length)) for start in range(0, length, step)]
        few = a.is_meta and len(cuts) > _FEW and not torch.is_grad_enabled()
        found.append([*cuts[:2], cuts[-1]] if few else cuts)
    return found[0], found[1]


def _left_out(x: Tensor, cuts: list[slice]) -> dict[int, Tensor]:
    """Where some of it is gone through alone: the gradients of the rest, made already."""
    left = x.shape[2] - sum(cut.stop - cut.start for cut in cuts)
    return {-1: x.new_empty(*x.shape[:2], left, x.shape[3])} if cuts and left else {}
