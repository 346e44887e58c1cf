"""Inspection of weights: statistics over the real queries, and the most attended keys of each query.

The computation is blockwise, so that only the weights of one block are in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from attention_service.core.blocks import placed_tiles, some_of
from attention_service.core.edits import BoundEdit
from attention_service.core.inspection.statistics import (
    CLASS_SHARES,
    DEFAULT_STATISTICS,
    EVERY_STATISTIC,
    PAIR_STATISTICS,
    RECEIVED,
    Formula,
    StatisticInputs,
    WeightTile,
    absolute_shares,
    class_share,
)
from attention_service.core.inspection.summed_statistics import SUMMED_STATISTICS, SummedStatistic, WeightSizes
from attention_service.core.masks.rules import causal_offset
from attention_service.core.masks.visibility import EVERYTHING, real_keys, visibility
from attention_service.core.methods import approximation_of
from attention_service.core.normalizers import has_log_weights
from attention_service.core.problem import Problem, Selection, Span
from attention_service.core.slices import on_gpu
from attention_service.core.stages import LOG_WEIGHTS, narrow, stages
from attention_service.core.tensors import empty_result

_NO_INPUTS: Final = StatisticInputs()
Top = tuple[Tensor, Tensor]
"""Weights and indices of keys, ``[B, H, Q, count]``."""


Weights = Callable[[Selection], Tensor]
"""The weights ``[B, H, Q, K]`` of the selected heads and queries."""


def weights_of(problem: Problem, selection: Selection, edits: Sequence[BoundEdit] = ()) -> Tensor:
    """Compute the weights of the selected heads and queries after these edits."""
    return dict(stages(problem, ("weights",), edits, selection))["weights"]


class ComputedTile(NamedTuple):
    """The weights of a tile."""

    weights: Tensor
    """``[B, H, R, K]``"""
    logs: Tensor | None = None
    """Their logarithms, if these were computed on the way; a large negative number for a weight of zero."""


class TiledWeights:
    """Weights that are computed tile by tile, in one traversal: of the keys up to the last that a tile sees."""

    def __init__(
        self, problem: Problem, edits: Sequence[BoundEdit] = (), *, keep: bool = False, with_context: bool = False
    ) -> None:
        """Prepare the traversal.

        keep: all weights are kept, as ``whole``. with_context: each tile's part of ``context`` is computed too, while
        its weights are at hand.
        """
        self._problem = problem
        self._edits = edits
        self._keep = keep
        self._whole: Tensor | None = None
        self.context: Tensor | None = None
        """``[B, H, Q, V]``, if it is wanted, once all tiles were computed."""
        self._taps = ["weights"]
        if with_context:
            self.context = problem.q.new_empty(*problem.q.shape[:3], problem.v.shape[3])
            self._taps.append("context")
        # On a GPU, sums of products may be rounded to TF32.
        exact = problem.q.dtype.itemsize > 2 and not (keep or edits or on_gpu(problem.q))
        if exact and has_log_weights(problem.spec.normalizer) and problem.dropout is None and problem.given is None:
            self._taps.append(LOG_WEIGHTS)

    @property
    def whole(self) -> Tensor:
        """``[B, H, Q, K]``, if they are kept, once all tiles were computed."""
        if self._whole is None:
            self._whole = weights_of(self._problem, EVERYTHING, self._edits)
        return self._whole

    def compute(self, tile: Selection) -> ComputedTile:
        """Compute the weights of a tile of consecutive heads and queries: of the keys up to the last that it sees."""
        # Edits may give weight to keys that the masks forbid.
        seen = tile if self._edits else _before_reach(self._problem, tile)
        parts = dict(stages(self._problem, self._taps, self._edits, seen))
        weights, logs = parts["weights"], parts.get(LOG_WEIGHTS)
        if self.context is not None:
            self._part(self.context, tile).copy_(parts["context"])
        if logs is not None:
            hidden = logs[..., _open_keys(self._problem, seen) :]
            hidden.clamp_min_(torch.finfo(logs.dtype).min)  # 0 · −∞ is no number
        if self._keep:
            self._put(tile, weights)
        return ComputedTile(weights, logs)

    def _put(self, tile: Selection, weights: Tensor) -> None:
        if tile == EVERYTHING:
            self._whole = weights
            return
        if self._whole is None:
            self._whole = empty_result((*self._problem.q.shape[:3], self._problem.k.shape[2]), weights)
        part = self._part(self._whole, tile)
        part[..., : weights.shape[3]].copy_(weights)
        part[..., weights.shape[3] :].zero_()

    def read(self, tile: Selection) -> Tensor:
        """Return the weights of the selected heads and queries, which were computed before."""
        return narrow(self.whole, "weights", self._problem, tile)

    @staticmethod
    def _part(whole: Tensor, tile: Selection) -> Tensor:
        heads = slice(None) if tile.heads is None else slice(tile.heads[0], tile.heads[-1] + 1)
        queries = slice(None) if tile.queries is None else slice(tile.queries[0], tile.queries[-1] + 1)
        return whole[:, heads, queries]


def _before_reach(problem: Problem, tile: Selection) -> Selection:
    """Leave out the keys behind the last that a causal mask lets the queries of a tile see.

    Those that it lets all of them see are a span without masks.
    """
    if tile.queries is None or problem.added_keys or problem.offsets is not None or problem.sequence_masks is not None:
        return tile
    offset = causal_offset(problem.spec.masks, problem.q.shape[2], problem.keys, problem.past)
    if offset is None:
        return tile
    reach = [min(query + offset + problem.past + 1, problem.keys) for query in (tile.queries[0], tile.queries[-1])]
    free, stop = max(0, reach[0]), max(1, reach[1])
    spans = Span(0, free, masked=False), Span(free, stop)
    return replace(tile, keys=tuple(span for span in spans if len(span)))


def _open_keys(problem: Problem, seen: Selection) -> int:
    """Return the number of keys, the first, that every query of a tile sees."""
    if seen.keys is None or seen.keys[0].masked or problem.mask is not None or real_keys(problem) is not None:
        return 0
    return len(seen.keys[0])


def top(problem: Problem, selection: Selection, count: int, weights: Weights | None = None) -> Top:
    """Find the most attended keys of each selected query: weights and indices, −1 for no key."""
    batch, every, rows, _ = problem.q.shape
    heads = every if selection.heads is None else len(selection.heads)
    queries = rows if selection.queries is None else len(selection.queries)
    # One result for all tiles: a small tensor kept of each would keep an allocator from reusing their memory.
    largest = problem.q.new_empty(batch, heads, queries, count)
    keys = torch.empty_like(largest, dtype=torch.int64)
    for tile, of_heads, of_queries in some_of(problem.q, placed_tiles(problem, selection)):
        largest[:, of_heads, of_queries], keys[:, of_heads, of_queries] = top_of(problem, tile, count, weights)
    return largest, keys.masked_fill_(largest == 0, -1)


def top_of(problem: Problem, block: Selection, count: int, weights: Weights | None = None) -> Top:
    """Find the most attended keys of one block, of implicit weights by magnitude; keys without weight too."""
    block_weights = (weights or partial(weights_of, problem))(block)
    if problem.implicit:
        keys = block_weights.abs().topk(count, dim=-1).indices
        return block_weights.gather(-1, keys), keys
    largest = block_weights.topk(count, dim=-1)
    return largest.values, largest.indices


def positions_of(problem: Problem) -> Tensor:
    """Return the position of each query among the keys, ``[B, Q]``."""
    batch, _, queries, _ = problem.q.shape
    device = problem.q.device
    offset = torch.full((batch,), problem.past, device=device)
    if problem.offsets is not None:
        offset = problem.offsets.to(device).expand(batch)
    return torch.arange(queries, device=device) + offset[:, None]


def real_queries(problem: Problem) -> Tensor:
    """Mark the real queries, bool ``[B, Q]``: in self-attention those whose own key is real, otherwise all."""
    batch, _, queries, _ = problem.q.shape
    real = real_keys(problem)
    if real is None or queries != problem.keys - problem.past:
        return torch.ones(batch, queries, dtype=torch.bool, device=problem.q.device)
    return real[:, problem.past : problem.keys]


class QueryTotals:
    """Sums over the real queries seen so far, ``[B, H]`` in float64."""

    def __init__(
        self, sizes: WeightSizes, names: Sequence[str] = DEFAULT_STATISTICS, inputs: StatisticInputs = _NO_INPUTS,
        *, signed: bool = False,
    ) -> None:  # fmt: skip
        """``signed``: the weights may be negative."""
        self._sizes, self._inputs, self._signed = sizes, inputs, signed
        batch, heads, queries, keys, device = sizes
        single = [name for name in names if name != CLASS_SHARES and name not in SUMMED_STATISTICS]
        self._formulas: dict[str, Formula] = {name: EVERY_STATISTIC[name] for name in single}
        if CLASS_SHARES in names:
            self._formulas |= {
                CLASS_SHARES + "." + class_name: partial(class_share, name=class_name) for class_name in inputs.classes
            }
        self._sums = torch.zeros(len(self._formulas), batch, heads, dtype=torch.float64, device=device)
        self._looking = torch.zeros(batch, heads, dtype=torch.float64, device=device)
        self._counted = torch.zeros(batch, queries, dtype=torch.bool, device=device)
        self._shares: Tensor | None = None
        """``[B, H, K]``: Σ p over the queries seen so far, if a statistic compares queries."""
        if PAIR_STATISTICS.intersection(names):
            self._shares = self._sums.new_zeros(batch, heads, keys)
        self._summed: dict[str, SummedStatistic] = {}
        for name in SUMMED_STATISTICS.keys() & names:
            self._summed[name] = SUMMED_STATISTICS[name](sizes, inputs)

    def add(
        self, weights: Tensor, real: Tensor, positions: Tensor, block: Selection = EVERYTHING,
        logs: Tensor | None = None, visible: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add weights ``[B, H, R, K]`` of a block at positions ``[B, R]`` where ``real`` ``[B, R]`` is true.

        logs: those of ``ComputedTile``. visible: bool, broadcastable to the weights of all keys: the keys that a query
        may see; None for all.
        """
        heads, rows = _index(block.heads), _index(block.queries)
        if self._inputs.absolute:
            weights, logs = absolute_shares(weights), None
        signed = self._signed and not self._inputs.absolute
        earlier = None if self._shares is None else self._shares[:, heads, : weights.shape[-1]].to(weights.dtype)
        tile = WeightTile(
            weights, positions, self._inputs.queries(rows), logs, signed, real, earlier, visible, rows.start or 0
        )
        looking = real[:, None] & tile.looking  # [B, H, R]: a query that may look nowhere has no weights
        if self._formulas:
            of_rows = torch.stack([formula(tile) for formula in self._formulas.values()])
            self._sums[:, :, heads] += torch.where(looking, of_rows, 0).sum(-1, dtype=torch.float64)
        for summed in self._summed.values():
            summed.add(tile, heads, looking)
        self._looking[:, heads] += looking.sum(-1)
        self._counted[:, rows] |= looking.any(1)
        if self._shares is not None:
            self._shares[:, heads, : weights.shape[-1]] += tile.shares.sum(2)

    @property
    def queries(self) -> Tensor:
        """``[B]``: the number of queries that some head counts."""
        return self._counted.sum(-1)

    def means(self) -> dict[str, Any]:
        """Return the mean of each statistic over the real queries, or over their pairs; NaN if there are none."""
        mean_by_name: dict[str, Any] = {}
        pairs = self._looking * (self._looking - 1) / 2
        for name, total in zip(self._formulas, self._sums, strict=True):
            kind, _, of = name.partition(".")
            mean = total / (pairs if name in PAIR_STATISTICS else self._looking)
            if of or kind == CLASS_SHARES:
                mean_by_name.setdefault(kind, {})[of] = mean
            else:
                mean_by_name[name] = mean
        for name, summed in self._summed.items():
            mean_by_name[name] = summed.value(self._looking)
        return mean_by_name


def _index(chosen: Sequence[int] | None) -> slice:
    """Return the index of consecutive entries; None for all."""
    return slice(None) if chosen is None else slice(chosen[0], chosen[-1] + 1)


def totals(
    problem: Problem, real: Tensor, looked_at: Sequence[Selection], compute: Callable[[Selection], ComputedTile],
    names: Sequence[str] = DEFAULT_STATISTICS, inputs: StatisticInputs = _NO_INPUTS, *, corrected: bool = False,
) -> QueryTotals:  # fmt: skip
    """Sum over all heads and those queries of these blocks that are ``real`` ``[B, Q]``.

    The heads and the queries of a block are consecutive. ``corrected``: the problem is that of ``with_correction``.
    """
    batch, heads, queries, _ = problem.q.shape
    positions = positions_of(problem)
    if inputs.pairs is not None:
        inputs = replace(inputs, pairs=inputs.pairs.of_real_keys(real_keys(problem)))
    sizes = WeightSizes(batch, heads, queries, problem.k.shape[2], problem.q.device)
    sums = QueryTotals(sizes, names, inputs, signed=problem.implicit or corrected)
    for block in some_of(problem.q, looked_at):
        rows = _index(block.queries)
        values, logs = compute(block)
        if names and values.dtype.itemsize == 2:
            values = values.float()
        seen = None
        if RECEIVED in names:
            known = corrected or problem.given is None or approximation_of(problem.spec) is not None
            seen = _visible(problem, block) if known else values != 0  # of weights that come without their masks
        sums.add(values, real[:, rows], positions[:, rows], block, logs, seen)
        del values, logs, seen  # the next block takes their memory
    return sums


def _visible(problem: Problem, block: Selection) -> Tensor | None:
    """Mark the keys that the queries of a block may see, bool, broadcastable to ``[B, H, R, K]``; None for all."""
    masks = visibility(problem, block)
    allowed = masks.allowed
    if masks.bias is not None:
        unforbidden = masks.bias != -torch.inf
        allowed = unforbidden if allowed is None else allowed & unforbidden
    return None if allowed is None else allowed.expand(*allowed.shape[:3], problem.k.shape[2])


def pooled_weights(problem: Problem, selection: Selection, size: int, weights: Weights) -> Tensor:
    """Return the largest weight of each square of ``size`` queries and keys: ``[B, H, ⌈Q/size⌉, ⌈K/size⌉]``."""
    batch, every, rows, _ = problem.q.shape
    heads = every if selection.heads is None else len(selection.heads)
    queries = rows if selection.queries is None else len(selection.queries)
    shape = batch, heads, -(-queries // size), -(-problem.k.shape[2] // size)
    dtype = torch.promote_types(problem.q.dtype, torch.float32)
    pooled = problem.q.new_full(shape, -torch.inf, dtype=dtype)
    if not pooled.numel():
        return pooled  # nothing to pool, which max_pool1d refuses
    for tile, of_heads, of_queries in some_of(problem.q, placed_tiles(problem, selection)):
        values = weights(tile).to(dtype)  # [B, h, r, K]
        width = min(size, values.shape[3])  # a CPU takes time for each key of a square, whether it is there or not
        across = max_pool1d(values.flatten(0, 1), width, ceil_mode=True)
        across = across.reshape(*values.shape[:3], shape[3])
        for square in range(of_queries.start // size, -(-of_queries.stop // size)):
            rows_of = slice(
                max(square * size - of_queries.start, 0), min((square + 1) * size, of_queries.stop) - of_queries.start
            )
            place = pooled[:, of_heads, square]
            place.copy_(torch.maximum(place, across[:, :, rows_of].amax(2)))
    return pooled


def pooled_magnitudes(problem: Problem, selection: Selection, size: int, signed: Weights) -> Tensor:
    """Return the number of largest magnitude of each square, with its sign."""
    highest = pooled_weights(problem, selection, size, signed)
    lowest = -pooled_weights(problem, selection, size, lambda tile: -signed(tile))
    return torch.where(-lowest > highest, lowest, highest)


def pooled_differences(problem: Problem, selection: Selection, size: int, weights: Weights, without: Weights) -> Tensor:
    """Return the difference of largest magnitude of each square, with its sign."""

    def changed(tile: Selection) -> Tensor:
        return weights(tile) - without(tile)

    return pooled_magnitudes(problem, selection, size, changed)
