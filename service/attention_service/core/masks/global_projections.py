"""Global projections: global tokens with queries, keys and values of their own.

Source: Beltagy et al. 2020, section 3.1, "Linear projections for global attention".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_contract.spec import Mask
from attention_service.core.masks.global_tokens import listed as global_tokens
from attention_service.core.problem import Problem, Selection
from attention_service.core.tensors import constant, pick, to_device


def has_separate(masks: Sequence[Mask]) -> bool:
    """True if the spec has global projections, even if it lists no position."""
    return any(mask.projections == "separate" for mask in global_tokens(masks))


def separate_positions(masks: Sequence[Mask]) -> tuple[int, ...]:
    """Return the positions with global projections, in order."""
    return tuple(
        sorted({at for mask in global_tokens(masks) if mask.projections == "separate" for at in mask.positions})
    )


@dataclass(frozen=True)
class GlobalRows:
    """The selected queries with global projections."""

    rows: tuple[int, ...]
    """Indices among the selected queries: global in at least one sequence."""
    mine: Tensor
    """Bool ``[1 or B, 1, R, 1]``: true in the sequences where the row is global."""
    problem: Problem
    """The problem with q, k and v of the global projections."""

    def put(self, x: Tensor, far: Tensor) -> Tensor:
        """Replace these rows of a tap ``[B, H, Q, ...]`` by ``far`` ``[B, H, R, ...]``."""
        near = pick(x, 2, self.rows)
        return x.index_copy(2, constant(self.rows, x.device), torch.where(self.mine, far, near))


def global_rows(problem: Problem, selection: Selection) -> GlobalRows | None:
    """Return the rows with global projections; None if there are none."""
    if problem.global_qkv is None:
        return None
    device, queries = problem.q.device, problem.q.shape[2]
    positions = [separate_positions(masks) for masks in problem.sequence_masks or (problem.spec.masks,)]
    offsets = [problem.past] if problem.offsets is None else problem.offsets.flatten().tolist()
    count = max(len(positions), len(offsets))
    positions = positions * count if len(positions) == 1 else positions
    offsets = offsets * count if len(offsets) == 1 else offsets
    wanted = set(range(queries)) if selection.queries is None else set(selection.queries)
    places = set(zip(positions, offsets, strict=True))
    indices = {position - offset for listed, offset in places for position in listed} & wanted
    selected = tuple(range(queries)) if selection.queries is None else selection.queries
    rows = tuple(row for row, index in enumerate(selected) if index in indices)
    if not rows:
        return None
    at = torch.tensor([selected[row] for row in rows])
    of_each = [torch.isin(at + offset, torch.tensor(listed)) for listed, offset in zip(positions, offsets, strict=True)]
    mine = to_device(torch.stack(of_each), device)[:, None, :, None]
    q, k, v = problem.global_qkv
    return GlobalRows(rows, mine, replace(problem, q=q, k=k, v=v, global_qkv=None))
