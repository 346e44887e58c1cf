"""The effect of one more edit on the context: only the heads and queries that it can reach are computed again."""

from collections.abc import Iterator, Sequence
from itertools import product

from torch import Tensor

from attention_service.core.attention import attend
from attention_service.core.blocks import placed_tiles, some_of, tiles
from attention_service.core.edits import AXES, BoundEdit, single
from attention_service.core.kernels import MATERIALIZED
from attention_service.core.methods import approximation_of
from attention_service.core.problem import Problem, Selection
from attention_service.core.stages import narrow, stages
from attention_service.core.tensors import head_read_by


def each_of(problem: Problem, sweep: BoundEdit, swept: dict[str, list[int]]) -> Iterator[tuple[int, BoundEdit]]:
    """Yield the number and the edit of each combination of the swept indices, the last axis fastest."""
    for number, chosen in some_of(
        problem.q, [*enumerate(product(*(enumerate(indices) for indices in swept.values())))]
    ):
        edit = sweep
        for axis, (place, index) in zip(swept, chosen, strict=True):
            edit = single(edit, axis, place, index)
        yield number, edit


def reach(edit: BoundEdit, problem: Problem, measured: Sequence[int] | None) -> Selection | None:
    """Return the heads, and those of the measured queries, whose context an edit can change; None for no query.

    An edit of keys and values reaches every query of the heads that read them.
    """
    heads, kv_heads = problem.q.shape[1], problem.k.shape[1]
    reached = edit.heads
    if reached is not None and edit.tap in ("k", "v"):
        reached = tuple(head for head in range(heads) if head_read_by(head, heads, kv_heads) in reached)
    rows = None if measured is None else tuple(measured)
    # The queries of a method that approximates may depend on each other.
    apart = approximation_of(problem.spec) is None and "queries" in AXES[edit.tap]
    if apart and edit.queries is not None:
        rows = tuple(row for row in edit.queries if measured is None or row in measured)
    return Selection(reached, rows) if rows != () else None


def context_after(problem: Problem, edits: Sequence[BoundEdit]) -> Tensor:
    """Compute the whole context ``[B, H, Q, V]`` after these edits, a tile of the scores at a time."""
    if approximation_of(problem.spec) is not None:
        return attend(problem, (), edits=edits, kernel=MATERIALIZED).context
    batch, heads, queries, _ = problem.q.shape
    whole = problem.q.new_empty(batch, heads, queries, problem.v.shape[3])
    for tile, of_heads, of_queries in some_of(whole, placed_tiles(problem, Selection())):
        whole[:, of_heads, of_queries] = dict(stages(problem, ("context",), edits, tile))["context"]
    return whole


def context_changes(
    problem: Problem, context: Tensor, edits: Sequence[BoundEdit], edit: BoundEdit, reached: Selection
) -> Iterator[tuple[Selection, Tensor]]:
    """Yield the change of the context ``[B, H, Q, V]`` by one more edit, in tiles of the heads and queries it reaches.

    context: after ``edits`` alone.
    """
    together = [*edits, edit]
    if approximation_of(problem.spec) is not None:
        after = attend(problem, (), edits=together, kernel=MATERIALIZED).context
        yield reached, narrow(after - context, "context", problem, reached)
        return
    for tile in tiles(problem, reached):
        after = dict(stages(problem, ("context",), together, tile))["context"]
        yield tile, after - narrow(context, "context", problem, tile)
