"""The contract's account of one shape."""

from dataclasses import replace
from typing import Literal

from attention_contract.schemas.answers import Milliseconds, PerToken, Predicted
from attention_contract.schemas.complexity import Cost, MemoryPhase, PeakBytes, Shape
from attention_contract.schemas.counts import Executed, PassCounts
from attention_service.core.cost.approximate import exactly
from attention_service.core.cost.clock import Clock, Estimate
from attention_service.core.cost.flops import backward_pass, forward_pass, pair_count
from attention_service.core.cost.gradient_memory import gradient_phases
from attention_service.core.cost.memory import memory_phases, peak_bytes
from attention_service.core.cost.phases import Phase
from attention_service.core.cost.taps import tap_costs
from attention_service.core.cost.tensors import (
    input_bytes,
    kv_cache_bytes,
    kv_cache_bytes_per_token,
    output_bytes,
    parameter_count,
)
from attention_service.core.cost.terms import FORMS, Form
from attention_service.core.cost.time import executed_backward_flops, executed_flops, moved_bytes
from attention_service.core.cost.traffic import gradient_traffic, traffic
from attention_service.core.cost.workload import Workload
from attention_service.core.tape import Traffic


def cost_of(
    work: Workload,
    shape: Shape,
    kernel: str,
    clock: Clock,
    *,
    gradients: str | None = None,
    decode: str | None = None,
) -> Cost:
    """Everything that one shape of a workload costs.

    ``kernel`` is the one that the planner would take; ``gradients`` and ``decode`` are those for gradients and for a
    decode step, where there are any.
    """
    work = replace(
        work, batch=shape.batch, queries=shape.queries, past=shape.past, keys=shape.past + new_keys(shape) + work.extra
    )
    plain = plainly(work)
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
        executed=_executed(plain, kernel, decode),
        taps=tap_costs(work, kernel, clock),
        intensity=executed_flops(plain, kernel) / max(moved_bytes(plain, kernel), 1),
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
        memory=[
            *(_phase("forward", each) for each in memory_phases(work, kernel)),
            *(_phase("backward", each) for each in gradient_phases(plain, taps=False, kernel=gradients or kernel)),
        ],
        predicted_ms=clock.forward(work, kernel).median * 1e3,
        predicted=Predicted(
            basis=clock.basis,
            forward=_milliseconds(clock.forward(work, kernel)),
            gradients=None if gradients is None else _milliseconds(clock.gradients(plain, gradients)),
            decode=None if decode is None else _milliseconds(clock.forward(plain.decode, decode)),
            transfer=_milliseconds(clock.transfer(input_bytes(work) + output_bytes(work))),
            encoding={form: _milliseconds(_carried(work, form, clock)) for form in FORMS},
        ),
        per_token=_per_token(work, kernel, clock),
    )


def _executed(work: Workload, kernel: str, decode: str | None) -> Executed:
    step = work.decode
    return Executed(
        forward=_counts(executed_flops(work, kernel), traffic(work, kernel)),
        backward=_counts(executed_backward_flops(work, kernel), gradient_traffic(work, kernel)),
        decode=None if decode is None else _counts(executed_flops(step, decode), traffic(step, decode)),
    )


def _counts(flops: int, found: Traffic) -> PassCounts:
    return PassCounts(
        flops=flops,
        transcendentals=found.transcendentals,
        bytes_read=found.read,
        bytes_written=found.written,
        operations=found.operations,
    )


def _phase(direction: Literal["forward", "backward"], phase: Phase) -> MemoryPhase:
    return MemoryPhase(direction=direction, name=phase.name, tensors=dict(phase.tensors), bytes=phase.bytes)


def _milliseconds(estimate: Estimate) -> Milliseconds:
    return Milliseconds(median_ms=estimate.median * 1e3, low_ms=estimate.low * 1e3, high_ms=estimate.high * 1e3)


def _carried(work: Workload, form: Form, clock: Clock) -> Estimate:
    read, written = input_bytes(work) // work.itemsize, output_bytes(work) // work.itemsize
    return clock.carrying(form, read, written, work.itemsize)


def _per_token(work: Workload, kernel: str, clock: Clock) -> PerToken:
    tokens = work.batch * work.queries
    return PerToken(
        flops=executed_flops(work, kernel) / tokens,
        moved_bytes=moved_bytes(work, kernel) / tokens,
        predicted_ms=clock.forward(work, kernel).median * 1e3 / tokens,
        kv_cache_bytes=kv_cache_bytes_per_token(work),
    )


def plainly(work: Workload) -> Workload:
    """The same with the output alone returned."""
    return replace(work, taps=frozenset({"output"}), selected_heads=None, selected_queries=None)


def new_keys(shape: Shape) -> int:
    """The keys that a shape brings: as many as queries, unless it says otherwise."""
    return shape.queries if shape.keys is None else shape.keys
