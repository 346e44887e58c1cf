"""The contract's account of one shape."""

from dataclasses import replace

from attention_contract.schemas.complexity import Cost, PeakBytes, Shape
from attention_service.core.cost.approximate import exactly
from attention_service.core.cost.clock import Clock
from attention_service.core.cost.flops import backward_pass, forward_pass, pair_count
from attention_service.core.cost.memory import peak_bytes
from attention_service.core.cost.tensors import (
    input_bytes,
    kv_cache_bytes,
    kv_cache_bytes_per_token,
    output_bytes,
    parameter_count,
)
from attention_service.core.cost.time import executed_backward_flops, executed_flops
from attention_service.core.cost.workload import Workload


def cost_of(work: Workload, shape: Shape, kernel: str, clock: Clock) -> Cost:
    """Everything that one shape of a workload costs; ``kernel`` is the one that the planner would take."""
    work = replace(
        work, batch=shape.batch, queries=shape.queries, past=shape.past, keys=shape.past + new_keys(shape) + work.extra
    )
    plain = replace(work, taps=frozenset({"output"}), selected_heads=None, selected_queries=None)
    return Cost(
        shape=shape.model_copy(update={"keys": work.new_keys}),
        pairs=work.pairs,
        allowed_pairs=pair_count(work, masked=True),
        forward=forward_pass(work),
        backward=backward_pass(work, fused=False),
        backward_fused=backward_pass(work, fused=True),
        kernel=kernel,
        executed_flops=executed_flops(work, kernel),
        executed_backward_flops=executed_backward_flops(work, kernel),
        parameter_bytes=parameter_count(work) * work.itemsize,
        input_bytes=input_bytes(work),
        output_bytes=output_bytes(work),
        kv_cache_bytes=kv_cache_bytes(work),
        kv_cache_bytes_per_token=kv_cache_bytes_per_token(work),
        peak_bytes=PeakBytes(
            fused=peak_bytes(exactly(plain), "fused"),
            blocked=peak_bytes(exactly(plain), "blocked"),
            materialized=peak_bytes(exactly(plain), "materialized"),
            request=peak_bytes(work, kernel),
        ),
        predicted_ms=clock.forward(work, kernel).median * 1e3,
    )


def new_keys(shape: Shape) -> int:
    """The keys that a shape brings: as many as queries, unless it says otherwise."""
    return shape.queries if shape.keys is None else shape.keys
