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
    off_loop: bool = False
    """True if the sizes do not determine the time: masks of many small operations, or files that are read. It runs
    beside the event loop, among the long."""
    result_bytes: int | None = None
    """An upper bound of the results that are copied from a GPU to the host; None if ``peak_bytes`` bounds them."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that the request is admitted for beside a GPU."""
        return self.peak_bytes if self.result_bytes is None else self.result_bytes
