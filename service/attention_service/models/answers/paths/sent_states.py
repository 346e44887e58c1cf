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
            return self._change("embeddings", None)
        key = sender.place.key
        return self._change("mlps", key) if sender.end.part == "mlps" else self._of_head(sender.place, sender.end.head)

    def _change(
        self, kind: Literal["heads", "mlps", "embeddings"], key: LayerKey | None, own: slice = slice(None)
    ) -> Tensor:
        """The change of one part of the states, or of some of its entries."""
        clean = wide(getattr(self.clean, kind)[key][..., own])
        if isinstance(self.other, SentStates):
            return wide(getattr(self.other, kind)[key][..., own]) - clean
        if self.other == "mean":
            rows = clean.flatten(0, 1) if self.real is None else clean[self.real.to(clean.device)]
            return rows.mean(0) - clean
        return self.other - clean

    def _of_head(self, place: AttentionPlace, head: int) -> Tensor:
        branch, width = self.stream.branches[place.key], place.widths.value_dim
        if branch.projection is None:
            raise TypeError(f"the heads of layer {place.key} are not added alone")
        own, sent = slice(head * width, (head + 1) * width), self.clean.heads[place.key]
        change = torch.zeros_like(sent)
        change[..., own] = self._change("heads", place.key, own).to(sent.dtype)
        if branch.norm is None:
            bias = branch.projection(torch.zeros_like(sent[:1, :1]))
            return branch.factor * (wide(branch.projection(change)) - wide(bias))
        both = branch.source(branch.projection(torch.cat([sent + change, sent])))
        changed, unchanged = wide(both).chunk(2)
        return branch.factor * (changed - unchanged)


def wide(x: Tensor) -> Tensor:
    """The same numbers in float32, or in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
