"""The tokens of an attention that attends within windows of a grid, as Swin does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.layer_keys import LayerWindows
from attention_service.models.passes.module_hooks import before, noting_calls

_CLOSE = 1e-4
"""The largest difference of states that are the same, as a share of the largest number."""


class _Reached(Exception):
    """The attention of a layer was called."""


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A layer with the arguments of one call of it."""

    place: AttentionPlace
    args: Sequence[Any]
    options: Mapping[str, Any]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the states of one image: ``[1, L, width]``, or ``[1, rows, columns, width]``."""
        given: Tensor = self._given
        batch, *sizes = given[:1].shape
        return (batch, *sizes[1:], sizes[0]) if self.place.channels_first else (batch, *sizes)

    @property
    def batch(self) -> int:
        """The states that the layer was called with: one of each image, unless it sees parts of it."""
        return len(self._given)

    @property
    def _given(self) -> Tensor:
        states: Tensor = self.args[0] if self.args else self.options["hidden_states"]
        return states

    def windows_of(self, states: Tensor) -> Tensor:
        """Return the states ``[W, T, width]`` that the attention is given of these states ``[L, width]``."""
        outputs: list[Tensor] = []

        def reached(state: Tensor) -> None:
            outputs.append(state)
            raise _Reached

        given = states.to(self._given).view(self.shape)
        given = given.permute(0, 3, 1, 2) if self.place.channels_first else given
        args = [given, *self.args[1:]] if self.args else []
        options = {**self.options} if self.args else {**self.options, "hidden_states": given}
        undo = before(self.place.module, reached)
        try:
            self.place.layer(*args, **options)
        except _Reached:
            return outputs[0].flatten(1, -2).double().cpu()
        finally:
            undo()
        raise ValueError("the layer calls no attention")


def layer_calls(places: Sequence[AttentionPlace], run: Callable[[], Any]) -> list[LayerCall]:
    """Run the model. Return the calls of the layers of these attentions."""
    calls: dict[nn.Module, LayerCall] = {}
    of_layer = {place.layer: place for place in places}

    def called(layer: nn.Module, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        calls[layer] = LayerCall(of_layer[layer], args, options)

    with noting_calls(of_layer, called):
        run()
    return [calls[place.layer] for place in places]


@torch.no_grad()
def find_windows(call: LayerCall, rows: int, columns: int) -> LayerWindows | None:
    """Find which tokens of its grid each window of a layer has. None for a layer that mixes tokens otherwise.

    ``rows``, ``columns``: the patches of an image. The layer runs up to its attention over states that number their
    tokens, one bit a run: each token has one of two vectors. So this holds for every way of cutting windows.
    """
    *sizes, width = call.shape[1:]
    grid = _grid_of(sizes, rows, columns)
    if grid is None or call.batch != 1:  # MobileViT's layers themselves run over parts of the grid
        return None
    length = grid[0] * grid[1]
    zero, one = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    number = torch.arange(length)
    of_zeros, of_ones = (call.windows_of(vector.expand(length, -1)) for vector in (zero, one))
    close = _CLOSE * float(of_ones.abs().max())
    real = (of_ones - of_zeros).abs().amax(-1) > close  # padding is the same whatever the tokens are
    order = torch.zeros(of_ones.shape[:2], dtype=torch.long)
    for bit in range(length.bit_length()):
        given = torch.where((number >> bit & 1).bool()[:, None], one, zero)
        windows = call.windows_of(given)
        apart = [(windows - other).abs().amax(-1) for other in (of_zeros, of_ones)]
        if bool((torch.minimum(*apart) > close).any()):
            return None
        order += (apart[1] < apart[0]).long() << bit
    if not torch.equal(order[real].sort().values, number):
        return None
    return LayerWindows(order.where(real, -1), grid[2])


def _grid_of(sizes: Sequence[int], rows: int, columns: int) -> tuple[int, int, int] | None:
    """The rows and columns of a layer's tokens, and the patches along a side of each; None if they are no grid."""
    merged = 1
    while True:
        grid = -(-rows // merged), -(-columns // merged)
        if list(sizes) in ([grid[0] * grid[1]], [*grid]):
            return *grid, merged
        if grid == (1, 1):
            return None
        merged *= 2
