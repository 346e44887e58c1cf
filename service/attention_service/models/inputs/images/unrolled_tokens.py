"""The windows of an encoder that keeps its tokens in another order than row by row, as Hiera does.

The model's own ``reroll`` puts the states of a stage back in their places, and so tells the place of each token. Layers
cut windows inside their attention: these are found by the values of states that number their places.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attention_contract.tensors import Array
from attention_service.models.passes.attention_pass import AttentionPass, LayerTask
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.layer_keys import LayerWindows
from attention_service.models.passes.module_hooks import before

_CLOSE = 1e-4
"""The largest difference of values that are the same, as a share of the largest number."""
POOLED = "its queries are pooled from several tokens each and its keys are not, so that they have no labels in common"
"""The reason for which a layer is left out whose queries are fewer than its keys."""


@dataclass(frozen=True)
class StageGrid:
    """The tokens of one stage."""

    rows: int
    columns: int
    places: Tensor
    """``[L]``: the place of each token, counted row by row."""


def stage_grids(model: nn.Module) -> list[StageGrid]:
    """Return the tokens of each stage of a model that unrolls them; none for another model."""
    encoder: Any = next((module for module in model.modules() if hasattr(module, "reroll")), None)
    grids: list[StageGrid] = []
    for stage, (_, (rows, columns)) in (encoder.schedule if encoder is not None else {}).items():
        numbers = torch.arange(rows * columns, dtype=torch.float64)[None, :, None]
        at = encoder.reroll(numbers, stage).flatten().long()
        grids.append(StageGrid(rows, columns, at.argsort()))
    return grids


@torch.no_grad()
def find_unrolled_windows(
    places: Sequence[AttentionPlace], grids: Sequence[StageGrid], run: Callable[[AttentionPass], Any]
) -> dict[str, LayerWindows | None]:
    """Find the windows of each layer by the text of its key; None for one with pooled queries, or of unknown windows.

    ``run``: a run over one image. Every layer gets states that number their places, one bit a run.
    """
    grid_of: dict[str, StageGrid] = {}
    by_length = {grid.places.numel(): grid for grid in grids}

    def values_of(numbered: Callable[[StageGrid], Tensor]) -> Mapping[str, tuple[Array, bool]]:
        def numbers(place: AttentionPlace, state: Tensor) -> Tensor:
            grid = grid_of[str(place.key)] = by_length[state.shape[1]]
            zero, one = torch.randn(2, state.shape[2], generator=torch.Generator().manual_seed(0)).to(state)
            return torch.where(numbered(grid).to(state.device)[None, :, None], one, zero).expand(state.shape)

        attention_pass = AttentionPass({place.key: LayerTask(taps=("v", "context")) for place in places})
        with ExitStack() as hooks:
            for place in places:
                hooks.callback(before(place.layer, partial(numbers, place)))
            run(attention_pass)
        by_layer = attention_pass.take()
        return {
            str(place.key): (_by_token(taps["v"]), taps["v"].shape[2] == taps["context"].shape[2])
            for place in places
            for taps in [by_layer[place.key]]
        }

    zeros = values_of(lambda grid: torch.zeros_like(grid.places, dtype=torch.bool))
    ones = values_of(lambda grid: torch.ones_like(grid.places, dtype=torch.bool))
    orders: dict[str, Array | None] = {
        key: np.zeros(values.shape[:2], np.int64) if square else None for key, (values, square) in zeros.items()
    }
    for bit in range(max(by_length).bit_length()):
        for key, (values, _) in values_of(lambda grid, bit=bit: (grid.places >> bit & 1).bool()).items():  # type: ignore[misc]
            if (order := orders[key]) is None:
                continue
            apart = [abs(values - other[key][0]).max(-1) for other in (zeros, ones)]
            if np.minimum(*apart).max() > _CLOSE * abs(ones[key][0]).max():
                orders[key] = None
            else:
                order += (apart[1] < apart[0]).astype(np.int64) << bit
    return {key: _windows(order, grid_of[key], grids[0]) for key, order in orders.items()}


def _by_token(values: Array) -> Array:
    """The values ``[W, H, T, V]`` of all heads ``[W, T, H·V]``."""
    return values.transpose(0, 2, 1, 3).reshape(values.shape[0], values.shape[2], -1)


def _windows(order: Array | None, grid: StageGrid, first: StageGrid) -> LayerWindows | None:
    if order is None or not np.array_equal(np.sort(order, None), np.arange(order.size)):
        return None
    return LayerWindows(torch.from_numpy(order), first.rows // grid.rows)
