"""Bytes read and written, elementary functions and operations of each pass: what PyTorch executes, counted from sizes.

The convention. Counted is every operation that PyTorch's dispatcher starts and that does work, with autograd's own on
the way back; views, allocations and looks at a shape do none. An operation reads each tensor that it is given once: an
expanded dimension as a single element, the same tensor twice as one, by an index what is picked. It writes its answer,
or what it changes in place. The fused kernel is a single operation: it reads queries, keys, values and a mask, and
writes the context and a number for each query, whatever its tiles read again from nearer memory. An elementary function
counts by element: exp, log, tanh, sigmoid, roots, sin, cos and powers that are not whole; a softmax takes one for each
score, the fused kernel one for each pair that it looks at (up to the diagonal, where it is told that they are causal).

Left out: what decides on the host which tiles there are, edits of taps, and the way to and from the device. What
depends on the data is counted as for finite numbers, with keys and values looked through once for it. Not known from
sizes, and taken as said: that a request's mask is as long as the keys, that padding is told by a mask of keys and hides
no whole cell of tiles, and that sequences at other places have the tiles of the last past key. Source of the names of
operations: PyTorch 2.13, on a CPU; on a GPU the fused kernel's arguments and the blocked kernel's masks differ.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from attention_service.core.kernels import tiling
from attention_service.core.kernels.materialized import MATERIALIZED
from attention_service.core.kernels.touched import by_fused
from attention_service.core.tape import Sketch, Tape, Traffic
from attention_service.cost.approximate import approximated
from attention_service.cost.kernels import kernel_of
from attention_service.cost.sketched import Sketched, looked_through, merged, parameters_of, prepared
from attention_service.cost.sketched_blocks import blocked
from attention_service.cost.sketched_fused import fused_blocks
from attention_service.cost.sketched_fused_call import fused
from attention_service.cost.sketched_methods import approximate, whole
from attention_service.cost.sketched_stages import stages, tapped, with_apart
from attention_service.cost.workload import Workload


def traffic(work: Workload, kernel: str) -> Traffic:
    """Of one forward pass with this kernel, what it takes to return the taps included."""
    return _forward(_Asked.of(work, kernel))


def gradient_traffic(work: Workload, kernel: str) -> Traffic:
    """Of the backward pass alone: the gradients with respect to inputs and parameters."""
    return _backward(_Asked.of(replace(work, taps=frozenset({"output"})), kernel))


def own_traffic(work: Workload, *, backward: bool) -> Traffic:
    """Of one pass of a method that approximates, from queries, keys and values to the context."""
    asked = _Asked.of(replace(work, taps=frozenset({"output"})), MATERIALIZED)
    return _own(asked, backward=backward)


@dataclass(frozen=True)
class _Asked:
    """A workload and a kernel, the same for equal ones: what was counted once is remembered."""

    key: tuple[object, ...]
    work: Workload = field(compare=False)
    kernel: str = field(compare=False)

    @classmethod
    def of(cls, work: Workload, kernel: str) -> "_Asked":
        return cls((kernel, tiling.TILING, tiling.WHOLE, work.key), work, kernel)


@lru_cache(maxsize=2048)
def _forward(asked: _Asked) -> Traffic:
    tape = Tape()
    _passed(tape, asked.work, asked.kernel)
    return tape.counted


@lru_cache(maxsize=2048)
def _backward(asked: _Asked) -> Traffic:
    tape = Tape(differentiated=True)
    output = _passed(tape, asked.work, asked.kernel)
    return tape.back(output)


@lru_cache(maxsize=2048)
def _own(asked: _Asked, *, backward: bool) -> Traffic:
    tape = Tape(differentiated=backward)
    context = approximate(tape, whole(tape, asked.work))
    return tape.back(context) if backward else tape.counted


def _of_kernel(kernel: str, work: Workload) -> Callable[[Tape, Sketched], Sketch]:
    if kernel_of(work, kernel).holds == "masks":
        return fused
    return fused_blocks if by_fused(work) else blocked


def _passed(tape: Tape, work: Workload, kernel: str) -> Sketch:
    parameters = parameters_of(tape, work)
    given = prepared(tape, work, parameters)
    taps = set(work.taps) - {"output"}
    if approximated(work) is not None:
        context, kernel = approximate(tape, given), MATERIALIZED  # its taps are there, and narrowed
    elif kernel_of(work, kernel).holds == "pairs":
        context = stages(tape, given, {"context"} | taps)
    else:
        looked_through(tape, given.work, given.k, given.v)
        context = _of_kernel(kernel, work)(tape, given)
        context = with_apart(tape, given, context)
    tapped(tape, given, kernel)
    return merged(tape, work, context, parameters)
