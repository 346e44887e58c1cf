"""Bytes of the tensors of one attention that have no pair dimension."""

from dataclasses import dataclass

from attention_service.cost.encoding import position_cost
from attention_service.cost.tensors import input_bytes, mask_bytes, tap_elements
from attention_service.cost.workload import Workload


@dataclass(frozen=True)
class Held:
    """Bytes of the tensors without a pair dimension."""

    inputs: int
    """As they came."""
    q: int
    kv: int
    """Keys and values, the past included."""
    far: int
    """Of projections apart, which are made for all tokens."""
    made: int
    """What is made of q, k and v beside the inputs."""
    problem: int
    """What is there of inputs, q, k, v and mask while attention runs: the inputs of a module are gone."""
    context: int
    merged: int
    """The context with its heads side by side, copied for the output projection."""
    output: int
    """Of a module; raw attention's is its context."""

    @classmethod
    def of(cls, work: Workload) -> "Held":
        """The sizes of a workload."""
        e, projected = work.itemsize, work.sizes is not None
        context = work.batch * work.heads * work.queries * work.value_dim * e
        key = work.batch * work.kv_heads * work.key_dim * e
        value = work.batch * work.kv_heads * work.value_dim * e
        q, kv = work.batch * work.heads * work.queries * work.head_dim * e, work.keys * (key + value)
        cost = position_cost(work, work.head_dim)
        far = q + kv if work.apart else 0
        anew = work.spec.qk_norm is not None or cost.turned > 0 or cost.added > 0
        joined = kv if work.past or work.extra else 0
        raw = joined + (q + work.new_keys * key if anew else 0)
        inputs = input_bytes(work)
        return cls(
            inputs=inputs,
            q=q,
            kv=kv,
            far=far,
            made=q + kv + far if projected else raw,
            problem=q + kv + far + mask_bytes(work) if projected or joined else inputs,
            context=context,
            merged=context if projected else 0,
            output=tap_elements(work, "output") * e if projected else 0,
        )
