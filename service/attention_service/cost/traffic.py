"""Bytes read and written, elementary functions and operations of each pass, counted by running it on meta tensors.

``operation_counter`` has the convention. A forward pass leads from the request's tensors to the output and the taps. A
backward pass leads from a gradient of the output to the inputs and parameters. Edits of taps are left out, and so is
the way to and from the device. What depends on the data is counted as for finite numbers, and padding as if a mask of
keys told it. Source of the operations: PyTorch 2.13, on a CPU; on a GPU the masks of the blocked kernel differ.
"""

from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from torch import Tensor

from attention_service.core.attention import attend
from attention_service.core.blocks import REPEATED
from attention_service.core.kernels.materialized import MATERIALIZED
from attention_service.core.methods.linear import running
from attention_service.core.pullback import pullback_where_used
from attention_service.core.types import Problem
from attention_service.cost.approximate import plainly
from attention_service.cost.counted_kernels import counted_kernel
from attention_service.cost.operation_counter import OperationCounter, Traffic
from attention_service.cost.pieces import by_pieces
from attention_service.cost.rehearsal import Account
from attention_service.cost.stand_ins import inputs_of, long_enough, output_of, parameters_of, problem_of, selection_of
from attention_service.cost.workload import Workload, remembered


def traffic(work: Workload, kernel: str) -> Traffic:
    """One forward pass with this kernel, what it takes to return the taps included."""
    return _found(work, kernel, False, False)


def gradient_traffic(work: Workload, kernel: str) -> Traffic:
    """The backward pass alone: the gradients with respect to inputs and parameters."""
    return _found(plainly(work), kernel, True, False)


def own_traffic(work: Workload, *, backward: bool) -> Traffic:
    """One pass of a method that approximates, from queries, keys and values to the context."""
    return _found(plainly(work), MATERIALIZED, backward, True)


@remembered
def _found(work: Workload, kernel: str, backward: bool, own: bool) -> Traffic:
    def rehearse(part: Workload) -> dict[str, dict[str, int]]:
        return {"pass": asdict(_Rehearsal(part, kernel, own=own).counted(backward=backward))}

    return Traffic(**by_pieces(long_enough(work), rehearse)["pass"])


class _Rehearsal:
    """One pass over meta tensors."""

    def __init__(self, work: Workload, kernel: str, *, own: bool) -> None:
        self._work, self._own = work, own
        self._counter = OperationCounter()
        self._kernel = counted_kernel(work, kernel, self._counter)
        self._leaves: list[Tensor] = []

    def counted(self, *, backward: bool) -> Traffic:
        """The counts of the pass, or of the way back alone."""
        repeated = REPEATED.set(self._counter.repeated)
        try:
            return self._counted(backward=backward)
        finally:
            REPEATED.reset(repeated)

    def _counted(self, *, backward: bool) -> Traffic:
        run = self._context if self._own else self._output
        account = Account((), None, 0, self._counter)
        with torch.inference_mode(mode=False), torch.set_grad_enabled(backward), account:
            before, output = run(self._leaf if backward else lambda x: x)
            if not backward:
                return self._counter.counted - before
            before = self._counter.counted
            if output.requires_grad:
                pullback_where_used(output, self._leaves, torch.empty_like(output))
            return self._counter.counted - before

    def _leaf(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        self._leaves.append(x.detach().requires_grad_())
        return self._leaves[-1]

    def _inputs(self) -> dict[str, Tensor]:
        tensors, work = inputs_of(self._work), self._work
        if work.padded:
            del tensors["key_lengths"]
            tensors["key_mask"] = torch.empty(work.batch, work.told_keys, dtype=torch.bool, device="meta")
        return tensors

    def _output(self, leaf: Callable[[Tensor], Tensor]) -> tuple[Traffic, Tensor]:
        """From the request's tensors to the output."""
        work = self._work
        tensors = {name: x if name == "mask" else leaf(x) for name, x in self._inputs().items()}
        parameters = {name: leaf(x) for name, x in parameters_of(work).items()}
        problem = problem_of(work, tensors, parameters)
        taps = () if torch.is_grad_enabled() else work.taps - {"output"}
        context = attend(problem, taps, selection_of(work), kernel=self._kernel).context
        return Traffic(), output_of(work, parameters, context, ())

    def _context(self, leaf: Callable[[Tensor], Tensor]) -> tuple[Traffic, Tensor]:
        """From queries, keys and values to the context; and the counts before that."""
        work = self._work
        tensors, parameters = self._inputs(), {name: leaf(x) for name, x in parameters_of(work).items()}
        with torch.no_grad():
            problem = problem_of(work, tensors, parameters)
        before = self._counter.counted
        tensors = {name: leaf(x) if name in work.sent else x for name, x in tensors.items()}
        problem = replace(problem, q=leaf(problem.q), k=leaf(problem.k), v=leaf(problem.v))
        return before, attend(self._with_gates(problem, tensors, parameters), kernel=self._kernel).context

    def _with_gates(self, problem: Problem, tensors: dict[str, Tensor], parameters: dict[str, Tensor]) -> Problem:
        spec, tokens = self._work.spec, tensors.get("key", tensors["query"])
        return replace(
            problem, running=running(spec, tensors, parameters, tokens, wanted="return_state" in self._work.sent)
        )
