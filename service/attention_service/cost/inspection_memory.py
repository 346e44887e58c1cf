"""Peak memory of an inspection, gone through on the meta device: one block of queries, beside what others leave."""

import torch

from attention_service.core.blocks import rows_at_once
from attention_service.core.inspection import Top, real_queries, together, top_of, totals, weights_of
from attention_service.core.types import Problem, Selection
from attention_service.cost.forward_rehearsal import answered, prepared
from attention_service.cost.phases import ROUNDING
from attention_service.cost.pieces import by_pieces
from attention_service.cost.rehearsal import Account, Bytes, most_held
from attention_service.cost.stand_ins import parameters_of, selection_of
from attention_service.cost.workload import Workload, remembered


@remembered
def inspection_peak_bytes(work: Workload, named: int) -> int:
    """The most that statistics, the ``named`` most attended keys and what of the weights is returned hold at a time."""
    phases = by_pieces(work, lambda piece: _rehearsed(piece, named))
    return max(sum(held.values()) for held in phases.values()) + ROUNDING


@remembered
def _rehearsed(work: Workload, named: int) -> dict[str, Bytes]:
    resident = parameters_of(work) if work.sizes is not None else {}

    def run(account: Account) -> None:
        problem = prepared(account, work, resident)
        account.begin("statistics")
        account.call("weights")
        real = real_queries(problem)
        rows = min(work.queries, rows_at_once(work.batch, work.heads, work.keys))
        block = Selection() if rows == work.queries else Selection(queries=tuple(range(rows)))
        found = totals(problem, real, [block])
        answers = [*found.means().values()]
        if named:
            account.begin("top")
            answers += [answered(work, x) for x in _top(work, problem, min(named, work.keys))]
        if "weights" in work.taps:
            account.begin("weights")
            weights = weights_of(problem, selection_of(work))
            answers += [weights, answered(work, weights.mean(dim=1) if work.averaged else weights)]
        del problem, real, found, answers  # all of it stays to the end

    return most_held(run, resident.values(), pairs=(work.queries, work.keys), graph=False, threads=work.threads)


def _top(work: Workload, problem: Problem, count: int) -> Top:
    """Of a block, put together with those of all others."""
    selection = selection_of(work)
    heads = work.selected_heads or work.heads
    queries = work.queries if work.selected_queries is None else work.selected_queries
    rows = min(queries, rows_at_once(work.batch, heads, work.keys))
    shape = work.batch, heads, queries - rows, count
    block = selection if rows == queries else Selection(selection.heads, tuple(range(rows)))
    others = problem.v.new_empty(shape), problem.v.new_empty(shape, dtype=torch.int64)
    return together([others, top_of(problem, block, count)] if rows < queries else [top_of(problem, block, count)])
