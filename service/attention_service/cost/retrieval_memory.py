"""Peak memory of a Hopfield retrieval, rehearsed: what came, the results, and states as they fall.

Of many blocks of states and many updates a few tell of all. Which states settle is not known: those that still fall
are picked out, and it is taken for granted that all do.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from attention_service.core.arrays import TORCH_DTYPES
from attention_service.core.hopfield import Memory, retrieve
from attention_service.core.multihead import merge_heads, split_heads
from attention_service.cost.phases import ROUNDING
from attention_service.cost.rehearsal import Account, most_held
from attention_service.cost.retrieval import Retrieval

_FEW_BLOCKS, _FEW_STEPS = 3, 3
_DTYPES = {4: torch.float32, 8: torch.float64}


def retrieval_peak_bytes(r: Retrieval) -> int:
    """The most that is held at a time."""
    more = r.states // max(r.rows, 1) - _FEW_BLOCKS
    if more < 1:
        return _rehearsed(r)
    few, fewer = (_rehearsed(replace(r, states=r.states - each * r.rows)) for each in (more, more + 1))
    return few + more * (few - fewer)


def _rehearsed(r: Retrieval) -> int:
    steps = min(r.steps, _FEW_STEPS)

    def run(account: Account) -> None:
        states, patterns, mask = _loaded(r)
        beta = _unreal((r.heads,), r)
        others = r.batch, r.heads, r.steps - steps  # their energies, and of a block, which of them are over
        waiting = _unreal((*others, r.states), r), torch.empty(*others, r.rows, dtype=torch.bool, device="meta")
        found = retrieve(
            Memory(patterns, beta, mask), states, steps, 0.0 if r.settles else None, association=r.association
        )
        del states, patterns, mask
        answer = found.states
        if r.output_width is not None:
            weight = _unreal((r.heads, r.output_width, r.width), r)
            answer = torch.einsum("bhsd,hvd->bhsv", answer, weight)
        answer = (merge_heads(answer) if r.merged else answer).to(TORCH_DTYPES[r.reply])
        told = None if found.association is None else found.association.to(answer.dtype)
        del waiting, found, told  # all of it stays to the end

    held = most_held(run, graph=False, threads=r.threads)
    return max(sum(each.values()) for each in held.values()) + ROUNDING


def _loaded(r: Retrieval) -> tuple[Tensor, Tensor, Tensor | None]:
    """States and patterns by head, and which patterns are real."""
    widths = (r.state_width, r.stored_width)
    inner = r.heads * r.width
    states, patterns = (
        torch.empty(
            (r.batch, count, width or inner) if r.merged else (r.batch, r.heads, count, r.width),
            dtype=TORCH_DTYPES[r.reply],
            device="meta",
        ).to(_DTYPES[r.itemsize])
        for count, width in zip((r.states, r.patterns), widths, strict=True)
    )
    mask = None
    if r.masked:
        mask = torch.empty(r.batch, r.patterns, dtype=torch.bool, device="meta")
        real = mask[:, :, None] if r.merged else mask[:, None, :, None]
        patterns = patterns.masked_fill(~real, 0)
    if r.merged:
        states, patterns = (
            split_heads(x if width is None else linear(x, _unreal((inner, width), r)), r.heads)
            for x, width in zip((states, patterns), widths, strict=True)
        )
    return states, patterns, mask


def _unreal(shape: tuple[int, ...], r: Retrieval) -> Tensor:
    return torch.empty(shape, dtype=_DTYPES[r.itemsize], device="meta")
