"""The contract's account of one shape."""

from typing import Literal

from attention_contract.errors import KernelUnsuitable
from attention_contract.schemas.answers import Milliseconds, PerToken, Predicted
from attention_contract.schemas.complexity import Cost, MemoryPhase, PeakBytes
from attention_contract.schemas.counts import Executed, PassCounts
from attention_service.cost import FORMS, Estimate, Traffic
from attention_service.cost.clock import carrying, transfer
from attention_service.cost.flops import (
    backward_pass,
    executed_backward_flops,
    executed_flops,
    forward_pass,
    pair_count,
)
from attention_service.cost.rehearsal import Seen
from attention_service.cost.tensor_bytes import (
    input_bytes,
    kv_cache_bytes,
    kv_cache_bytes_per_token,
    output_bytes,
    parameter_count,
)
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.operations.complexity.subjects import Subject
from attention_service.runtime.operations.complexity.tap_costs import tap_costs, taps_cost
from attention_service.runtime.operations.complexity.tensor_names import told
from attention_service.runtime.operations.complexity.valid_sizes import shape_at
from attention_service.runtime.planning.blank_requests import decode_step, exactly
from attention_service.runtime.planning.kernel_choice import able_kernels


def cost_of(subject: Subject, bound: BoundRequest) -> Cost:
    """Everything that one shape of a subject costs, with the kernels that the planner would choose.

    Beside its own, the memory of all kernels is told that a planner may choose.
    """
    kernel, taps, device = subject.kernel_of(bound), subject.taps, subject.place.device
    try:
        gradients = subject.kernel_of(bound, "gradients")
    except KernelUnsuitable:
        gradients = None
    step = decode_step(bound)
    decode = None if step is None else subject.kernel_of(step)
    exact = exactly(bound)
    plain, whole = subject.forward(bound, kernel), subject.forward(bound, kernel, taps)
    backward = None if gradients is None else subject.gradients(bound, gradients)
    stepping = None if step is None or decode is None else subject.forward(step, decode)
    forward_time = subject.time(whole, bound, kernel)
    read, written = input_bytes(bound), output_bytes(bound, taps)
    return Cost(
        shape=shape_at(bound),
        pairs=bound.pairs,
        allowed_pairs=pair_count(bound, masked=True),
        forward=forward_pass(bound),
        backward=backward_pass(bound, fused=False),
        backward_fused=backward_pass(bound, fused=True),
        kernel=kernel,
        gradients_kernel=gradients,
        decode_kernel=decode,
        executed_flops=executed_flops(bound, kernel),
        executed_backward_flops=None if gradients is None else executed_backward_flops(bound, gradients),
        executed=Executed(
            forward=_counts(executed_flops(bound, kernel), plain.total()),
            backward=None
            if backward is None or gradients is None
            else _counts(executed_backward_flops(bound, gradients), backward.of("backward of attention", "gradients")),
            decode=None
            if stepping is None or step is None or decode is None
            else _counts(executed_flops(step, decode), stepping.total()),
        ),
        taps=tap_costs(subject, bound, kernel),
        taps_together=taps_cost(subject, bound, kernel),
        intensity=executed_flops(bound, kernel) / max(plain.total().moved, 1),
        parameter_bytes=parameter_count(bound) * bound.itemsize,
        input_bytes=read,
        output_bytes=written,
        kv_cache_bytes=kv_cache_bytes(bound),
        kv_cache_bytes_per_token=kv_cache_bytes_per_token(bound),
        peak_bytes=PeakBytes(
            **{name: subject.forward(exact, name).peak_bytes for name in able_kernels(exact, device, None)},
            request=whole.peak_bytes,
            gradients=None if backward is None else backward.peak_bytes,
        ),
        memory=[*_phases("forward", whole), *([] if backward is None else _phases("backward", backward))],
        predicted_ms=forward_time.median * 1e3,
        predicted=Predicted(
            basis=subject.clock.basis,
            forward=milliseconds(forward_time),
            gradients=None
            if backward is None or gradients is None
            else milliseconds(subject.time(backward, bound, gradients, "gradients")),
            decode=None
            if stepping is None or step is None or decode is None
            else milliseconds(subject.time(stepping, step, decode)),
            transfer=milliseconds(transfer(subject.clock, read + written)),
            encoding={
                form: milliseconds(carrying(subject.clock, form, (read + written) // bound.itemsize, bound.itemsize))
                for form in FORMS
            },
        ),
        per_token=_per_token(bound, kernel, whole.total(), forward_time),
    )


def _counts(flops: int, found: Traffic) -> PassCounts:
    return PassCounts(
        flops=flops,
        transcendentals=found.transcendentals,
        bytes_read=found.read,
        bytes_written=found.written,
        operations=found.operations,
    )


def _phases(direction: Literal["forward", "backward"], found: Seen) -> list[MemoryPhase]:
    return [
        MemoryPhase(direction=direction, name=name, tensors=told(held), bytes=sum(held.values()))
        for name, held in found.phases.items()
    ]


def milliseconds(estimate: Estimate) -> Milliseconds:
    """Return a predicted time on the wire."""
    return Milliseconds(median_ms=estimate.median * 1e3, low_ms=estimate.low * 1e3, high_ms=estimate.high * 1e3)


def _per_token(bound: BoundRequest, kernel: str, counts: Traffic, time: Estimate) -> PerToken:
    tokens = bound.batch * bound.queries
    return PerToken(
        flops=executed_flops(bound, kernel) / tokens,
        moved_bytes=counts.moved / tokens,
        predicted_ms=time.median * 1e3 / tokens,
        kv_cache_bytes=kv_cache_bytes_per_token(bound),
    )
