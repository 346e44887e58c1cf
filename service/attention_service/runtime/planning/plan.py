"""A plan: the kernel that will run, and what it is expected to cost."""

from dataclasses import dataclass

from attention_service.cost import Estimate


@dataclass(frozen=True)
class Plan:
    """The chosen kernel and its expected cost."""

    kernel: str
    flops: int
    """Exact."""
    peak_bytes: int
    """An upper bound: the request is admitted for as many bytes."""
    predicted: Estimate
    slow_masks: bool = False
    """True for masks of so many small operations that sizes do not determine the time."""
