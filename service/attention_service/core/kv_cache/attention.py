"""Attention of new tokens over a key-value cache, in place: runs of the cache are read as views and never gathered.

Every run gives a partial context and its log-sum-exp, and partial contexts are merged by these. Sequences that begin
with the same memory, as forks of one prefix do, attend to it together, in one product.

Sources: Kwon et al. 2023, section 4 (pages); Milakov & Gimelshein 2018 (merging by the log-sum-exp); Juravsky et al.
2024, section 3 (shared prefixes).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec, Dot, Exact, ScaledDot, Softmax
from attention_service.core.cancellation import checkpoint
from attention_service.core.kv_cache.cpu_steps import decode, loops_take
from attention_service.core.kv_cache.cuda_pages import attend_by_pages, paged_takes
from attention_service.core.kv_cache.partial import Partial, Piece, Products, Rows, Run, Slots
from attention_service.core.masks.bands import Band
from attention_service.core.masks.rules import pattern_of
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.positions.base import Position
from attention_service.core.scores import SCORES, Product

_LOG = logging.getLogger(__name__)
LOOPED_ROWS = 64
"""Queries of a head up to which the loops are faster than matrix products."""
LOOPED_SCORES = 2**24
"""Scores of one call of the loops, for all heads together: 50 ms, after which cancelled work stops."""
SHARED_KEYS = 128
"""Keys from which on sequences attend to shared memory together: fewer cost less than the merge."""


Runs = Sequence[Run[Slots]]
"""The runs that hold the keys and values of one sequence: all K places in order, those of its new tokens last."""


def in_place_fault(spec: AttentionSpec, dtype: torch.dtype) -> str | None:
    """Return why ``attend_in_place`` cannot compute this spec for inputs of this dtype; None if it can."""
    return next(_faults(spec, dtype), None)


def _faults(spec: AttentionSpec, dtype: torch.dtype) -> Iterator[str]:
    if not isinstance(spec.method, Exact):
        yield f"attention in place has no method {spec.method.name}"
    if spec.add_bias_kv or spec.add_zero_attn:
        yield "attention in place has no keys beside those of the cache"
    if not isinstance(spec.score, Dot | ScaledDot):
        yield f"attention in place has no score {spec.score.name}"
    runs_in = torch.promote_types(dtype, torch.float32)
    if not isinstance(spec.normalizer, Softmax):
        yield f"attention in place has no normalizer {spec.normalizer.name}"
    elif NORMALIZERS.of(spec.normalizer).runs_in(dtype) != runs_in:
        yield f"attention in place normalizes in {runs_in}, not in {spec.normalizer.dtype} as the spec asks"
    if _band_of(spec) is None:
        yield "attention in place has no masks but causal and sliding_window"


def attend_in_place(q: Tensor, pasts: Sequence[Runs], spec: AttentionSpec, learned: Mapping[str, Tensor]) -> Tensor:
    """Return the contexts ``[S, H, Q, V]`` of new tokens of S sequences, in the dtype of their queries.

    q ``[S, H, Q, D]``, normed and rotated: the queries of the last Q places of each sequence, whose keys and values
    are already written. These are finite; a NaN reaches all queries of the step. Ask ``in_place_fault`` first: raises
    ValueError for a spec that it refuses.
    """
    sequences, heads, count, _ = q.shape
    plan = _plan(spec, q)
    context = _by_pages(q, pasts, plan)
    if context is None:
        looped = plan.looped and loops_take(q, pasts[0][0])
        if looped and plan.unbounded and not plan.sinks and count == 1 and _are_apart(pasts):
            context, _ = decode(q, pasts, plan.scale / plan.temperature)
        else:
            products = Products(plan.scale, spec.softcap, plan.position, plan.band, plan.temperature, learned)
            members = [_member(index, *each, plan.band) for index, each in enumerate(zip(q, pasts, strict=True))]
            found = _Tree(products, looped).attend(members)
            stacked = _with_sinks(found, learned["sinks"], plan.temperature) if plan.sinks else found.context
            context = stacked.view(heads, sequences, count, -1).transpose(0, 1)
    return context.to(q.dtype)


def _with_sinks(found: Partial, sinks: Tensor, temperature: float) -> Tensor:
    """Return the context beside one more score for each head, ``[H]``, which takes weight and gives nothing."""
    tempered = sinks.to(found.lse.dtype).view(-1, 1, 1) / temperature
    return found.context * torch.sigmoid(found.lse - tempered)


def _by_pages(q: Tensor, pasts: Sequence[Runs], plan: "_Plan") -> Tensor | None:
    """Return the contexts ``[S, H, Q, V]`` by the kernel for block tables; None where it does not apply."""
    low, high = plan.band.low, plan.band.high
    if not paged_takes(q, pasts[0][0]) or not plan.looped or plan.sinks or high != 0:
        return None
    try:
        return attend_by_pages(q, pasts, plan.scale / plan.temperature, None if low is None else -low)
    except (RuntimeError, TypeError):  # no pages of this size on this device, or no block tables in this PyTorch
        _LOG.debug("PyTorch's kernel for block tables refused a step", exc_info=True)
        return None


@dataclass(frozen=True, slots=True)
class _Plan:
    """The parts of a spec that attention in place reads, for one width of heads."""

    scale: float
    temperature: float
    sinks: bool
    position: Position
    band: Band

    looped: bool
    """True if scores are products alone, which the loops compute."""
    unbounded: bool
    """True if a query sees all keys before it."""


def _plan(spec: AttentionSpec, q: Tensor) -> _Plan:
    band, score, softmax = _band_of(spec), SCORES.of(spec.score), spec.normalizer
    if band is None or not isinstance(score, Product) or not isinstance(softmax, Softmax):
        raise ValueError("attention in place cannot compute this spec; ask `in_place_fault` first")
    _, _, scale = score.factors(q, q, {})  # the scale of a dot product depends on the width alone
    position = POSITIONS.of(spec.position)
    looped = spec.softcap is None and not position.biased
    return _Plan(scale, softmax.temperature, softmax.sinks, position, band, looped, band.low is None)


def _are_apart(pasts: Sequence[Runs]) -> bool:
    """Return True if no two sequences begin with the same memory."""
    return len({(id(runs[0].slab), runs[0].start) for runs in pasts}) == len(pasts)


def _band_of(spec: AttentionSpec) -> Band | None:
    """Return the band of keys around its place that a query sees; None for masks that are no band."""
    low: int | None = None
    high: int | None = None
    for mask in spec.masks:
        band = pattern_of([mask], 1, 1)
        if not isinstance(band, Band):
            return None
        low = band.low if low is None else low if band.low is None else max(low, band.low)
        high = band.high if high is None else high if band.high is None else min(high, band.high)
    return Band(low, high)


@dataclass(eq=False, slots=True)
class _Member:
    """A sequence, and the pieces that it has yet to attend to."""

    index: int
    rows: Rows
    pieces: Sequence[Piece]

    @property
    def runs(self) -> Runs:
        """The runs of the pieces."""
        return [piece.run for piece in self.pieces]


@dataclass(eq=False, slots=True)
class _Tree:
    """Attention of several sequences, each memory that they share once. Rows of the results are stacked by sequence."""

    products: Products
    looped: bool
    """True if the loops take these queries: there is no score but the scaled product."""

    def attend(self, members: Sequence[_Member]) -> Partial:
        """Attend to the first keys that several share, then to what remains of each."""
        single: list[_Member] = []
        parts: list[tuple[Sequence[_Member], Partial]] = []
        for group in _by_memory(members):
            common = _shared(group)
            if common - group[0].pieces[0].first >= SHARED_KEYS:
                parts.append((group, self._together(group, common)))
            elif self.looped and len(group[0].rows.places) == 1:
                single += group
            else:
                parts += [([each], self._alone(each)) for each in group]
        if single:  # no key in the pieces of one query is hidden from it
            queries, runs = torch.stack([each.rows.q for each in single]), [each.runs for each in single]
            context, lse = decode(queries, runs, self._scale)
            parts.append((single, Partial(context.squeeze(2).transpose(0, 1), lse.transpose(0, 1))))
        return _in_order(members, parts)

    def _together(self, group: Sequence[_Member], common: int) -> Partial:
        """Attend to the places before ``common`` for all at once, and to the rest for each."""
        places = [place for member in group for place in member.rows.places]
        rows = Rows(torch.cat([member.rows.q for member in group], 1), places)
        prefix = self._partial(rows, group[0].pieces[0].cut(0, common))
        return prefix.merge(self.attend([_after(common, member) for member in group]))

    def _alone(self, member: _Member) -> Partial:
        return reduce(Partial.merge, (self._partial(member.rows, piece) for piece in member.pieces))

    def _partial(self, rows: Rows, piece: Piece) -> Partial:
        heads, count, _ = rows.q.shape
        if not self.looped or count > LOOPED_ROWS or self.products.hides(rows, piece):
            return self.products.attend(rows, piece)
        most = max(LOOPED_SCORES // (heads * count), 1)
        starts = range(piece.first, piece.end, most)
        return reduce(Partial.merge, (self._in_loops(rows, piece.cut(start, start + most)) for start in starts))

    def _in_loops(self, rows: Rows, piece: Piece) -> Partial:
        """Attend from all queries to all keys of a piece."""
        checkpoint()
        context, lse = decode(rows.q[None], [[piece.run]], self._scale)
        return Partial(context[0], lse[0, ..., None])

    @property
    def _scale(self) -> float:
        return self.products.scale / self.products.temperature


def _member(index: int, q: Tensor, runs: Runs, band: Band) -> _Member:
    """Place a sequence's runs, without the keys before the band of its first query."""
    keys, count = sum(run.tokens for run in runs), q.shape[1]
    past = keys - count
    start = 0 if band.low is None else max(past + band.low, 0)
    pieces, first = [], 0
    for run in runs:
        piece = Piece(run, first)
        first = piece.end
        if first > max(start, piece.first):
            pieces.append(piece.cut(start, keys))
    return _Member(index, Rows(q, range(past, keys)), pieces)


def _by_memory(members: Sequence[_Member]) -> list[list[_Member]]:
    """Group the sequences whose first keys and values are the same slots at the same place."""
    groups: dict[tuple[int, ...], list[_Member]] = {}
    for member in members:
        piece = member.pieces[0]
        groups.setdefault((id(piece.run.slab), piece.run.start, piece.first), []).append(member)
    return list(groups.values())


def _shared(group: Sequence[_Member]) -> int:
    """Return the place up to which the first pieces are the past of all; 0 for one sequence."""
    return min(min(each.pieces[0].end, each.rows.places[0]) for each in group) if len(group) > 1 else 0


def _after(place: int, member: _Member) -> _Member:
    pieces = [piece.cut(place, piece.end) for piece in member.pieces if piece.end > place]
    return _Member(member.index, member.rows, pieces)


def _in_order(members: Sequence[_Member], parts: Sequence[tuple[Sequence[_Member], Partial]]) -> Partial:
    """Stack the rows of all parts in the order of the members."""
    if len(parts) == 1 and list(parts[0][0]) == list(members):
        return parts[0][1]
    rows: dict[int, range] = {}
    count = 0
    for group, _ in parts:
        for member in group:
            rows[member.index] = range(count, count := count + len(member.rows.places))
    context, lse = (torch.cat(x, 1) for x in zip(*((part.context, part.lse) for _, part in parts), strict=True))
    order = [row for member in members for row in rows[member.index]]
    if order == list(range(count)):
        return Partial(context, lse)
    index = torch.tensor(order, device=context.device)
    return Partial(context.index_select(1, index), lse.index_select(1, index))
