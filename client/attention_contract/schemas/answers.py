"""What is asked of costs beside the counts: how long, how much fits, per token, and where one beats another."""

from typing import Literal

from pydantic import Field

from attention_contract.base import WireModel
from attention_contract.schemas.accuracy import Basis


class Milliseconds(WireModel):
    """How long something should take."""

    median_ms: float
    low_ms: float
    high_ms: float
    """Nine of ten runs should lie between ``low_ms`` and ``high_ms``."""


class Predicted(WireModel):
    """Times that the planner expects, each with the kernel that it would take for it (or the one that is named)."""

    basis: Basis
    """What they rest on: runs of each kernel on the device, rates measured on it, or what the maker says of it."""
    forward: Milliseconds
    gradients: Milliseconds | None = None
    """A forward and a backward pass; null where the kernel named has none."""
    decode: Milliseconds | None = None
    """One step at whose end as many keys are there: one query and one new key of each sequence.

    Earlier keys and values come as ``past_key`` and ``past_value``; to method linear as ``initial_state``, and the step
    gives the next one back (``return_state``), so that it takes as long whatever came before. Null for method nystrom,
    whose landmarks are means over all queries: a query alone has others, and continues nothing. Null too where global
    tokens are projected apart, since a past holds one projection only."""
    transfer: Milliseconds
    """Bringing the forward request's tensors to the device and the reply's back, which is part of ``forward`` where the
    basis is ``calibrated``, and beside it otherwise; 0 where host and device share their memory."""
    encoding: dict[Literal["list", "base64", "safetensors"], Milliseconds]
    """Reading the forward request's tensors and writing the reply's, which is beside ``forward``, by their form on the
    wire: nested lists in JSON, base64 in JSON, or a safetensors file."""


class PerToken(WireModel):
    """The forward pass, divided by its queries over the batch."""

    flops: float
    """Those that the kernel does."""
    moved_bytes: float
    """Read and written."""
    predicted_ms: float
    kv_cache_bytes: int
    """Of each token kept, whatever the queries."""


class Largest(WireModel):
    """The largest size that fits."""

    size: int
    """0 where not even 1 does."""
    kernel: str | None = None
    """With which kernel it does."""
    peak_bytes: int | None = None
    """What it needs at its peak."""
    bound: Literal["memory", "spec", "shape"] = "memory"
    """What stands in the way of more: memory, a spec that has no room for more tokens, or the largest size of a
    shape."""


class Fits(WireModel):
    """How far one kind of request can grow."""

    longest: Largest
    """Queries and new keys together, at the batch of the request's shape."""
    largest_batch: Largest
    """Sequences, of the lengths of the request's shape."""


class CostLimits(WireModel):
    """What fits into memory, by the estimate that admits requests."""

    free_bytes: int
    """Of the device now, beside resident modules and what is in flight; or as many as the request says."""
    forward: Fits
    gradients: Fits | None = None
    """A forward and a backward pass; null where the kernel named has none."""


class Crossover(WireModel):
    """From which value of the varied size one of two begins to cost less than the other."""

    of: Literal["time", "peak_bytes", "flops"]
    """Of a forward pass: the median time, the peak of memory, or the FLOPs that the kernel does."""
    between: tuple[str, str]
    """Two labels."""
    dimension: str
    searched: tuple[int, int]
    """The first and the last value that were looked at."""
    cheaper: str | None = None
    """Which of the two costs less at the last value; null where they cost the same there."""
    at: int | None = None
    """From here on it costs less, to within a hundredth; null where it does at every value, or they cost the same."""
    low: int | None = None
    """Of times: from here on it may cost less, by the bounds of both predictions; null where it may at every value."""
    high: int | None = None
    """Of times: from here on it does, whichever time within its bounds each takes; null where that is beyond the
    last value."""
    measured: int | None = None
    """Of times, where the request says ``measure``: from here on it took less time when both were run. Null where none
    was found near ``at``, and where it can't be tried: on another device, with more memory than there is, for sizes
    other than tokens, or where it would take too long."""


class Picture(WireModel):
    """A reply as a picture."""

    media_type: str
    data: bytes = Field(repr=False)
    """The file."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str | bytes]:
        """What a notebook shows."""
        return {self.media_type: self.data.decode() if self.media_type == "image/svg+xml" else self.data}
