"""A forward pass gone through on the meta device, as a server answers it."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from attention_service.core.arrays import TORCH_DTYPES
from attention_service.core.attention import Attended, attend, taps_of
from attention_service.core.blocks import rows_at_once
from attention_service.core.comparison import compare_block, exactly
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.materialized import Materialized
from attention_service.core.stages import TAPS, stages
from attention_service.core.types import Problem, Selection
from attention_service.core.visibility import EVERYTHING, without_padding
from attention_service.cost.approximate import approximated
from attention_service.cost.kernels import kernel_of
from attention_service.cost.rehearsal import Account, Bytes, most_held
from attention_service.cost.stand_ins import (
    Tensors,
    edits_of,
    inputs_of,
    output_of,
    parameters_of,
    problem_of,
    selection_of,
)
from attention_service.cost.workload import Workload, remembered


@remembered
def rehearsed_forward(work: Workload, kernel: str) -> dict[str, Bytes]:
    """What is held in each phase of one forward pass, by a kernel or, whatever it is called, a method."""
    resident = parameters_of(work) if work.sizes is not None else {}

    def run(account: Account) -> None:
        problem = prepared(account, work, resident)
        parameters, edits = resident, edits_of(work)
        attended = _attended(account, work, kernel, problem, edits)
        account.begin("answer")
        account.call("taps")
        answers = [answered(work, x) for x in (*_averaged(work, attended.taps), *attended.state.values())]
        if work.past:
            answers += [answered(work, x) for x in (problem.k, problem.v)]
        exact = _compared(account, work, problem) if work.reported else None
        del problem
        account.begin("project out")
        account.call("output")
        output = output_of(work, parameters, attended.context, edits)
        answers.append(answered(work, output))
        if exact is not None:
            _differences(account, work, parameters, exact, attended.context)
        del attended, output, answers, exact  # all of it stays to the end

    return most_held(run, resident.values(), pairs=(work.queries, work.keys), graph=False, threads=work.threads)


def prepared(account: Account, work: Workload, resident: Tensors) -> Problem:
    """The attention of a request; ``resident``: the parameters of its module."""
    account.begin("inputs")
    account.call("inputs")
    tensors = inputs_of(work)
    parameters = resident or parameters_of(work)
    account.begin("project" if resident else "prepare")
    account.call("roles")
    return problem_of(work, tensors, parameters)


def _attended(account: Account, work: Workload, kernel: str, problem: Problem, edits: Sequence[BoundEdit]) -> Attended:
    account.begin("attention")
    account.call("context", "pairs")
    by = kernel_of(work, kernel).rehearsal(work, account.take)
    if isinstance(by, Materialized) or edits:
        by = _Stages(account)
    return attend(problem, work.taps & {*taps_of(work.spec)}, selection_of(work), edits, by)


class _Stages(Materialized):
    """The materialized kernel, whose stages are told apart."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """Every stage, of which those asked for are kept."""
        wanted, found = {*taps, "context"} & {*TAPS}, {}
        known = [tap for tap in TAPS if tap != "lse" or tap in wanted]
        for tap, x in stages(problem, known, edits):
            if tap in wanted:
                found[tap] = x
            del x
            self._begin(known[known.index(tap) + 1] if tap != "context" else "select")
        return found

    def _begin(self, tap: str) -> None:
        """The stage that gives this tap."""
        if tap in {"k", "v"}:
            return
        self._account.begin(tap)
        self._account.call("taps" if tap == "select" else tap)


def _averaged(work: Workload, taps: Tensors) -> Iterator[Tensor]:
    for tap, x in taps.items():
        yield x.mean(dim=1) if tap == "weights" and work.averaged else x


def answered(work: Workload, x: Tensor) -> Tensor:
    """A result in the dtype of the reply."""
    return x.to(TORCH_DTYPES[work.reply]) if work.reply and x.is_floating_point() else x


def _compared(account: Account, work: Workload, problem: Problem) -> Tensor:
    """The context of exact attention, block by block: the others are there when the first, the largest, is computed."""
    method = approximated(work)
    if method is None:
        raise TypeError("exact attention has no error")
    account.begin("compare with exact attention")
    account.call("comparison")
    batch, heads, queries, _ = problem.q.shape
    rows = min(queries, rows_at_once(batch, heads, work.keys))
    parts = [problem.v.new_empty(batch, heads, queries - rows, work.value_dim)]
    block = EVERYTHING if rows == queries else Selection(queries=tuple(range(rows)))
    context, _ = compare_block(exactly(problem), without_padding(problem), method, block)
    return torch.cat([*parts, context], 2)


def _differences(account: Account, work: Workload, parameters: Tensors, exact: Tensor, context: Tensor) -> None:
    account.begin("compare outputs")
    account.call("outputs")
    both = [output_of(work, parameters, each, ()) for each in (exact, context)]
    difference = (both[1] - both[0]).double()
    difference.abs()
    difference.square()
    del both  # until then
