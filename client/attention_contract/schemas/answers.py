"""Costs beside the counts: times, the sizes that fit, the cost of a token, and crossovers."""

from typing import Literal

from pydantic import Field

from attention_contract.base import WireModel
from attention_contract.schemas.costs.accuracy import Basis


class Milliseconds(WireModel):
    """A predicted time."""

    median_ms: float
    low_ms: float
    high_ms: float
    """Nine of ten runs should lie between ``low_ms`` and ``high_ms``."""


class Predicted(WireModel):
    """Predicted times, each with the kernel that the planner would choose (or the one that is named)."""

    basis: Basis
    """The basis of the times: runs of each kernel on the device, rates measured on it, or its datasheet."""
    forward: Milliseconds
    gradients: Milliseconds | None = None
    """A forward and a backward pass; null where the kernel named has none."""
    decode: Milliseconds | None = None
    """Time of one decode step at whose end this many keys exist: one query and one new key of each sequence.

    Earlier keys and values come as ``past_key`` and ``past_value``; for method linear they come as ``initial_state``,
    and the step returns the next state (``return_state``), so that its time does not depend on the earlier length. Null
    for method nystrom, whose landmarks are means over all queries, so that no step continues earlier ones. Null too if
    global tokens have projections of their own, since a past holds one projection only."""
    transfer: Milliseconds
    """Transfer of the forward request's tensors to the device and of the reply back. ``forward`` includes it if the
    basis is ``calibrated``, and excludes it otherwise; 0 if host and device share their memory."""
    encoding: dict[Literal["list", "base64", "safetensors"], Milliseconds]
    """Time to read the tensors of the forward request and to write those of the reply, which ``forward`` excludes.
    There is one time for each form: nested lists in JSON, base64 in JSON, and a safetensors file."""


class PerToken(WireModel):
    """The forward pass, divided by its queries over the batch."""

    flops: float
    """FLOPs that the kernel executes."""
    moved_bytes: float
    """Bytes read and written."""
    predicted_ms: float
    kv_cache_bytes: int
    """Bytes of the cached keys and values of one token, independent of the number of queries."""


class Largest(WireModel):
    """The largest size that fits."""

    size: int
    """The size; 0 if not even 1 fits."""
    kernel: str | None = None
    """The kernel with which it fits."""
    peak_bytes: int | None = None
    """Bytes that it needs at its peak."""
    bound: Literal["memory", "spec", "shape"] = "memory"
    """The limit: memory, a spec with a maximal length, or the largest size that a shape may have."""


class Fits(WireModel):
    """The largest size of one kind of request."""

    longest: Largest
    """Queries and new keys together, at the batch of the request's shape."""
    largest_batch: Largest
    """Sequences, of the lengths of the request's shape."""


class CostLimits(WireModel):
    """The sizes that fit into memory, by the estimate that admits requests."""

    free_bytes: int
    """Free bytes on the device besides resident modules and running requests, or ``memory_bytes`` of the request."""
    forward: Fits
    gradients: Fits | None = None
    """A forward and a backward pass; null where the kernel named has none."""


class Crossover(WireModel):
    """The value of the varied size from which one of two costs less than the other."""

    of: Literal["time", "peak_bytes", "flops"]
    """The median time, the peak memory or the kernel's FLOPs of a forward pass."""
    between: tuple[str, str]
    """Two labels."""
    dimension: str
    searched: tuple[int, int]
    """The first and the last value of the search."""
    cheaper: str | None = None
    """Label of the cheaper alternative at the last value; null if they cost the same there."""
    at: int | None = None
    """The cheaper alternative costs less from this value on, within 1 %; null if it does at every value, or if they
    cost the same."""
    low: int | None = None
    """For times: by the bounds of both predictions, it may cost less from this value on; null if it may at every
    value."""
    high: int | None = None
    """For times: it costs less from this value on for all times within the bounds; null if that is beyond the last
    value."""
    measured: int | None = None
    """For times, with ``measure``: in measured runs it took less time from this value on. Null if no crossover was
    found near ``at``, or if it cannot be measured: on another device, with more memory than there is, for sizes other
    than tokens, or if it would take too long."""


class Picture(WireModel):
    """A reply as a picture."""

    media_type: str
    data: bytes = Field(repr=False)
    """The file."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str | bytes]:
        """The picture, as a notebook shows it."""
        return {self.media_type: self.data.decode() if self.media_type == "image/svg+xml" else self.data}

    def _repr_html_(self) -> None:
        """Nothing: Jupyter prefers HTML, so that a table of its fields would stand in its place."""


class PassCounts(WireModel):
    """The operations of one pass with its kernel.

    Counted is every operation that PyTorch starts and that does work: it reads each tensor that it is given once, and
    writes its answer. A fused kernel is one operation.
    """

    flops: int
    transcendentals: int
    """Elementary functions (exp, log, tanh, roots, sin, cos), by element."""
    bytes_read: int
    bytes_written: int
    operations: int
    """On a GPU, kernels that are launched."""


class Executed(WireModel):
    """The operations of the passes of one shape."""

    forward: PassCounts
    """The forward pass, if only the output is returned."""
    backward: PassCounts | None = None
    """The backward pass alone: the gradients with respect to inputs and parameters, with ``gradients_kernel``; null
    where the kernel named has none."""
    decode: PassCounts | None = None
    """One step with ``decode_kernel``: one query and one new key for each sequence, after which this many keys exist.
    Null if ``predicted.decode`` is null."""


class TapCost(WireModel):
    """The additional cost of returning one tap, or of all taps together compared with a request for the output only."""

    flops: int
    """FLOPs of values that the kernel did not keep, which are computed again."""
    bytes_moved: int
    """Read and written on the device."""
    peak_bytes: int
    output_bytes: int
    """Bytes in the reply, in the dtype of the computation."""
    predicted_ms: float
