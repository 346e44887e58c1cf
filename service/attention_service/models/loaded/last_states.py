"""The last states of the tokens of a text, behind a model's final norm: the part of the model that makes them.

A short run shows which part returns them, and whether it does so without the rest.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_contract.errors import InvalidCheckpoint
from attention_service.core.tensors import wide
from attention_service.models.inputs.input_reader import InputReader
from attention_service.models.inputs.input_stacks import Stack, Tokens
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.attention_places import TARGET, TEXT, AttentionPlace
from attention_service.models.passes.module_hooks import State, noting_returns
from attention_service.models.passes.points import Point
from attention_service.models.passes.unrun_models import NOT_RUNNING

_NAME: Final = "last_hidden_state"
_RELATIVE_TOLERANCE: Final = 1e-4
"""The difference of equal states, relative to their size; of dtypes with few digits a hundred times that."""


class ModelCall(Protocol):
    """Calls a model, or a part of it, once."""

    def __call__(
        self, arguments: Mapping[str, Tensor], attention_pass: AttentionPass, *, logits: Tensor | None = None,
        model: nn.Module | None = None, changes: Iterable[tuple[Point, State]] = (),
    ) -> Any:  # fmt: skip
        """Return the output. ``changes``: of states, behind the edits of the pass."""


@dataclass(frozen=True, eq=False)
class LastStates:
    """The way to the last states of the texts of one model."""

    part: nn.Module
    """The part that returns them: the model without its head, or its encoder."""
    width: int
    time_first: bool
    """True if it returns ``[L, B, width]``."""
    alone: bool
    """True if it returns the same when it runs without the rest of the model."""
    run: ModelCall

    def of(
        self,
        arguments: Mapping[str, Tensor],
        attention_pass: AttentionPass,
        changes: Iterable[tuple[Point, State]] = (),
    ) -> Tensor:
        """Run the texts. Returns their last states ``[B, L, width]``."""
        if self.alone:
            states: Tensor = self.run(arguments, attention_pass, model=self.part, changes=changes)[_NAME]
        else:
            kept: list[Any] = []
            with noting_returns([self.part], lambda *call: kept.append(call[-1])):
                self.run(arguments, attention_pass, changes=changes)
            states = kept[0][_NAME]
        return states.transpose(0, 1) if self.time_first else states


def find_last_states(
    model: PreTrainedModel, reader: InputReader, places: Sequence[AttentionPlace], run: ModelCall
) -> LastStates:
    """Find the part of a model that makes the last states of its text. Raises InvalidCheckpoint if none does.

    ``places``: its layers that mix tokens.
    """
    texts = _texts(reader, (TEXT, TARGET))
    arguments = reader.arguments(texts)
    if reader.pairs:
        arguments = arguments | {"decoder_input_ids": texts.ids[:, :TARGET]}
    returned: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, _: Any, __: Any, output: Any) -> None:
        states = getattr(output, _NAME, None)
        if isinstance(states, Tensor) and states.ndim == 3:
            returned.setdefault(module, states)

    try:
        with noting_returns(model.modules(), note), torch.no_grad():
            run(arguments, AttentionPass({}))
    except NOT_RUNNING as fault:
        raise _no_vectors(model, f"does not run over texts of different lengths: {fault}") from fault
    part = next((candidate for candidate in _candidates(model, reader, places) if candidate in returned), None)
    if part is None:
        raise _no_vectors(model, "returns no states of the tokens of its text")
    states = returned[part]
    time_first = tuple(states.shape[:2]) == (texts.length, len(texts.ids))
    if not time_first and tuple(states.shape[:2]) != (len(texts.ids), texts.length):
        raise _no_vectors(model, "returns states of other tokens than those of its text")
    try:
        with torch.no_grad():
            own = run(arguments, AttentionPass({}), model=part)[_NAME]
        alone = _same(own, states)
    except NOT_RUNNING:
        alone = False
    return LastStates(part, states.shape[2], time_first, alone, run)


def own_arguments(part: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model that a part of it takes by name."""
    names = inspect.signature(part.forward).parameters
    return {name: x for name, x in arguments.items() if name in names}


def _candidates(model: PreTrainedModel, reader: InputReader, places: Sequence[AttentionPlace]) -> list[nn.Module]:
    """The parts of a model that have all layers that read its text, the largest first."""
    if reader.pairs:
        return [model.get_encoder()]
    wanted = {place.module for place in places if place.queries == "text"}
    return [module for module in model.modules() if wanted <= {*module.modules()}]


def _texts(reader: InputReader, lengths: Sequence[int]) -> Stack:
    return reader.batch([Tokens([*range(1, 1 + length)], [None] * length) for length in lengths])


def _no_vectors(model: PreTrainedModel, reason: str) -> InvalidCheckpoint:
    return InvalidCheckpoint.at("model", f"{type(model).__name__} {reason}; it makes no vectors of texts")


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    digits = 1 if one.dtype.itemsize > 2 else 100
    return bool((wide(one) - wide(other)).norm() <= digits * _RELATIVE_TOLERANCE * wide(other).norm())
