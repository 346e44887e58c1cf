"""Bytes of the tensors of one attention that have no pair dimension."""

from dataclasses import dataclass

from attention_service.cost.tensor_bytes import input_bytes, tap_elements
from attention_service.cost.workload import Workload


@dataclass(frozen=True)
class Held:
    """Bytes of the tensors without a pair dimension."""

    inputs: int
    """Tensors of the request in their own dtypes."""
    q: int
    kv: int
    """Keys and values, the past included."""
    far: int
    """Global queries, keys and values, which are computed for all tokens."""
    context: int
    output: int
    """Output of a module; the output of raw attention is its context."""

    @classmethod
    def of(cls, work: Workload) -> "Held":
        """Return the sizes of a workload."""
        e, projected = work.itemsize, work.sizes is not None
        context = work.batch * work.heads * work.queries * work.value_dim * e
        key = work.batch * work.kv_heads * work.key_dim * e
        value = work.batch * work.kv_heads * work.value_dim * e
        q, kv = work.batch * work.heads * work.queries * work.head_dim * e, work.keys * (key + value)
        far = q + kv if work.apart else 0
        inputs = input_bytes(work)
        return cls(
            inputs=inputs,
            q=q,
            kv=kv,
            far=far,
            context=context,
            output=tap_elements(work, "output") * e if projected else 0,
        )
