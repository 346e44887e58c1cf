"""Bytes of the tensors of one attention that have no pair dimension, and when they are held."""

from dataclasses import dataclass

from attention_service.core.cost.encoding_memory import Making, making
from attention_service.core.cost.tensors import input_bytes, tap_elements
from attention_service.core.cost.workload import Workload


@dataclass(frozen=True)
class Held:
    """Bytes of the tensors without a pair dimension."""

    inputs: int
    """As they came."""
    q: int
    kv: int
    """Keys and values, the past included."""
    new_kv: int
    """Those of the new tokens."""
    mask: int
    """The request's own."""
    context: int
    merged: int
    """The context with its heads side by side, copied for the output projection."""
    output: int
    """Of a module; raw attention's is its context."""
    projected: bool
    making: Making
    """Of q, k and v out of what came."""

    @classmethod
    def of(cls, work: Workload) -> "Held":
        """The sizes of a workload."""
        e = work.itemsize
        context = work.batch * work.heads * work.queries * work.value_dim * e
        twice = 2 if work.apart else 1  # projections apart are made for all tokens
        per_token = twice * work.kv_heads * (work.head_dim + work.value_dim) * e * work.batch
        return cls(
            inputs=input_bytes(work),
            q=twice * work.batch * work.heads * work.queries * work.head_dim * e,
            kv=work.keys * per_token,
            new_kv=work.new_keys * per_token,
            mask=work.request_mask_elements * (1 if work.bool_mask else e),
            context=context,
            merged=0 if work.sizes is None else context,
            output=0 if work.sizes is None else tap_elements(work, "output") * e,
            projected=work.sizes is not None,
            making=making(work),
        )

    @property
    def projecting(self) -> int:
        """While queries, keys and values are made: all that came, and all that is made of it."""
        made = self.q + self.new_kv if self.projected else self.making.anew
        return self.inputs + max(self.making.peak, made + self.joined)

    @property
    def joined(self) -> int:
        """Keys and values copied to stand after the past."""
        return self.kv if self.kv > self.new_kv else 0

    @property
    def made(self) -> int:
        """What is there of q, k and v beside the inputs."""
        return self.q + self.kv if self.projected else self.making.anew + self.joined

    @property
    def problem(self) -> int:
        """While attention runs, when the inputs of a module are gone."""
        if self.projected or self.joined:
            return self.q + self.kv + self.mask
        return self.inputs
