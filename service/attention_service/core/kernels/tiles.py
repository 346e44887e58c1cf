"""The stages up to the masked scores, over one tile at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from attention_service.core.cancellation import checkpoint
from attention_service.core.dropout import kept
from attention_service.core.kernels.hiding import Limits
from attention_service.core.kernels.tiling import Block, Layout, Strip, Tiling
from attention_service.core.masks.pattern import Pattern
from attention_service.core.masks.rules import MAX_POSITION, pattern_of
from attention_service.core.masks.visibility import real_keys
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions.pair_bias import pair_bias
from attention_service.core.problem import Problem
from attention_service.core.scores import SCORES


@dataclass(frozen=True)
class Leaves:
    """The tensors from which one tile's scores are computed, and its values."""

    q: Tensor
    """``[B, H, q, D]``, as ``k`` in the dtype of the scores."""
    k: Tensor
    """``[B, Hkv, k, D]``, zeros for padding."""
    v: Tensor
    """``[B, Hkv, k, V]``, zeros for padding, in the dtype of the sums."""
    told: Tensor | None
    """The request's mask where it is added, ``[1 or B, 1 or H, 1 or q, 1 or k]``, in float32 or wider."""


class Group:
    """Sequences whose queries stand at the same positions, looked at together."""

    def __init__(self, problem: Problem, sequences: slice, first: int, limits: Limits, pattern: Pattern) -> None:
        self.sequences = sequences
        self.problem = problem = _of(problem, sequences)
        self.first = first
        self.dtype = scored_in(problem)
        self.sums_in = torch.promote_types(self.dtype, torch.float32)
        self.real = real_keys(problem)  # [B, K], those that the spec added included
        self._limits, self._pattern = limits, pattern
        self._score = SCORES.of(problem.spec.score)
        self._bias = pair_bias(problem, self.dtype)
        mask = problem.mask
        self._mask = None if mask is None else mask.view((1,) * (4 - mask.ndim) + mask.shape)

    @property
    def lengths(self) -> Tensor:
        """``[B]``: how many keys of each sequence are no padding."""
        batch, _, keys, _ = self.problem.k.shape
        return torch.full((batch,), keys, device=self.problem.k.device) if self.real is None else self.real.sum(-1)

    def met(self) -> Tensor | None:
        """Bool ``[K]``: the keys that are no padding in some sequence; None where all are."""
        return None if self.real is None else self.real[:, : self.problem.keys].any(0)

    def blocks(self, tiling: Tiling, *, whole_rows: bool) -> Iterator[Block]:
        """The tiles to look at."""
        real = self.met()
        real = None if real is None else real.cpu()
        queries, keys = self.problem.q.shape[2], self.problem.keys
        layout = Layout(self._pattern, self.first, queries, keys, self.problem.added_keys, real)
        return layout.blocks(tiling, whole_rows=whole_rows)

    def leaves(self, block: Block, strip: Strip) -> Leaves:
        """The parts of q, k, v and the mask that meet in a tile."""
        checkpoint()
        q, k, v = self.problem.q, self.problem.k, self.problem.v
        k, v = gather(k, 2, strip), gather(v, 2, strip)
        if self.real is not None:
            padded = ~gather(self.real, 1, strip)[:, None, :, None]
            k, v = k.masked_fill(padded, 0), v.masked_fill(padded, 0)
        told = None
        if self._mask is not None and self._mask.dtype != torch.bool:
            # Its gradient may be a sum over keys, and is not rounded to a half type before.
            told = self._told(self._mask, block, strip).to(torch.promote_types(self._mask.dtype, torch.float32))
        return Leaves(q[:, :, block.start : block.stop].to(self.dtype), k.to(self.dtype), v.to(self.sums_in), told)

    def scores(self, leaves: Leaves, block: Block, strip: Strip) -> Tensor:
        """``[B, H, q, k]``: what is added to them included, nothing hidden yet; a tensor of its own."""
        x = self._score.scores(leaves.q, leaves.k, self.problem.learned)
        softcap = self.problem.spec.softcap
        if softcap is not None:
            x = softcap * torch.tanh(x / softcap)
        if self._bias is not None:
            queries = slice(block.start, block.stop)
            biases = [self._bias.tile(queries, slice(*span)) for span in strip.spans]
            x = x + (biases[0] if len(biases) == 1 else torch.cat(biases, -1))
        if leaves.told is not None:
            x = x + leaves.told.masked_fill(leaves.told == -torch.inf, 0).to(x.dtype)
        return x

    def hide(self, x: Tensor, leaves: Leaves, block: Block, strip: Strip) -> Tensor:
        """The scores, in place, with −∞ wherever it is forbidden to look."""
        column = 0
        for piece in strip.pieces:
            width = piece.stop - piece.start
            if piece.masked:
                part = x[..., column : column + width]
                queries = block.start + self.first, block.stop + self.first
                limits = self._limits.of(queries, (piece.start, piece.stop))
                # A minimum is the fastest, but it keeps NaN; to look for one on a GPU would wait for it.
                if not part.is_cuda and bool(part.sum().isfinite()):
                    torch.minimum(part, limits, out=part)
                else:
                    part.masked_fill_(limits == -torch.inf, -torch.inf)
            column += width
        if self.real is not None:
            x.masked_fill_(~gather(self.real, 1, strip)[:, None, None], -torch.inf)
        if leaves.told is not None:
            x.masked_fill_(leaves.told == -torch.inf, -torch.inf)
        elif self._mask is not None:
            x.masked_fill_(~self._told(self._mask, block, strip), -torch.inf)
        return x

    def added(self, block: Block, strip: Strip) -> Tensor:
        """``[1, 1, q, k]``, in the dtype of the scores: −∞ where the masks of positions forbid to look, else 0."""
        queries = block.start + self.first, block.stop + self.first
        mask = torch.zeros(block.stop - block.start, strip.width, dtype=self.dtype, device=self.problem.q.device)
        column = 0
        for piece in strip.pieces:
            width = piece.stop - piece.start
            if piece.masked:
                part = mask[:, column : column + width]
                torch.minimum(part, self._limits.of(queries, (piece.start, piece.stop)), out=part)
            column += width
        return mask[None, None]

    def keep(self, block: Block, strip: Strip) -> Tensor | None:
        """Bool ``[B, H, q, k]``: which weights dropout keeps; None where there is none."""
        if self.problem.dropout is None:
            return None
        heads, device = self.problem.q.shape[1], self.problem.q.device
        ranges = ((self.sequences.start, self.sequences.stop), (0, heads), (block.start, block.stop))
        of_batch, of_heads, of_queries = (torch.arange(*each, device=device) for each in ranges)
        keys = torch.cat([torch.arange(*span, device=device) for span in strip.spans])
        return kept(self.problem.dropout, of_batch, of_heads, of_queries, keys)

    def add_mask_gradient(self, total: Tensor, gradient: Tensor, block: Block, strip: Strip) -> None:
        """Add the gradient of ``told`` to that of the whole mask ``[.., .., .., ..]``, of rank 4."""
        rows = slice(block.start, block.stop) if total.shape[2] != 1 else slice(None)
        batch = self.sequences if total.shape[0] != 1 else slice(None)
        total = total[batch, :, rows]
        if total.shape[-1] == 1 and self.problem.keys != 1:
            total += gradient[..., : _width(strip, self.problem.keys)].sum(-1, keepdim=True)
            return
        column = 0
        for start, stop in strip.spans:
            last = min(stop, total.shape[-1])
            if last > start:
                total[..., start:last] += gradient[..., column : column + last - start]
            column += stop - start

    def _told(self, mask: Tensor, block: Block, strip: Strip) -> Tensor:
        """A part of the request's mask: one that is shorter than the keys hides the rest, but not what was added."""
        if mask.shape[2] != 1:
            mask = mask[:, :, block.start : block.stop]
        hidden, shown = (False, True) if mask.dtype == torch.bool else (-torch.inf, 0.0)
        keys, parts = self.problem.keys, []
        one_column = mask.shape[-1] == 1 and keys != 1
        for start, stop in strip.spans:
            last = min(stop, keys)
            if start < last:
                part = mask.expand(*mask.shape[:3], last)[..., start:last] if one_column else mask[..., start:last]
                missing = last - start - part.shape[-1]
                parts.append(torch.nn.functional.pad(part, (0, missing), value=hidden) if missing else part)
            if stop > keys:
                added = stop - max(start, keys)
                parts.append(mask.new_full((*mask.shape[:3], added), shown))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class Through(Protocol):
    """Iterates over the blocks of queries."""

    def __call__(self, problem: Problem, *, whole_rows: bool) -> Iterator[tuple[Group, Block]]:
        """Each with the group of sequences that it is of."""


def groups(problem: Problem, tiling: Tiling) -> Iterator[Group]:
    """Cut the batch into groups of sequences: as many as fit at a time, or one if offsets or masks differ."""
    batch, queries = problem.q.shape[0], problem.q.shape[2]
    first, at_once = places(problem, tiling)
    own = problem.sequence_masks
    at_once = at_once if own is None else 1
    for start in range(0, batch, at_once):
        if start == 0 or own is not None:
            masks = problem.spec.masks if own is None else own[start]
            pattern = pattern_of(masks, queries, problem.keys, problem.past)
            limits = Limits(pattern, scored_in(problem), problem.q.device, tiling.largest)
        yield Group(problem, slice(start, min(start + at_once, batch)), first[start], limits, pattern)


def places(problem: Problem, tiling: Tiling) -> tuple[list[int], int]:
    """Return the position of the first query of each sequence, and the number of sequences in a group."""
    batch = problem.q.shape[0]
    if problem.offsets is not None and problem.spec.masks:
        return problem.offsets.long().clamp(-MAX_POSITION, MAX_POSITION).expand(batch).tolist(), 1
    return [problem.past] * batch, tiling.sequences(problem.k.shape[2])


def gather(x: Tensor, dim: int, strip: Strip) -> Tensor:
    """The keys of a strip; where they are side by side, nothing is copied."""
    parts = [x.narrow(dim, start, stop - start) for start, stop in strip.spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def scatter_add(total: Tensor, x: Tensor, strip: Strip) -> None:
    """Add ``[B, Hkv, k, ...]`` to the keys of a strip in ``[B, Hkv, K, ...]``."""
    column = 0
    for start, stop in strip.spans:
        total[:, :, start:stop] += x[:, :, column : column + stop - start]
        column += stop - start


def scored_in(problem: Problem) -> torch.dtype:
    """The dtype of the scores: as in the stages."""
    normalizer = NORMALIZERS.of(problem.spec.normalizer)
    return torch.promote_types(problem.q.dtype, normalizer.runs_in(problem.q.dtype))


def _width(strip: Strip, keys: int) -> int:
    """Count a strip's keys without those that the spec adds."""
    return sum(max(0, min(stop, keys) - start) for start, stop in strip.spans)


def _of(problem: Problem, sequences: slice) -> Problem:
    """Some sequences of a batch."""

    def some(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.ndim == 0 or x.shape[0] == 1 else x[sequences]

    mask = problem.mask if problem.mask is None or problem.mask.ndim < 4 else some(problem.mask)
    return replace(
        problem,
        q=problem.q[sequences],
        k=problem.k[sequences],
        v=problem.v[sequences],
        mask=mask,
        key_mask=some(problem.key_mask),
        key_lengths=some(problem.key_lengths),
        offsets=some(problem.offsets),
        positions=some(problem.positions),
        sequence_masks=None if problem.sequence_masks is None else problem.sequence_masks[sequences],
    )
