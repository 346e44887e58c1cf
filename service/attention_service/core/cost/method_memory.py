"""Peak memory of a method that approximates, rehearsed: its steps are its own, and what they hold is nobody else's."""

from collections.abc import Mapping

from attention_service.core.attention import attend
from attention_service.core.cost.held import Held
from attention_service.core.cost.phases import Ledger, Phase
from attention_service.core.cost.pieces import by_pieces
from attention_service.core.cost.preparing_memory import prepare
from attention_service.core.cost.rehearsal import LARGEST, Account, Bytes, most_held
from attention_service.core.cost.stand_ins import (
    edits_of,
    inputs_of,
    long_enough,
    output_of,
    parameters_of,
    problem_of,
    selection_of,
)
from attention_service.core.cost.tensors import input_bytes
from attention_service.core.cost.workload import Workload


def method_phases(work: Workload) -> tuple[Phase, ...]:
    """The forward pass: projecting, the method, and its output; of what no device has room for, what is sent."""
    ledger = Ledger()
    prepare(ledger, work)
    if input_bytes(work) > LARGEST:
        return ledger.phases
    held = Held.of(work)
    outputs = {"context": held.context, "merged": held.merged, "output": held.output}
    ends = {"attention": dict(ledger.held), "project out": dict(ledger.held) | outputs}
    found = by_pieces(long_enough(work), _forward)
    return (*ledger.phases, *(_phase(name, sum(found[name].values()), tensors) for name, tensors in ends.items()))


def _phase(name: str, size: int, known: Mapping[str, int]) -> Phase:
    """Of so many bytes; those that are not known by name are the method's own."""
    rest = size - sum(known.values())
    tensors = {**known, "workspace": rest} if rest >= 0 else {"workspace": size}
    return Phase(name, {each: count for each, count in tensors.items() if count})


def _forward(work: Workload) -> dict[str, Bytes]:
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
