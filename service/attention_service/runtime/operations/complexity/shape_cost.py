"""The contract's account of one shape."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Literal, NamedTuple

from attention_contract.errors import KernelUnsuitable
from attention_contract.schemas.answers import Executed, Milliseconds, PassCounts, PerToken, Predicted, TapCost
from attention_contract.schemas.costs.complexity import Cost, MemoryPhase, PeakBytes
from attention_service.cost import FORMS, Estimate, Traffic
from attention_service.cost.clock import carrying, transfer
from attention_service.cost.flops import (
    backward_pass,
    executed_backward_flops,
    executed_flops,
    forward_pass,
    pair_count,
    tap_flops,
)
from attention_service.cost.rehearsal import Seen
from attention_service.cost.tensor_bytes import (
    input_bytes,
    kv_cache_bytes,
    kv_cache_bytes_per_token,
    output_bytes,
    parameter_count,
    tap_elements,
)
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.operations.complexity.subjects import Subject
from attention_service.runtime.operations.complexity.valid_sizes import shape_at
from attention_service.runtime.planning.blank_requests import decode_step, exactly
from attention_service.runtime.planning.kernel_choice import able_kernels


def cost_of(subject: Subject, bound: BoundRequest) -> Cost:
    """Everything that one shape of a subject costs, with the kernels that the planner would choose.

    Beside its own, the memory of all kernels is told that a planner may choose.
    """
    kernel, taps, device = subject.kernel_of(bound), subject.taps, subject.place.device
    plain, whole = subject.forward(bound, kernel), subject.forward(bound, kernel, taps)
    forward_time = subject.time(whole, bound, kernel)
    gradients = backward = backward_flops = backward_counts = backward_time = None
    with suppress(KernelUnsuitable):
        gradients = subject.kernel_of(bound, "gradients")
    if gradients is not None:
        backward = subject.gradients(bound, gradients)
        backward_flops = executed_backward_flops(bound, gradients)
        backward_counts = _counts(backward_flops, backward.of("backward of attention", "gradients"))
        backward_time = milliseconds(subject.time(backward, bound, gradients, "gradients"))
    decode = decode_counts = decode_time = None
    if (step := decode_step(bound)) is not None:
        decode = subject.kernel_of(step)
        stepping = subject.forward(step, decode)
        decode_counts = _counts(executed_flops(step, decode), stepping.total())
        decode_time = milliseconds(subject.time(stepping, step, decode))
    exact = exactly(bound)
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
        executed_backward_flops=backward_flops,
        executed=Executed(
            forward=_counts(executed_flops(bound, kernel), plain.total()),
            backward=backward_counts,
            decode=decode_counts,
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
            gradients=backward_time,
            decode=decode_time,
            transfer=milliseconds(transfer(subject.clock, read + written)),
            encoding={
                form: milliseconds(carrying(subject.clock, form, (read + written) // bound.itemsize, bound.itemsize))
                for form in FORMS
            },
        ),
        per_token=_per_token(bound, kernel, whole.total(), forward_time),
    )


def _counts(flops: int, traffic: Traffic) -> PassCounts:
    return PassCounts(
        flops=flops,
        transcendentals=traffic.transcendentals,
        bytes_read=traffic.read,
        bytes_written=traffic.written,
        operations=traffic.operations,
    )


def _phases(direction: Literal["forward", "backward"], rehearsal: Seen) -> list[MemoryPhase]:
    return [
        MemoryPhase(direction=direction, name=name, tensors=named_tensors(held), bytes=sum(held.values()))
        for name, held in rehearsal.phases.items()
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


def tap_costs(subject: Subject, bound: BoundRequest, kernel: str) -> dict[str, TapCost]:
    """Return the cost of every tap but the output, each beside all others that are returned."""
    return {tap: _added(subject, bound, frozenset({tap}), kernel) for tap in sorted(subject.taps - {"output"})}


def taps_cost(subject: Subject, bound: BoundRequest, kernel: str) -> TapCost | None:
    """Return the cost of all taps together; None if there are none."""
    taps = subject.taps - {"output"}
    return _added(subject, bound, taps, kernel) if taps else None


def _added(subject: Subject, bound: BoundRequest, taps: frozenset[str], kernel: str) -> TapCost:
    """Return the cost that these taps add to the same request without them."""
    all_taps, others = subject.taps, subject.taps - taps
    with_taps, without = (subject.forward(bound, kernel, return_taps) for return_taps in (all_taps, others))
    times = [subject.time(trace, bound, kernel).median for trace in (with_taps, without)]
    return TapCost(
        flops=tap_flops(bound, all_taps, kernel) - tap_flops(bound, others, kernel),
        bytes_moved=with_taps.total().moved - without.total().moved,
        peak_bytes=with_taps.peak_bytes - without.peak_bytes,
        output_bytes=sum(tap_elements(bound, tap) for tap in taps) * bound.itemsize,
        predicted_ms=(times[0] - times[1]) * 1e3,
    )


class TensorGroup(NamedTuple):
    """A tensor, or several tensors with one lifetime."""

    name: str
    meaning: str


TENSORS: Final[Mapping[str, TensorGroup]] = {
    "inputs": TensorGroup(
        "inputs", "the request's tensors that are still needed: query, key, value, past, mask, parameters"
    ),
    "roles": TensorGroup("q_k_v", "queries, keys and values by head, and their intermediates"),
    "q": TensorGroup("q", "queries by head, while separately projected queries are merged into them"),
    "scores": TensorGroup("scores", "one score per head, query and key, and the factors of their product"),
    "capped_scores": TensorGroup("capped_scores", "scores after the softcap, and its intermediates"),
    "masked_scores": TensorGroup("masked_scores", "masked scores, masks, position bias, and their intermediates"),
    "lse": TensorGroup("lse", "the log-sum-exp of each query, and its intermediates"),
    "weights": TensorGroup("weights", "one weight per head, query and key, and their intermediates"),
    "context": TensorGroup(
        "context", "the weighted sums of the values by head, and intermediates of a kernel or method"
    ),
    "taps": TensorGroup("taps", "taps and states that are returned: recomputed, selected and converted"),
    "output": TensorGroup("output", "the output of the module, computed and converted"),
    "comparison": TensorGroup(
        "comparison", "exact attention for a block of queries, and the difference of its weights"
    ),
    "outputs": TensorGroup(
        "compared_outputs", "the outputs of the approximation and of exact attention, and their difference"
    ),
    "workspace": TensorGroup("workspace", "temporary memory of a kernel or an operator"),
    "graph": TensorGroup(
        "saved_for_backward",
        "other tensors that the forward pass keeps for the backward pass, without a number per pair",
    ),
    "pairs": TensorGroup("over_pairs", "scores, masks and weights of the forward pass: one number per query and key"),
    "upstream": TensorGroup("upstream", "the gradient of the output, from the request"),
    "gradients": TensorGroup("gradients", "∂L/∂ of inputs, parameters, taps and intermediates"),
    "of_pairs": TensorGroup("gradients_over_pairs", "∂L/∂ of tensors with a number per query and key"),
}
"""Tensors by their names in a rehearsal."""


def named_tensors(held: Mapping[str, int]) -> dict[str, int]:
    """Sum the bytes of a phase by the reply's tensor names."""
    bytes_by_name: dict[str, int] = {}
    for name, size in held.items():
        called = TENSORS[name].name if name in TENSORS else name
        bytes_by_name[called] = bytes_by_name.get(called, 0) + size
    return bytes_by_name
