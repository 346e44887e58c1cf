"""The parts that components of a model add to its residual stream in one run, and those that they add otherwise.

Notation: B texts, L tokens, H heads, Dv their width, d the width of the states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from attention_service.core.tensors import wide
from attention_service.models.answers.paths.path_ends import Component
from attention_service.models.loaded.model_runner import WHOLE, Reading
from attention_service.models.loaded.streams.residual_stream import ADDED, JOINED_HEADS, ResidualStream
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.points import Point
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


def points_sent(
    stream: ResidualStream, senders: Sequence[Component], held: Sequence[AttentionPlace]
) -> dict[Point, Reading]:
    """The points to read of a run for what components send, and for what these attentions return."""
    points: list[Point] = [stream.states[0] for sender in senders if sender.place is None]
    with_heads = [
        attention for attention in _of(senders, "heads") if stream.branches[attention.key].projection is not None
    ]
    points += [(place.key, JOINED_HEADS) for place in with_heads]
    points += [(place.key, ADDED) for place in (*_of(senders, "mlps"), *held)]
    for place in _of(senders, "mlps"):
        points += [(place.key, "before"), (place.key, "hidden")]
    return dict.fromkeys(points, WHOLE)


def sent_states(stream: ResidualStream, senders: Sequence[Component], at: dict[Point, Tensor]) -> SentStates:
    """Take the states that were read, and return those that components sent and that attentions returned."""
    sent = SentStates()
    if stream.states[0] in at:
        sent.embeddings[None] = at.pop(stream.states[0])
    for place in stream.places.values():
        for states, name in ((sent.heads, JOINED_HEADS), (sent.attentions, ADDED)):
            if (place.key, name) in at:
                states[place.key] = at.pop((place.key, name))
    for place in _of(senders, "mlps"):
        key, factor = place.key, stream.branches[place.key].factor
        before, behind = wide(at.pop((key, "before"))), wide(at.pop((key, "hidden")))
        sent.mlps[key] = behind - before - factor * wide(sent.attentions[key])
    return sent


def _of(senders: Sequence[Component], part: str) -> list[AttentionPlace]:
    """The attentions whose heads, or whose layers' MLPs, send."""
    return [*dict.fromkeys(sender.attention for sender in senders if sender.end.part == part)]


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
        sent = self.clean.heads[place.key]
        change = torch.zeros_like(sent)
        change[..., own] = change_of_head.to(sent.dtype)
        return self.stream.branches[place.key].change(sent, change)
