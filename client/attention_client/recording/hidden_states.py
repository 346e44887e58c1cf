"""Hidden states of a transformers model by their names in a recording: those after each layer, before the final norm.

transformers returns the input of each layer, and puts the output of the final norm in the place of the last layer's.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from attention_client.array_likes import as_array
from attention_contract.tensors import Array

_STACKS: Final = {"hidden_states": "layers", "encoder_hidden_states": "encoder", "decoder_hidden_states": "decoder"}


class LayerCalls:
    """The states that each layer of a model is given and returns, of one pass."""

    def __init__(self) -> None:
        self._calls: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def noting(self, model: nn.Module) -> Iterator[None]:
        """Note the calls of the modules in the model's outermost lists, until the block ends."""
        with ExitStack() as hooks:
            for layer in _listed(model):
                hooks.callback(layer.register_forward_hook(self._note, with_kwargs=True).remove)
            yield

    def _note(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        given = next((x for x in (*args, *options.values()) if isinstance(x, Tensor)), None)
        made = output[0] if isinstance(output, tuple | list) else output
        if given is not None and isinstance(made, Tensor) and made.shape == given.shape:
            self._calls.append((given, made))

    def named(self, outputs: Any) -> Iterator[tuple[str, Array]]:
        """The states of every stack in the outputs of the pass.

        ``{stack}.final``, the state after the final norm, is there if it is another than the last layer's, or if that
        is not seen: then the last layer has no ``hidden``.
        """
        for field, stack in _STACKS.items():
            states: tuple[Tensor, ...] = getattr(outputs, field, None) or ()
            if not states:
                continue
            *entering, final = states
            last = self._made_of(entering[-1]) if entering else None
            for number, state in enumerate(entering):
                yield f"{stack}.embeddings" if number == 0 else f"{stack}.{number - 1}.hidden", _rows(state)
            if last is not None:
                yield f"{stack}.{len(entering) - 1}.hidden", _rows(last)
            if last is None or not _same(last, final):
                yield f"{stack}.final", _rows(final)

    def _made_of(self, state: Tensor) -> Tensor | None:
        """The output of the last layer that was given a state ``[B, L, …]``, some as ``[L, B, …]``."""
        for given, made in reversed(self._calls):
            if _same(given, state):
                return made
            if given.ndim > 2 and _same(given.transpose(0, 1), state):
                return made.transpose(0, 1)
        return None


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _listed(model: nn.Module) -> Iterator[nn.Module]:
    """The modules in lists that are in no other list."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _listed(child)


def _rows(states: Tensor) -> Array:
    """States ``[1, L, d]``, or ``[1, L, streams, d]`` of hyper-connections, as a row for each token, in its memory."""
    rows = np.array(as_array(states)[0])
    return rows.reshape(len(rows), -1)
