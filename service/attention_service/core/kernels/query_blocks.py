"""Blocks of queries, each with the keys that the masks of positions leave it, found before anything is computed.

Keys are cut into cells. Of each cell the masks say whether a block of queries may look at none, some or all of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attention_service.core.blocks import REPEATED
from attention_service.core.cancellation import checkpoint
from attention_service.core.kernels.extent import CELL, Extent
from attention_service.core.masks.pattern import Pattern, Tiles
from attention_service.core.masks.rules import MAX_POSITION, pattern_of
from attention_service.core.masks.visibility import real_keys
from attention_service.core.problem import Problem, Selection, Span

_CELLS_AT_ONCE, _MOST_CELLS, _MOST_IN_A_ROW = 2**18, 2**22, 2**14
"""Cells that are classified together; above so many in all and in a block, a sample is classified."""
_SAMPLED_BLOCKS, _REHEARSED_BLOCKS = 64, 6
"""Blocks of a sample, and blocks that stand for all where the pass is rehearsed."""
_NONE, _EVERY = 0, 2  # 1 for some


@dataclass(frozen=True)
class Cut:
    """Sizes by which an attention is cut."""

    rows: int
    """Queries of a block."""
    scores: int
    """Scores that are held at a time."""
    shared: bool = False
    """True if all heads and sequences share what is held for a pair."""
    cell: int = CELL
    """Keys of a cell."""

    def sequences(self, batch: int, heads: int, queries: int, keys: int) -> int:
        """Return the number of sequences to compute together."""
        of_one = (1 if self.shared else heads) * min(self.rows, queries) * keys
        return max(1, min(batch, self.scores // max(1, of_one)))


@dataclass(frozen=True)
class PositionLayout:
    """Queries at positions first, first + 1, … against keys 0, 1, …, and what the masks of positions say of them."""

    pattern: Pattern | None
    """None if nothing is masked."""
    first: int
    queries: int
    keys: int
    real: Tensor | None = None
    """Bool ``[keys]``: which keys are real in any of the sequences."""

    def blocks(self, cut: Cut) -> Iterator[tuple[range, tuple[Span, ...]]]:
        """Yield the queries of each block, and the keys that they look at."""
        if self.pattern is None and self.real is None:
            for start in range(0, self.queries, cut.rows):
                yield range(start, min(start + cut.rows, self.queries)), (Span(0, self.keys, masked=False),)
            return
        at_once = max(1, _CELLS_AT_ONCE // max(1, -(-self.keys // cut.cell)))
        starts = range(0, self.queries, cut.rows)
        for chunk in (starts[at : at + at_once] for at in range(0, len(starts), at_once)):
            for start, kinds in zip(chunk, self.kinds(cut, chunk), strict=True):
                yield range(start, min(start + cut.rows, self.queries)), self.spans(kinds, cut.cell)

    def kinds(self, cut: Cut, starts: Sequence[int]) -> NDArray[np.int8]:
        """Return ``[blocks, cells]``: 0, 1 or 2 where a block may look at none, some or every key of a cell."""
        j_first = torch.arange(0, self.keys, cut.cell)
        if self.pattern is None:
            kinds = torch.full((1, 1), _EVERY, dtype=torch.int8)
        else:
            first = torch.tensor(starts, dtype=torch.int64)
            tiles = Tiles(
                p_first=first[:, None] + self.first,
                p_last=(first + cut.rows).clamp(max=self.queries)[:, None] - 1 + self.first,
                j_first=j_first[None],
                j_last=(j_first + cut.cell).clamp(max=self.keys)[None] - 1,
            )
            coverage = self.pattern.coverage(tiles)
            kinds = coverage.some.to(torch.int8) + (coverage.some & coverage.every)
        kinds = kinds.expand(len(starts), len(j_first))
        if self.real is not None:
            missing = len(j_first) * cut.cell - self.keys
            kinds = kinds * torch.nn.functional.pad(self.real, (0, missing)).view(-1, cut.cell).any(1)
        return kinds.numpy()

    def spans(self, kinds: NDArray[np.int8], cell: int) -> tuple[Span, ...]:
        """Return the keys of a block from its ``kinds`` ``[cells]``."""
        turns = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), len(kinds)]
        return tuple(
            Span(left * cell, min(right * cell, self.keys), masked=bool(kinds[left] != _EVERY))
            for left, right in pairwise(turns)
            if left < right and kinds[left] != _NONE
        )


@dataclass(frozen=True)
class QueryBlock:
    """A block of queries of some sequences."""

    sequences: slice
    problem: Problem
    """These sequences."""
    first: int
    """Position of their first query."""
    heads: range
    queries: range
    keys: tuple[Span, ...]
    """Without those that the spec adds, which every query looks at."""

    @property
    def selection(self) -> Selection:
        """The block among all heads, queries and keys."""
        return Selection(self.heads, self.queries, self.keys)

    @property
    def all_keys(self) -> tuple[Span, ...]:
        """The keys, with those that the spec adds."""
        return self.selection.keys_of(self.problem) or ()

    @property
    def width(self) -> int:
        """The number of keys."""
        return sum(map(len, self.keys)) + self.problem.added_keys


def query_blocks(problem: Problem, cut: Cut, sizes: Extent | None = None) -> Iterator[QueryBlock]:
    """Yield every block of queries, of as many sequences at a time as fit and have the same masks.

    sizes: those of a pass over meta tensors, in which a few blocks stand for all, within ``blocks.REPEATED``.
    """
    batch, heads, queries, _ = problem.q.shape
    apart = problem.sequence_masks is not None or (problem.offsets is not None and bool(problem.spec.masks))
    at_once = 1 if apart else cut.sequences(batch, heads, queries, problem.k.shape[2])
    if sizes is not None:
        part = sequences_of(problem, slice(0, at_once))
        for first, some, keys, times in rehearsed_blocks(sizes, cut):
            with REPEATED.get()(times / at_once):
                yield QueryBlock(slice(0, at_once), part, first, range(heads), some, keys)
        return
    places = firsts(problem)
    for start in range(0, batch, at_once):
        sequences = slice(start, min(start + at_once, batch))
        part = sequences_of(problem, sequences)
        masks = problem.spec.masks if part.sequence_masks is None else part.sequence_masks[0]
        pattern = pattern_of(masks, queries, problem.keys, problem.past) if masks else None
        for block in PositionLayout(pattern, places[start], queries, problem.keys, real_in_any(part)).blocks(cut):
            checkpoint()
            yield QueryBlock(sequences, part, places[start], range(heads), *block)


def firsts(problem: Problem) -> list[int]:
    """Return the position of the first query of each sequence."""
    if problem.offsets is None or not problem.spec.masks:
        return [problem.past] * problem.q.shape[0]
    return list(problem.offsets.long().clamp(-MAX_POSITION, MAX_POSITION).expand(problem.q.shape[0]).tolist())


def real_in_any(problem: Problem) -> Tensor | None:
    """Return bool ``[keys]``: which keys are no padding in some sequence; None where all are."""
    real = real_keys(problem)
    return None if real is None else real[:, : problem.keys].any(0).cpu()


def sequences_at_once(sizes: Extent, cut: Cut) -> int:
    """Return the number of sequences that are computed together."""
    apart = sizes.batched_offsets and bool(sizes.spec.masks)
    return 1 if apart else cut.sequences(sizes.batch, sizes.heads, sizes.queries, sizes.keys)


def sequences_of(problem: Problem, sequences: slice) -> Problem:
    """Return some sequences of a batch."""

    def some(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.ndim == 0 or x.shape[0] == 1 else x[sequences]

    dropout = problem.dropout
    return replace(
        problem,
        q=problem.q[sequences],
        k=problem.k[sequences],
        v=problem.v[sequences],
        mask=problem.mask if problem.mask is None or problem.mask.ndim < 4 else some(problem.mask),
        key_mask=some(problem.key_mask),
        key_lengths=some(problem.key_lengths),
        offsets=some(problem.offsets),
        positions=some(problem.positions),
        dropout=None if dropout is None else replace(dropout, first=dropout.first + sequences.start),
        sequence_masks=None if problem.sequence_masks is None else problem.sequence_masks[sequences],
    )


def rehearsed_blocks(sizes: Extent, cut: Cut) -> list[tuple[int, range, tuple[Span, ...], Fraction]]:
    """Return a few blocks that stand for all, the largest among them, with the number of such in all sequences.

    Each is the position of the first query, the block's queries and its keys.

    Sequences at other places are those of the first, a middle and the last place. Padding hides no whole cell, but for
    the keys that no sequence has.
    """
    masks = sizes.spec.masks
    pattern = pattern_of(masks, sizes.queries, sizes.sequence_keys, sizes.past) if masks else None
    places = [sizes.past]
    if sizes.batched_offsets and masks and sizes.batch:
        offsets = sorted(sizes.offsets or range(sizes.past, sizes.past + sizes.batch))
        places = sorted({max(-MAX_POSITION, min(offsets[index], MAX_POSITION)) for index in (0, len(offsets) // 2, -1)})
    rehearsed = []
    for place in places if sizes.batch and sizes.queries else []:
        with _disable_current_modes():  # keys are found by real numbers
            few = _few(PositionLayout(pattern, place, sizes.queries, sizes.unpadded_keys), cut)
        rehearsed += [
            (place, queries, keys, times * Fraction(sizes.batch, len(places))) for queries, keys, times in few
        ]
    return rehearsed


@lru_cache(maxsize=64)
def _few(layout: PositionLayout, cut: Cut) -> list[tuple[range, tuple[Span, ...], Fraction]]:
    """Return the largest block of each of a few kinds, which differ in size and in gaps between the keys."""
    if layout.pattern is None:
        rows = min(cut.rows, layout.queries)
        return [(range(rows), (Span(0, layout.keys, masked=False),), Fraction(layout.queries, rows))]
    starts = range(0, layout.queries, cut.rows)
    cells = -(-layout.keys // cut.cell)
    if len(starts) * cells > _MOST_CELLS:
        chosen = sorted({index * (len(starts) - 1) // (_SAMPLED_BLOCKS - 1) for index in range(_SAMPLED_BLOCKS)})
        cut = replace(cut, cell=max(cut.cell, -(-layout.keys // _MOST_IN_A_ROW)))
    else:
        chosen = [*range(len(starts))]
    share = Fraction(len(starts), len(chosen))
    rows = np.minimum(cut.rows, layout.queries - cut.rows * np.array(chosen))
    kinds = layout.kinds(cut, [starts[index] for index in chosen]) != _NONE
    widths = cut.cell * kinds.sum(1) - (-layout.keys % cut.cell) * kinds[:, -1:].sum(1)
    gaps = (kinds[:, 1:] & ~kinds[:, :-1]).sum(1) + kinds[:, :1].sum(1) > 1
    pairs, largest_blocks = rows * widths, []
    for alike in (np.flatnonzero(gaps), np.flatnonzero(~gaps)):
        for part in np.array_split(alike[np.argsort(pairs[alike], kind="stable")], _REHEARSED_BLOCKS):
            if len(part):
                largest = int(part[-1])
                all_pairs = int(pairs[part].sum())
                times = Fraction(all_pairs, int(pairs[largest])) if all_pairs else Fraction(len(part))
                start = starts[chosen[largest]]
                spans = layout.spans(layout.kinds(cut, [start])[0], cut.cell)
                largest_blocks.append((range(start, start + int(rows[largest])), spans, times * share))
    return largest_blocks
