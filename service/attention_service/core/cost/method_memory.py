"""Peak memory of a method that approximates, rehearsed: its steps are its own, and what they hold is nobody else's."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from attention_contract.spec import Linformer
from attention_service.core.attention import attend
from attention_service.core.cost.gradient_ends import gradient_bytes
from attention_service.core.cost.gradient_rehearsal import rehearsed
from attention_service.core.cost.held import Held
from attention_service.core.cost.phases import Ledger, Phase
from attention_service.core.cost.pieces import by_pieces
from attention_service.core.cost.preparing_memory import prepare
from attention_service.core.cost.rehearsal import Account, most_held
from attention_service.core.cost.stand_ins import (
    edits_of,
    inputs_of,
    names_of,
    output_of,
    parameters_of,
    problem_of,
    selection_of,
)
from attention_service.core.cost.tensors import input_bytes
from attention_service.core.cost.workload import Workload

_LARGEST = 2**46
"""Bytes that no device has. Of what is sent more only that is told."""


def method_phases(work: Workload) -> tuple[Phase, ...]:
    """The forward pass: projecting, the method, and its output."""
    ledger = Ledger()
    prepare(ledger, work)
    if input_bytes(work) > _LARGEST:
        return ledger.phases
    held = Held.of(work)
    outputs = {"context": held.context, "merged": held.merged, "output": held.output}
    ends = {"attention": dict(ledger.held), "project out": dict(ledger.held) | outputs}
    found = by_pieces(_long_enough(work), _forward)
    return (*ledger.phases, *(_phase(name, found[name], tensors) for name, tensors in ends.items()))


def method_gradient_phases(work: Workload, *, taps: bool) -> tuple[Phase, ...]:
    """A forward and a backward pass; ``taps``: with respect to every tap as well."""
    known = {"inputs": input_bytes(work)}
    if known["inputs"] > _LARGEST:
        return (_phase("inputs", known["inputs"], known),)
    found = by_pieces(_long_enough(work), partial(rehearsed, names=names_of(work, taps=taps)))
    after = known | {"gradients": gradient_bytes(work)}
    return tuple(_phase(name, size, known if name == "attention" else after) for name, size in found.items())


def _long_enough(work: Workload) -> Workload:
    """With a method that takes as many keys: what more of them would cost may be asked, though they are refused."""
    method = work.spec.method
    if not isinstance(method, Linformer) or work.keys <= method.length:
        return work
    spec = work.spec.model_copy(update={"method": method.model_copy(update={"length": work.keys})})
    return replace(work, spec=spec, sizes=None if work.sizes is None else replace(work.sizes, spec=spec))


def _phase(name: str, size: int, known: Mapping[str, int]) -> Phase:
    """Of so many bytes; those that are not known by name are the method's own."""
    rest = size - sum(known.values())
    tensors = {**known, "workspace": rest} if rest >= 0 else {"workspace": size}
    return Phase(name, {each: count for each, count in tensors.items() if count})


def _forward(work: Workload) -> dict[str, int]:
    resident = parameters_of(work) if work.sizes is not None else {}

    def run(account: Account) -> None:
        parameters, edits = resident or parameters_of(work), edits_of(work)
        problem = problem_of(work, inputs_of(work), parameters)
        account.begin("attention")
        attended = attend(problem, work.taps - {"output"}, selection_of(work), edits, "materialized")
        account.begin("project out")
        output = output_of(work, parameters, attended.context, edits)
        del problem, attended, output  # all of it stays to the end

    return most_held(run, resident.values(), graph=False)
