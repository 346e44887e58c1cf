"""The contract's account of one shape."""

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from attention_contract.schemas.answers import Milliseconds, PerToken, Predicted
from attention_contract.schemas.complexity import Cost, MemoryPhase, PeakBytes, Shape
from attention_contract.schemas.counts import Executed, PassCounts
from attention_service.core.kernels import KERNELS
from attention_service.cost.approximate import decode_step, exactly, plainly
from attention_service.cost.clock import Clock, Estimate
from attention_service.cost.flops import backward_pass, forward_pass, pair_count
from attention_service.cost.gradient_memory import gradient_phases
from attention_service.cost.memory import memory_phases, peak_bytes
from attention_service.cost.memory_phases import Phase, peak_of
from attention_service.cost.operation_counter import Traffic
from attention_service.cost.taps import tap_costs, taps_cost
from attention_service.cost.tensor_bytes import (
    input_bytes,
    kv_cache_bytes,
    kv_cache_bytes_per_token,
    output_bytes,
    parameter_count,
)
from attention_service.cost.tensor_names import told
from attention_service.cost.terms import FORMS, Form
from attention_service.cost.time import executed_backward_flops, executed_flops, moved_bytes
from attention_service.cost.traffic import gradient_traffic, traffic
from attention_service.cost.workload import Workload


def cost_of(
    work: Workload,
    shape: Shape,
    kernel: str,
    clock: Clock,
    *,
    able: Collection[str] | None = None,
    gradients: str | None = None,
    decode: str | None = None,
) -> Cost:
    """Everything that one shape of a workload costs.

    ``kernel`` is the one that the planner would take; ``gradients`` and ``decode`` are those for gradients and for
    ``decode_step``, where there are any. ``able``: the kernels whose memory is told beside it; None for all that a
    planner may choose.
    """
    work = replace(
        work,
        batch=shape.batch,
        queries=shape.queries,
        past=shape.past,
        keys=shape.past + new_keys(shape) + work.added_keys,
    )
    plain = plainly(work)
    beside = [entry.name for entry in KERNELS if entry.make().automatic] if able is None else able
    backward = () if gradients is None else gradient_phases(plain, gradients)
    exact, step = exactly(plain), decode_step(plain) if decode is not None else None
    return Cost(
        shape=shape.model_copy(update={"keys": work.new_keys}),
        pairs=work.pairs,
        allowed_pairs=pair_count(work, masked=True),
        forward=forward_pass(work),
        backward=backward_pass(work, fused=False),
        backward_fused=backward_pass(work, fused=True),
        kernel=kernel,
        gradients_kernel=gradients,
        decode_kernel=decode,
        executed_flops=executed_flops(work, kernel),
        executed_backward_flops=None if gradients is None else executed_backward_flops(plain, gradients),
        executed=_executed(plain, kernel, gradients, step, decode),
        taps=tap_costs(work, kernel, clock),
        taps_together=taps_cost(work, kernel, clock),
        intensity=executed_flops(plain, kernel) / max(moved_bytes(plain, kernel), 1),
        parameter_bytes=parameter_count(work) * work.itemsize,
        input_bytes=input_bytes(work),
        output_bytes=output_bytes(work),
        kv_cache_bytes=kv_cache_bytes(work),
        kv_cache_bytes_per_token=kv_cache_bytes_per_token(work),
        peak_bytes=PeakBytes(
            **{name: peak_bytes(exact, name) for name in beside},
            request=peak_bytes(work, kernel),
            gradients=peak_of(backward) if backward else None,
        ),
        memory=[
            *(_phase("forward", each) for each in memory_phases(work, kernel)),
            *(_phase("backward", each) for each in backward),
        ],
        predicted_ms=clock.forward(work, kernel).median * 1e3,
        predicted=Predicted(
            basis=clock.basis,
            forward=milliseconds(clock.forward(work, kernel)),
            gradients=None if gradients is None else milliseconds(clock.gradients(plain, gradients)),
            decode=None if step is None or decode is None else milliseconds(clock.forward(step, decode)),
            transfer=milliseconds(clock.transfer(input_bytes(work) + output_bytes(work))),
            encoding={form: milliseconds(_carried(work, form, clock)) for form in FORMS},
        ),
        per_token=_per_token(work, kernel, clock),
    )


def _executed(
    work: Workload, kernel: str, gradients: str | None, step: Workload | None, decode: str | None
) -> Executed:
    backward = (
        None if gradients is None else (executed_backward_flops(work, gradients), gradient_traffic(work, gradients))
    )
    stepping = None if step is None or decode is None else (executed_flops(step, decode), traffic(step, decode))
    return Executed(
        forward=_counts(executed_flops(work, kernel), traffic(work, kernel)),
        backward=None if backward is None else _counts(*backward),
        decode=None if stepping is None else _counts(*stepping),
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
    return MemoryPhase(direction=direction, name=phase.name, tensors=told(phase), bytes=phase.bytes)


def milliseconds(estimate: Estimate) -> Milliseconds:
    """Return a predicted time on the wire."""
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


def new_keys(shape: Shape) -> int:
    """The keys that a shape brings: as many as queries, unless it says otherwise."""
    return shape.queries if shape.keys is None else shape.keys
