"""Positions that a decoder counts by its past, in passes over texts whose pasts are of unlike lengths.

Decoders such as BART's take no positions: their table of positions gets the number of tokens before a pass. It has one
number, so the rows of a shared pass have their positions looked up again, those of each length by its own.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from attention_service.models.passes.module_hooks import replaced

_PAST: Final = "past_key_values_length"
"""The argument of transformers' modules that is the number of tokens before a pass."""
_POSITIONS: Final = "position_ids"


def counting_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that make positions of the number of tokens before a pass."""
    return [module for module in model.modules() if _PAST in inspect.signature(module.forward).parameters]


@contextmanager
def counting_rows(modules: Sequence[nn.Module], lengths: Sequence[int]) -> Iterator[None]:
    """Let a pass over one token of each text have the positions behind its own past; ``lengths``: those of the pasts.

    The model itself counts by the longest.
    """
    if len(set(lengths)) == 1:
        yield
        return
    rows: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        rows.setdefault(length, []).append(row)

    def by_row(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        signature = inspect.signature(own)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            given, states_by_row = signature.bind(*args, **kwargs).arguments, dict[int, Tensor]()
            for length, alike in rows.items():
                arguments = {name: _of_rows(argument, alike, len(lengths)) for name, argument in given.items()}
                if (positions := arguments.get(_POSITIONS)) is not None:
                    arguments[_POSITIONS] = positions + (length - max(lengths))
                states = own(**arguments | {_PAST: length})
                states = states.reshape(-1, 1, states.shape[-1]).expand(len(alike), -1, -1)
                states_by_row |= dict(zip(alike, states, strict=True))
            return torch.stack([states_by_row[row] for row in range(len(lengths))])

        return forward

    with ExitStack() as ended:
        for module in modules:
            ended.callback(replaced(module, by_row(module.forward)))
        yield


def _of_rows(given: Any, rows: list[int], count: int) -> Any:
    """An argument as it is for some rows of a pass: its entries of them, or a shape of so many."""
    if isinstance(given, Tensor):
        return given[rows] if given.ndim and len(given) == count else given
    if isinstance(given, tuple | torch.Size) and given[:1] == (count,):
        return (len(rows), *given[1:])
    return given
