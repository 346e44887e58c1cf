"""How far the cost model was off: what it predicted of past requests, beside what was measured."""

from datetime import datetime
from typing import Literal

from attention_contract.base import WireModel

Purpose = Literal["forward", "weights", "gradients", "hopfield"]
"""What a request asked for."""
Basis = Literal["calibrated", "rates", "datasheet"]
"""What predictions of time rest on: runs of each kernel on this device, a few rates of it, or what its maker says."""


class RatioHistogram(WireModel):
    """How many ratios of measured to predicted lie between which bounds."""

    edges: list[float]
    """Ascending, in even steps of the logarithm."""
    counts: list[int]
    """One more than edges: up to and with the first edge, up to the second, …, above the last."""


class MemoryErrors(WireModel):
    """Measured peak memory over the estimate, less 1; negative where less was needed."""

    count: int
    median_error: float
    largest_error: float
    """The one that comes closest to too little memory, or is beyond it."""


class PredictionErrors(WireModel):
    """Of one kernel and purpose: measured time over predicted, less 1, over the last requests."""

    kernel: str
    """As in ``ran``: a kernel, or a method that approximates."""
    purpose: Purpose
    count: int
    """How many requests this is over: those since the clock was last set, 1,000 at most."""
    median_error: float
    mean_error: float
    median_absolute_error: float
    p95_absolute_error: float
    coverage: float
    """The share that took between ``predicted_low_ms`` and ``predicted_high_ms``, of which nine tenths are expected."""
    histogram: RatioHistogram
    memory: MemoryErrors | None = None
    """Null where a request's own peak can't be measured, as on a CPU."""


class AccuracyReply(WireModel):
    """How predictions fared on this device."""

    device: str
    basis: Basis
    calibrated_at: datetime | None = None
    """When the clock was calibrated; null where it was not."""
    recalibrating: bool
    """Whether the device is being measured now."""
    recalibrations: int
    """How often it was, since the server started."""
    predictions: list[PredictionErrors]
    """By kernel and purpose, in the order of the alphabet."""
