"""Attention of new tokens over a key-value cache, in place: runs of the cache are read as views and never gathered.

The queries of a group of heads are rows of one product, so that each key and value is read once for all of them.
Sequences that begin with the same memory, as forks of one prefix do, are rows of that product, too.

Sources: Kwon et al. 2023, section 4 (pages); Juravsky et al. 2024, section 3 (shared prefixes).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec, Dot, Exact, ScaledDot, Softmax
from attention_service.core.cancellation import checkpoint
from attention_service.core.kv_cache.cuda_pages import Table, attend_by_pages, tables_of
from attention_service.core.kv_cache.runs import SlotRun, Slots, after, cut, first_of, merged
from attention_service.core.kv_cache.slab import PAGE_TOKENS
from attention_service.core.masks.bands import Band
from attention_service.core.masks.rules import pattern_of
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.positions.base import HeadSubset, Position
from attention_service.core.scores import SCORES, Product
from attention_service.core.tensors import to_device

MOST_SCORES = 2**21
"""Scores of one sequence in memory at a time, for all heads together: 8 MiB."""
MOST_SHARED_SCORES = 2**24
"""Scores up to which sequences attend to shared memory together: 64 MiB."""
MOST_WIDENED = 2**20
"""Numbers of keys, or of values, in a half type that are widened at a time: 4 MiB, which stay in the caches."""

Runs = Sequence[SlotRun[Slots]]
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
    rules = _rules(spec, q, learned)
    if not pasts[0][0].slab.paged or not rules.paged:
        return _by_products(q, pasts, rules)
    tables = tables_of(q, pasts)
    if None not in tables:
        return _by_pages(q, [table for table in tables if table is not None], rules)
    taken, others = ([i for i, table in enumerate(tables) if (table is None) == out] for out in (False, True))
    if not taken:
        return _by_products(q, pasts, rules)
    by_pages, by_products = (to_device(torch.tensor(rows), q.device) for rows in (taken, others))
    contexts = (
        _by_pages(q.index_select(0, by_pages), [table for table in tables if table is not None], rules),
        _by_products(q.index_select(0, by_products), [pasts[i] for i in others], rules),
    )
    return torch.cat(contexts).index_select(0, torch.cat([by_pages, by_products]).argsort())


def _by_pages(q: Tensor, tables: Sequence[Table], rules: "_Rules") -> Tensor:
    """Return the contexts by PyTorch's kernel for block tables."""
    low = rules.band.low
    return attend_by_pages(q, tables, rules.scale / rules.temperature, None if low is None else -low)


def _by_products(q: Tensor, pasts: Sequence[Runs], rules: "_Rules") -> Tensor:
    """Return the contexts by products of matrices."""
    kv_heads, wide = pasts[0][0].slab.keys.shape[0], torch.promote_types(q.dtype, torch.float32)
    scaled = (q.to(wide) * rules.scale).reshape(len(pasts), kv_heads, -1, *q.shape[2:]).unbind()
    context_by_sequence: dict[int, Tensor] = {}
    for members in _by_memory(pasts):
        if len(members) == 1:
            context_by_sequence[members[0]] = _alone(scaled[members[0]], pasts[members[0]], rules)
            continue
        scores = q.shape[1] * q.shape[2] * sum([run.tokens for i in members for run in pasts[i]])
        if rules.band.low is not None or scores > MOST_SHARED_SCORES:
            for i in members:
                context_by_sequence[i] = _alone(scaled[i], pasts[i], rules)
        else:
            contexts = _together([scaled[i] for i in members], [pasts[i] for i in members], rules)
            context_by_sequence.update(zip(members, contexts, strict=True))
    context = torch.stack([*map(context_by_sequence.__getitem__, range(len(pasts)))]).view(*q.shape[:3], -1)
    return context.to(q.dtype)


@dataclass(frozen=True, slots=True)
class _Rules:
    """The parts of a spec that attention in place reads, for one width of heads."""

    scale: float
    softcap: float | None
    position: Position
    band: Band
    temperature: float
    sinks: Tensor | None
    """``[H]``: one more score for each head, which takes weight and gives nothing."""
    learned: Mapping[str, Tensor]

    @property
    def plain(self) -> bool:
        """True if scores are scaled products alone."""
        return self.softcap is None and not self.position.biased

    @property
    def paged(self) -> bool:
        """True if PyTorch's kernel for block tables computes it: causal, with or without a window."""
        return self.plain and self.sinks is None and self.band.high == 0

    def weights(self, scores: Tensor, places: range, first: int) -> Tensor:
        """Return the weights ``[Hkv, R, K]`` of scaled products from queries at ``places`` to keys from ``first`` on.

        The rows R are the queries of a group's heads, head after head.
        """
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        kv_heads, rows, keys = scores.shape
        by_head = scores.view(kv_heads, rows // len(places), len(places), keys)
        if self.position.biased:
            self._add_bias(by_head, places, first)
        if self.temperature != 1:
            scores /= self.temperature
        low, high, last = self.band.low, self.band.high, first + keys - 1
        if (high is not None and last > places[0] + high) or (low is not None and first < places[-1] + low):
            queries = torch.arange(places.start, places.stop, device=scores.device)[:, None]
            allowed = self.band.allows(queries, torch.arange(first, first + keys, device=scores.device)[None])
            by_head.masked_fill_(~allowed, torch.finfo(scores.dtype).min)
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.to(scores.dtype).view(*by_head.shape[:2], 1, 1).expand(*by_head.shape[:3], 1)
        return torch.cat([scores, sinks.reshape(kv_heads, rows, 1) / self.temperature], -1).softmax(-1)[..., :-1]

    def seen(self, places: range, keys: int) -> tuple[int, int]:
        """Return the places from the first key that one of these queries sees to behind the last."""
        low, high = self.band.low, self.band.high
        first = 0 if low is None else max(places[0] + low, 0)
        return first, keys if high is None else min(places[-1] + high + 1, keys)

    def _add_bias(self, scores: Tensor, places: range, first: int) -> None:
        queries = torch.arange(places.start, places.stop, device=scores.device)[None]
        keys = torch.arange(first, first + scores.shape[3], device=scores.device)[None]
        heads = HeadSubset(scores.shape[0] * scores.shape[1])
        bias = self.position.bias(queries, keys, heads, self.learned, scores.dtype)
        if bias is not None:
            scores += bias[0].view_as(scores)


def _rules(spec: AttentionSpec, q: Tensor, learned: Mapping[str, Tensor]) -> _Rules:
    band, score, softmax = _band_of(spec), SCORES.of(spec.score), spec.normalizer
    if band is None or not isinstance(score, Product) or not isinstance(softmax, Softmax):
        raise ValueError("attention in place cannot compute this spec; ask `in_place_fault` first")
    _, _, scale = score.factors(q, q, {})  # the scale of a dot product depends on the width alone
    sinks = learned["sinks"] if softmax.sinks else None
    return _Rules(scale, spec.softcap, POSITIONS.of(spec.position), band, softmax.temperature, sinks, learned)


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


def _by_memory(pasts: Sequence[Runs]) -> Iterable[list[int]]:
    """Group the sequences that begin with the same slot."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, runs in enumerate(pasts):
        groups.setdefault((id(runs[0].slab), runs[0].start), []).append(index)
    return groups.values()


def _alone(q: Tensor, runs: Runs, rules: _Rules) -> Tensor:
    """Return the contexts ``[Hkv, G · Q, V]`` of one sequence, from scaled queries ``[Hkv, G, Q, D]``.

    As many queries at a time as leaves room for their scores.
    """
    kv_heads, group, count, width = q.shape
    length = sum([run.tokens for run in runs])
    most = max(MOST_SCORES // (kv_heads * group * length), 1)
    longest = _longest(q, runs[0])
    contexts = []
    for start in range(0, count, most):
        checkpoint()
        rows = q[:, :, start : start + most].reshape(kv_heads, -1, width)
        places = range(length - count + start, length - count + min(start + most, count))
        first, stop = rules.seen(places, length)
        seen = runs if (first, stop) == (0, length) else after(first_of(runs, stop), first)
        seen = cut(seen, longest) if longest < length else seen
        products = [torch.bmm(rows, run.keys.to(q.dtype).mT) for run in seen]
        weights = rules.weights(products[0] if len(products) == 1 else torch.cat(products, -1), places, first)
        shares = (weights,) if len(seen) == 1 else weights.split_with_sizes([run.tokens for run in seen], -1)
        context = torch.bmm(shares[0], seen[0].values.to(q.dtype))
        for share, run in zip(shares[1:], seen[1:], strict=True):
            context.baddbmm_(share, run.values.to(q.dtype))
        contexts.append(context)
    if len(contexts) == 1:
        return contexts[0]
    by_head = [context.view(kv_heads, group, -1, context.shape[2]) for context in contexts]
    return torch.cat(by_head, 2).flatten(1, 2)


def _longest(q: Tensor, run: SlotRun[Slots]) -> int:
    """Return the number of keys that are read at a time: all, unless they are widened to the dtype of the queries."""
    kv_heads, slots, width = run.slab.keys.shape
    return slots if run.slab.keys.dtype == q.dtype else max(MOST_WIDENED // (kv_heads * width), PAGE_TOKENS)


def _together(q: Sequence[Tensor], pasts: Sequence[Runs], rules: _Rules) -> list[Tensor]:
    """Return the contexts of sequences that begin with the same slot; each key and value is read once for all."""
    queries = [x.flatten(1, 2) for x in q]
    segments = _segments(pasts, _longest(q[0], pasts[0][0]))
    scores: list[list[Tensor]] = [[] for _ in pasts]
    for run, members in segments:
        checkpoint()
        products = torch.bmm(torch.cat([queries[i] for i in members], 1), run.keys.to(q[0].dtype).mT)
        for i, part in zip(members, products.chunk(len(members), 1), strict=True):
            scores[i].append(part)
    weights = []
    for x, parts in zip(q, scores, strict=True):
        length = sum(part.shape[2] for part in parts)
        whole = rules.weights(torch.cat(parts, -1), range(length - x.shape[2], length), 0)
        weights.append(iter(whole.split_with_sizes([part.shape[2] for part in parts], -1)))
    contexts: dict[int, Tensor] = {}
    for run, members in segments:
        checkpoint()
        sums = torch.bmm(torch.cat([next(weights[i]) for i in members], 1), run.values.to(q[0].dtype))
        for i, part in zip(members, sums.chunk(len(members), 1), strict=True):
            contexts[i] = contexts[i].add_(part) if i in contexts else part
    return [contexts[i] for i in range(len(pasts))]


def _segments(pasts: Sequence[Runs], longest: int) -> list[tuple[SlotRun[Slots], list[int]]]:
    """Return the runs of all sequences in their order, each once, with the sequences that have it.

    A run is shared if all runs before it are, and has at most ``longest`` tokens.
    """
    tree: dict[tuple[int, int, int, int], tuple[SlotRun[Slots], list[int]]] = {}
    for index, runs in enumerate(pasts):
        parent = 0
        for run in cut(runs, PAGE_TOKENS):
            node = tree.setdefault((parent, id(run.slab), run.start, run.tokens), (run, []))
            node[1].append(index)
            parent = id(node)
    segments: list[tuple[SlotRun[Slots], list[int]]] = []
    for run, members in tree.values():
        last, others = segments[-1] if segments else (run, [])
        both = merged([last, run])
        if others == members and len(both) == 1 and both[0].tokens <= longest:
            segments[-1] = both[0], members
        else:
            segments.append((run, members))
    return segments
