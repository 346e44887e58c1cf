"""The parts that components of a model add to its residual stream in one run, and those that they add otherwise.

Notation: B texts, L tokens, H heads, Dv their width, d the width of the states.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from attention_service.models.answers.lenses.residual_stream import ResidualStream
from attention_service.models.answers.paths.path_ends import Component
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.module_hooks import after, before
from attention_transformers.model_layers import LayerKey


@dataclass(eq=False)
class SentStates:
    """The parts of the states of one run."""

    heads: dict[LayerKey, Tensor] = field(default_factory=dict)
    """``[B, L, H · Dv]``: the heads of an attention before its projection."""
    attentions: dict[LayerKey, Tensor] = field(default_factory=dict)
    """``[B, L, d]``: what the source of an attention's branch returns."""
    mlps: dict[LayerKey, Tensor] = field(default_factory=dict)
    """``[B, L, d]``: what a layer adds beside its attention."""
    embeddings: dict[None, Tensor] = field(default_factory=dict)
    """``[B, L, d]``: the states before the first layer."""
    given: dict[LayerKey, Tensor] = field(default_factory=dict)
    """The states before a layer, while it runs."""


@contextmanager
def sending(
    stream: ResidualStream, senders: Sequence[Component], held: Sequence[AttentionPlace]
) -> Iterator[SentStates]:
    """Keep what components send in the run until the block ends, and what these attentions return."""
    found = SentStates()
    heads = {each.attention.key: each.attention for each in senders if each.end.part == "heads"}
    mlps = {each.attention.key: each.attention for each in senders if each.end.part == "mlps"}

    def keep(states: dict[Any, Tensor], key: Any) -> Any:
        return lambda state: states.update({key: state.detach().clone()})

    with ExitStack() as stack:
        if any(each.place is None for each in senders):
            stack.callback(before(stream.layers[0], keep(found.embeddings, None)))
        for key in heads:
            projection = stream.branches[key].projection
            if projection is not None:
                stack.callback(before(projection, keep(found.heads, key)))
        for key in dict.fromkeys([*mlps, *(place.key for place in held)]):
            stack.callback(after(stream.branches[key].source, keep(found.attentions, key)))
        for key, place in mlps.items():
            stack.callback(before(place.layer, keep(found.given, key)))
            stack.callback(after(place.layer, _beside(found, key, stream.branches[key].factor)))
        yield found


def _beside(found: SentStates, key: LayerKey, factor: float) -> Any:
    """Keep what a layer adds beside its attention, from what it returns."""

    def keep(state: Tensor) -> None:
        found.mlps[key] = wide(state) - wide(found.given.pop(key)) - factor * wide(found.attentions[key])

    return keep


@dataclass(frozen=True, eq=False)
class SentChanges:
    """The changes of what senders add, beside a run."""

    stream: ResidualStream
    clean: SentStates
    other: SentStates | float | Literal["mean"]
    """The run whose parts they send, the number, or the mean over the tokens."""
    real: Tensor | None
    """Bool ``[B, L]``, True for a token that is no padding; None if none is."""

    def of(self, sender: Component) -> Tensor:
        """The change ``[B, L, d]`` of the states behind a sender, in float32 or float64."""
        if sender.place is None:
            return self._of_state("embeddings", None)
        if sender.end.part == "mlps":
            return self._of_state("mlps", sender.place.key)
        return self._of_head(sender.place, sender.end.head)

    def _of_state(self, kind: Literal["mlps", "embeddings"], key: LayerKey | None) -> Tensor:
        """The change of what a component adds to the states as it is."""
        clean = wide(getattr(self.clean, kind)[key])
        if isinstance(self.other, SentStates):
            return wide(getattr(self.other, kind)[key]) - clean
        return self._sent(clean) - clean

    def _sent(self, part: Tensor) -> Tensor | float:
        """The number that takes the place of a part ``[B, L, d]`` of the states, or the mean of the part."""
        if isinstance(self.other, SentStates):
            raise TypeError("the parts of another run are sent")
        if self.other == "mean":
            return (part.flatten(0, 1) if self.real is None else part[self.real.to(part.device)]).mean(0)
        return self.other

    def _of_head(self, place: AttentionPlace, head: int) -> Tensor:
        """The change of what the projection, and a norm behind it, make of one head: the part of it is sent."""
        width = place.widths.value_dim
        own = slice(head * width, (head + 1) * width)
        clean = wide(self.clean.heads[place.key][..., own])
        if isinstance(self.other, SentStates):
            return self._projected(place, own, wide(self.other.heads[place.key][..., own]) - clean)
        part = -self._projected(place, own, -clean)
        return self._sent(part) - part

    def _projected(self, place: AttentionPlace, own: slice, change_of_head: Tensor) -> Tensor:
        """The change of the states by that of these entries of an attention's heads."""
        branch, sent = self.stream.branches[place.key], self.clean.heads[place.key]
        if branch.projection is None:
            raise TypeError(f"the heads of layer {place.key} are not added alone")
        change = torch.zeros_like(sent)
        change[..., own] = change_of_head.to(sent.dtype)
        if branch.norm is None:
            bias = branch.projection(torch.zeros_like(sent[:1, :1]))
            return branch.factor * (wide(branch.projection(change)) - wide(bias))
        both = branch.source(branch.projection(torch.cat([sent + change, sent])))
        changed, unchanged = wide(both).chunk(2)
        return branch.factor * (changed - unchanged)


def wide(x: Tensor) -> Tensor:
    """The same numbers in float32, or in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
