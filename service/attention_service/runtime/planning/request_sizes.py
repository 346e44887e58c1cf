"""The sizes of one request, and the bucket of sizes whose requests share a plan.

A bucket is a range of every size, of which there are 4 or 16 an octave; small sizes have a bucket of their own. Costs
grow with each size, so the upper end of a bucket bounds every request in it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from attention_service.core.kernels.fused.cpu_blocks import CUT

COARSE, FINE = 2, 4
"""Binary logarithms of the number of buckets in an octave."""
_MOST_OFFSETS = 8
"""Different offsets that a bucket keeps apart."""


class RequestSizes(NamedTuple):
    """The sizes that a bucket rounds. Notation as in ``core.kernels.extent``."""

    batch: int
    queries: int
    new_keys: int
    """Keys that the request brings, without the past and without those that the spec adds."""
    past: int = 0
    mask: tuple[int, ...] = ()
    """The shape of the request's mask as four dimensions; () for none."""
    real_keys: int = 0
    """Upper bound on real keys, in whole cells of the blocked kernel; 0 for no padding."""
    offsets: tuple[int, ...] = ()
    """One for each sequence; () for the default."""

    def upper(self, steps: int) -> "RequestSizes":
        """The upper end of the bucket, of which there are ``2**steps`` an octave."""
        return self._end(lambda size: bucket_upper(size, steps), steps)

    def lower(self, steps: int) -> "RequestSizes":
        """The lower end of the bucket."""
        return self._end(lambda size: bucket_lower(size, steps), steps)

    def with_tokens(self, **changed: Any) -> "RequestSizes":
        """Other sizes; a mask grows and shrinks with them."""
        sizes = self._replace(**changed)
        if not self.mask:
            return sizes
        batch, heads, queries, keys = self.mask
        whole = keys == self.past + self.new_keys
        mask = (
            sizes.batch if batch > 1 else 1,
            heads,
            sizes.queries if queries > 1 else 1,
            sizes.past + sizes.new_keys if whole else keys,
        )
        return sizes._replace(mask=mask)

    def growth(self, low: "RequestSizes") -> float:
        """Return the growth of a kernel's tiles from these smaller sizes: the product for batch and keys."""
        keys, fewer = self.past + self.new_keys, low.past + low.new_keys
        return self.batch / max(low.batch, 1) * keys / max(fewer, 1)

    def _end(self, end: Callable[[int], int], steps: int) -> "RequestSizes":
        batch, queries, new_keys, past = end(self.batch), end(self.queries), end(self.new_keys), end(self.past)
        if queries == new_keys and self.queries != self.new_keys:  # masks and positions tell the two cases apart
            queries, new_keys = queries + (self.queries > self.new_keys), new_keys + (self.new_keys > self.queries)
        if not any(self[4:]):
            return RequestSizes(batch, queries, new_keys, past)
        mask = self.mask
        if mask:
            keys, own_keys = past + new_keys, self.past + self.new_keys
            columns = keys if mask[3] == own_keys else 1 if mask[3] == 1 else max(min(end(mask[3]), keys - 1), 1)
            mask = (batch if mask[0] > 1 else 1, mask[1], queries if mask[2] > 1 else 1, columns)
        return RequestSizes(
            batch,
            queries,
            new_keys,
            past,
            mask,
            end(self.real_keys // CUT.cell) * CUT.cell,
            _spread([offset - self.past for offset in self.offsets], batch, past, steps),
        )


def bucket_upper(size: int, steps: int) -> int:
    """The largest size of the bucket that holds this size."""
    shift = max((size - 1).bit_length() - 1 - steps, 0)
    return (((size - 1) >> shift) + 1) << shift


def bucket_lower(size: int, steps: int) -> int:
    """The smallest size of the bucket that holds this size."""
    shift = max((size - 1).bit_length() - 1 - steps, 0)
    return ((size - 1) >> shift << shift) + 1


def _spread(behind: list[int], batch: int, past: int, steps: int) -> tuple[int, ...]:
    """Offsets of a whole batch with the same extremes and about as many different values.

    behind: the offsets without the past, which stay the same while a past grows.
    """
    if not behind:
        return ()
    low, high = (_rounded(end, steps) for end in (min(behind), max(behind)))
    different = min(len({*behind}), _MOST_OFFSETS, batch)
    if different < 2 or low == high:
        return (past + high,) * batch
    return tuple(past + low + (high - low) * (row % different) // (different - 1) for row in range(batch))


def _rounded(number: int, steps: int) -> int:
    """A number of either sign, rounded up."""
    if number >= 0:
        return bucket_upper(number, steps)
    end = bucket_upper(-number, steps)
    return -end if end == -number else 1 - bucket_lower(-number, steps)
