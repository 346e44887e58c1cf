"""Bytes read and written, elementary functions and operations of each pass, counted by running it on meta tensors.

``operation_counter`` has the convention. The passes are the server's own: a forward pass leads from the request's
tensors to the output and the taps, a backward pass from a gradient of the output to the inputs and parameters. Edits of
taps are left out, and so is the way to and from the device. What depends on the data is counted as for finite numbers,
and padding as if a mask of keys told it. Source of the operations: PyTorch 2.13, on a CPU.
"""

from dataclasses import asdict, replace
from functools import lru_cache

from attention_contract.positions import NoPosition
from attention_service.core.blocks import REPEATED
from attention_service.core.kernels.materialized import MATERIALIZED
from attention_service.cost.approximate import plainly, sent_always
from attention_service.cost.extrapolation import by_pieces
from attention_service.cost.gradient_memory import names_of
from attention_service.cost.kernels import kernel_of
from attention_service.cost.operation_counter import OperationCounter, Traffic
from attention_service.cost.passes import registered
from attention_service.cost.rehearsal import counted_in
from attention_service.cost.stand_ins import long_enough
from attention_service.cost.workload import Workload


def traffic(work: Workload, kernel: str) -> Traffic:
    """One forward pass with this kernel, what it takes to return the taps included."""
    return Traffic(**_found(work, kernel, False)["pass"])


def gradient_traffic(work: Workload, kernel: str) -> Traffic:
    """The backward pass alone: the gradients with respect to inputs and parameters."""
    return Traffic(**_found(plainly(work), kernel, True)["pass"])


def own_traffic(work: Workload, *, backward: bool) -> Traffic:
    """One pass of a method that approximates, from queries, keys and values to the context."""
    if not backward:
        return Traffic(**_found(plainly(work), MATERIALIZED, False)["attention"])
    spec = work.spec.model_copy(update={"position": NoPosition(), "qk_norm": None})
    raw = replace(work, spec=spec, sizes=None, inputs=frozenset({"query", "key", "value"}))
    return gradient_traffic(replace(raw, sent=work.sent | sent_always(raw)), MATERIALIZED)


@lru_cache(maxsize=1024)
def _found(work: Workload, kernel: str, backward: bool) -> dict[str, dict[str, int]]:
    plain = replace(work.unedited, averaged=False, reported=False)
    return by_pieces(long_enough(plain), lambda part: _counted(part, kernel, backward=backward))


def _counted(work: Workload, kernel: str, *, backward: bool) -> dict[str, dict[str, int]]:
    """The counts of a forward pass and of its attention, or of the way back alone."""
    passes, counter = registered(), OperationCounter()
    by, parameters = kernel_of(work, kernel).rehearsal(work), passes.parameters(work)
    repeated = REPEATED.set(counter.repeated)
    try:
        with counted_in(counter, graph=backward):
            if backward:
                names = [name for name in names_of(work) if name != "mask"]
                passes.gradients(work, by, parameters, tuple(names), twice=False, checked=False)
            else:
                passes.forward(work, by, parameters)
    finally:
        REPEATED.reset(repeated)
    whole, at = counter.counted, counter.at
    if backward:  # what dropout returns is computed after the gradients
        return {"pass": asdict(at.get("taps", whole) - at["gradients"])}
    return {"pass": asdict(whole), "attention": asdict(at["taps"] - at["context"])}
