"""The operations of a pass, and those that returning a tap adds."""

from attention_contract.base import WireModel


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
    """With the output alone returned."""
    backward: PassCounts | None = None
    """The backward pass alone: the gradients with respect to inputs and parameters, with ``gradients_kernel``; null
    where the kernel named has none."""
    decode: PassCounts | None = None
    """One step with ``decode_kernel``: a query and a new key of each sequence, at whose end as many keys are there;
    null where ``predicted.decode`` is."""


class TapCost(WireModel):
    """The cost that returning one tap adds to the request without it, or several together to the output alone."""

    flops: int
    """FLOPs of values that the kernel did not keep, which are computed again."""
    bytes_moved: int
    """Read and written on the device."""
    peak_bytes: int
    output_bytes: int
    """In the reply, in the dtype that is computed in."""
    predicted_ms: float
