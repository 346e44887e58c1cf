"""The states around a model's attentions, read and edited by hooks: hidden states, and what an attention returns."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from attention_contract.schemas.attention import Edit
from attention_contract.tensors import Array
from attention_service.core.edits import BoundEdit, apply
from attention_service.core.tensors import to_numpy
from attention_service.models.passes.attention_pass import AttentionPass, OwnTexts
from attention_service.models.passes.attention_places import AttentionPlace, stack_of, turns_of
from attention_service.models.passes.module_hooks import State, after, before, on_turn, one_by_one
from attention_service.runtime.operations import compute
from attention_transformers.model_layers import LayerKey


class LayerStates:
    """The hidden states and attention outputs of one pass, and the edits of the latter."""

    def __init__(self, places: Collection[AttentionPlace], attention_pass: AttentionPass) -> None:
        """``places``: all attentions of the model."""
        self._places = places
        self._attention_pass = attention_pass
        self.output: dict[LayerKey, Array] = {}
        """``[B, L, width]`` by layer: what its attention returns."""
        self.hidden: dict[LayerKey, Array] = {}
        """``[B, L, d_model]`` by layer: what the layer returns."""
        self.inputs: dict[str, Array] = {}
        """``[B, L, d_model]``: the input of the first layer of each stack."""

    @contextmanager
    def reading(self, places: Iterable[AttentionPlace], *, output: bool, hidden: bool) -> Iterator[None]:
        """Edit outputs, and read those and the hidden states of these places, until the block ends."""
        changes: dict[tuple[nn.Module, int], list[State]] = {}
        for place in self._places:
            for texts in self._attention_pass.texts:
                if edits := [edit for edit in texts.attention_pass.task(place.key).edits if edit.tap == "output"]:
                    changes.setdefault((place.module, place.turn), []).append(place.batch_first(_edited(edits, texts)))
        for place in places:
            if output:
                changes.setdefault((place.module, place.turn), []).append(
                    place.batch_first(_kept(self.output, place.key))
                )
            if hidden:
                changes.setdefault((place.layer, place.turn), []).append(
                    place.batch_first(_kept(self.hidden, place.key))
                )
        with ExitStack() as stack:
            for module in dict.fromkeys(module for module, _ in changes):
                own = {turn: one_by_one(several) for (each, turn), several in changes.items() if each is module}
                stack.callback(after(module, on_turn(own, turns_of(module, self._places))))
            for name, place in self._first_places().items() if hidden else ():
                first, layer = {0: place.batch_first(_kept(self.inputs, name))}, place.first_layer
                stack.callback(before(layer, on_turn(first, turns_of(layer, self._places))))
            yield

    def _first_places(self) -> dict[str, AttentionPlace]:
        found: dict[str, AttentionPlace] = {}
        for place in self._places:
            found.setdefault(stack_of(place.key), place)
        return found


def _edited(edits: Sequence[Edit], texts: OwnTexts) -> State:
    def change(state: Tensor) -> Tensor:
        bound: Sequence[BoundEdit] = compute.bind_edits(edits, state.device, state.dtype)
        if texts.are_all:
            return apply(bound, "output", state)
        changed = state.clone()
        own = changed[texts.rows, texts.tokens]
        own.copy_(apply(bound, "output", own))
        return changed

    return change


def _kept(found: dict[Any, Array], key: Any) -> State:
    def change(state: Tensor) -> None:
        found[key] = to_numpy(state.detach().to("cpu", copy=True))

    return change
