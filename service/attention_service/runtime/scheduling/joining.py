"""Requests of one kind, as one pass: their tensors stacked along the batch, its results split again.

Rows of a batch know nothing of one another, so each caller gets what it would have got alone. Shorter sequences are
padded where the spec allows nothing else than what it allowed before, and the padding is hidden by ``key_lengths``.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from attention_contract.tensors import Array
from attention_service.core.masks import pattern_of
from attention_service.core.methods import approximation_of
from attention_service.core.positions import POSITIONS
from attention_service.cost import Estimate, Workload
from attention_service.runtime.binding.bound import Bound
from attention_service.runtime.operations.operation import Fields
from attention_service.runtime.planning.planner import Plan
from attention_service.runtime.planning.quickness import is_quick

_STACKED = frozenset(
    {"query", "key", "value", "past_key", "past_value", "key_mask", "key_lengths", "offsets", "positions"}
    | {"gate", "beta", "initial_state", "initial_normalizer"}
)
"""Tensors with one entry for each sequence. A mask may be one for all of them."""
_MOST = 4096
"""Sizes of one kind that are remembered."""

Lengths = tuple[int, int]
"""Queries and keys, the past and what the spec adds included."""


@dataclass(frozen=True)
class Size:
    """How large one pass is."""

    batch: int
    lengths: Lengths
    padded: bool = False


@dataclass(eq=False)
class Kind:
    """Requests that differ in batch and lengths alone: what any of them costs with one kernel, each planned once."""

    work: Workload
    """Of one of them."""
    predict: Callable[[Workload], Estimate]
    make: Callable[[Workload], Plan]
    _predicted: dict[Size, Estimate] = field(default_factory=dict, repr=False)
    _plans: dict[Size, Plan] = field(default_factory=dict, repr=False)
    taken: dict[tuple[Size, int, int, bool], int] = field(default_factory=dict, repr=False)
    """Of so many equal requests of so many bytes, in a crowd or not, how many are best taken at a time."""
    joined: dict[tuple[Size, int, int], Plan] = field(default_factory=dict, repr=False)
    """The plan of so many of them at once, with what it takes to join them."""
    _patterns: dict[Hashable, int] = field(default_factory=dict, repr=False)
    """What the masks allow, each with a number of its own."""
    _allowed: dict[Lengths, int] = field(default_factory=dict, repr=False)
    """That number, by the lengths."""

    def predicted(self, size: Size) -> Estimate:
        """The time of one pass."""
        if size not in self._predicted:
            self._forget()
            self._predicted[size] = self.predict(self._sized(size))
        return self._predicted[size]

    def _forget(self) -> None:
        """Begin anew where too many sizes are remembered."""
        if len(self._predicted) >= _MOST:
            for remembered in (self._predicted, self._plans, self.taken, self.joined, self._patterns, self._allowed):
                remembered.clear()

    def plan(self, size: Size) -> Plan:
        """The plan of one pass."""
        if size not in self._plans:
            self._plans[size] = self.make(self._sized(size))
        return self._plans[size]

    def may_pad(self, lengths: Lengths, to: Lengths) -> bool:
        """Whether masks allow the same at both lengths, so that padding changes no number."""
        if not self._paddable:
            return False
        return not self.work.spec.masks or self._pattern(lengths) == self._pattern(to)

    @cached_property
    def _paddable(self) -> bool:
        work = self.work
        if POSITIONS.of(work.spec.position).by_reach:
            return False
        bare = not work.past and not work.extra and not work.padded and not work.batched_places
        return bare and work.taps == {"output"} and approximation_of(work.spec) is None

    def _pattern(self, lengths: Lengths) -> int:
        number = self._allowed.get(lengths)
        if number is None:
            pattern = pattern_of(self.work.spec.masks, *lengths)
            number = self._allowed[lengths] = self._patterns.setdefault(pattern, len(self._patterns))
        return number

    def _sized(self, size: Size) -> Workload:
        queries, keys = size.lengths
        padded = self.work.padded or size.padded
        return replace(self.work, batch=size.batch, queries=queries, keys=keys, padded=padded)


@dataclass(eq=False, slots=True)
class Part:
    """One request, as far as it can be run together with others."""

    kind: Kind
    key: Hashable
    """Equal for those that can be run together. Sizes are no part of it."""
    bound: Bound
    size: Size
    """Its own."""
    need: int
    """Bytes that it is admitted for."""
    run: Callable[[Bound], Fields]
    """The pass over these or any other bound tensors."""

    @property
    def lengths(self) -> Lengths:
        """Those of its sequences."""
        return self.size.lengths

    @property
    def bytes(self) -> int:
        """Those of its tensors, which may be of another dtype than what is computed in."""
        return sum([array.nbytes for array in self.bound.arrays.values()])


def joinable(bound: Bound) -> bool:
    """Whether every tensor of a request has one entry for each sequence, and each is computed for itself.

    What takes long to plan is not: which of those that wait run together is planned while others wait for it.
    """
    return (
        bound.arrays.keys() <= _STACKED
        and bound.dropout is None
        and not bound.learned
        and approximation_of(bound.spec) is None
        and is_quick(bound.spec.masks, bound.queries, bound.keys)
    )


def in_common(bound: Bound) -> tuple[Hashable, ...]:
    """What the tensors of requests that are run together have in common, beside their kind and their module."""
    layout = bound.layout
    dtypes = tuple((name, array.dtype.str, type(array)) for name, array in bound.arrays.items())
    return layout.headed, layout.merged, bound.reply_dtype, dtypes


def size_of(bounds: Sequence[Bound]) -> Size:
    """How large they are together."""
    lengths = {(bound.queries, bound.keys) for bound in bounds}
    longest = max(queries for queries, _ in lengths), max(keys for _, keys in lengths)
    return Size(sum(bound.batch for bound in bounds), longest, len(lengths) > 1)


def stacked_bytes(parts: Sequence[Part], size: Size) -> int:
    """The bytes of their stacked tensors."""
    if not size.padded:
        return sum(array.nbytes for part in parts for array in part.bound.arrays.values())
    queries, keys = size.lengths
    return sum(
        array.nbytes // array.shape[-2] * (queries if name == "query" else keys)
        for part in parts
        for name, array in part.bound.arrays.items()
        if array.size
    )


def run_together(bounds: Sequence[Bound], run: Callable[[Bound], Fields]) -> list[Fields]:
    """The reply's fields of each, from one pass over all of them: views of what it gave."""
    size = size_of(bounds)
    fields = run(stacked(bounds, size))
    answers, start = [], 0
    for bound in bounds:
        answers.append(_cut(fields, bound, start, start + bound.batch, padded=size.padded))
        start += bound.batch
    return answers


def stacked(bounds: Sequence[Bound], size: Size) -> Bound:
    """One request of all of them, in the order in which they stand."""
    first, (queries, keys) = bounds[0], size.lengths
    arrays = {}
    for name in first.arrays:
        parts = [bound.arrays[name] for bound in bounds]
        arrays[name] = _padded(parts, queries if name == "query" else keys) if size.padded else np.concatenate(parts)
    if size.padded:
        arrays["key_lengths"] = np.repeat([bound.keys for bound in bounds], [bound.batch for bound in bounds])
    layout = first.layout if first.layout.batched else replace(first.layout, batched=True)
    return first.of(layout=layout, batch=size.batch, queries=queries, keys=keys, arrays=arrays)


def _padded(parts: Sequence[Array], length: int) -> Array:
    """Tensors ``[B, L, W]`` or ``[B, H, L, W]`` of any L, with zeros up to one length."""
    first = parts[0]
    whole = np.zeros((sum(map(len, parts)), *first.shape[1:-2], length, first.shape[-1]), first.dtype)
    start = 0
    for part in parts:
        whole[start : start + len(part), ..., : part.shape[-2], :] = part
        start += len(part)
    return whole


def _cut(fields: Fields, bound: Bound, start: int, stop: int, *, padded: bool) -> Fields:
    """The rows of one request, in its layout, without what was padded."""
    mine: Fields = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            mine[name] = _cut(value, bound, start, stop, padded=padded)
            continue
        rows = value[start:stop] if bound.layout.batched else value[start, ...]
        mine[name] = rows[..., : bound.queries, :] if padded else rows
    return mine
