"""The accuracy of the cost model: predicted against measured times of past requests."""

from datetime import datetime
from typing import Literal

from attention_contract.base import WireModel

Computation = Literal[
    "forward", "weights", "attribution", "gradients", "effects", "hopfield", "circuits", "similarity", "rollout",
    "context", "generation", "lens",
]  # fmt: skip
"""The kind of a request."""
Basis = Literal["calibrated", "rates", "datasheet"]
"""The basis of predicted times: the requests that ran on this device, a few rates of it, or its datasheet."""


class RatioHistogram(WireModel):
    """A histogram of measured over predicted time."""

    edges: list[float]
    """Bounds of the bins, ascending, in equal steps of the logarithm."""
    counts: list[int]
    """One count more than edges: up to and including the first edge, up to the second, …, above the last."""


class MemoryErrors(WireModel):
    """The ratio of measured peak memory to the estimate, minus 1; negative if less was needed."""

    count: int
    median_error: float
    largest_error: float
    """The error with the largest ratio of measured to estimated memory."""


class PredictionErrors(WireModel):
    """Measured time over predicted, less 1, over the last requests of one kernel and purpose."""

    kernel: str
    """The kernel, or the approximate method, as in ``ran``; of a whole model, its name."""
    model: bool = False
    """True for the requests of a whole model."""
    purpose: Computation
    count: int
    """The number of requests since the clock was last set, 1,000 at most."""
    median_error: float
    mean_error: float
    median_absolute_error: float
    p95_absolute_error: float
    coverage: float
    """The share of requests that took between ``predicted_low_ms`` and ``predicted_high_ms``; 0.9 is expected."""
    histogram: RatioHistogram
    memory: MemoryErrors | None = None
    """Null if the peak of one request cannot be measured, as on a CPU."""


class AccuracyReply(WireModel):
    """The accuracy of predictions on this device."""

    device: str
    basis: Basis
    calibrated_at: datetime | None = None
    """The time of the last correction of predictions by measured times; null if there was none."""
    recalibrations: int
    """The number of such corrections since the server started."""
    predictions: list[PredictionErrors]
    """One entry for each kernel and purpose, in alphabetical order."""
