"""The residual stream of a model: what each layer adds to it, by its attention and beside it, and how it is read out.

Source: Elhage et al. 2021, A mathematical framework for transformer circuits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attention_contract.errors import InvalidRequest
from attention_service.core.tensors import wide
from attention_service.models.loaded.adapters import Adapter
from attention_service.models.loaded.streams.held_norm import HeldNorm
from attention_service.models.loaded.streams.readout import LensReadout
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.device_heads import DeviceHeads, whole_parameter
from attention_service.models.passes.points import Point, Site
from attention_transformers.model_layers import LayerKey

ADDED: Final = "added"
"""The point of an attention at which its branch is added to the states, times a factor."""
UNNORMED: Final = "unnormed"
"""The point before the norm of a branch, if it has one."""
JOINED_HEADS: Final = "heads"
"""The point before the projection of a branch: its heads one behind the other."""
NORMED: Final[Point] = (None, "normed")
"""The point behind the final norm."""
_STREAM: Final = "stream"
"""The key of the points of the states, which are named by their numbers."""


@dataclass(frozen=True, eq=False)
class Branch:
    """The way of one attention into the residual stream."""

    source: nn.Module
    """The module whose output is added, times the factor."""
    factor: float
    norm: HeldNorm | None
    """The source, if it is a norm."""
    projection: nn.Module | None
    """The matrix whose input has a part for each head, one behind the other."""
    without_heads: str = ""
    """The reason for which it has none."""
    share: DeviceHeads | None = None
    """The part of the heads that the projection is given, if they lie on several devices."""

    def matrix(self, *, is_adapted: bool) -> Tensor:
        """The matrix ``[in, out]`` of the projection; ``is_adapted``: an adapter may change what the module makes."""
        projection: Any = self._projection
        weight = whole_parameter(projection.weight)
        if not is_adapted:
            return weight if isinstance(projection, Conv1D) else weight.T
        width = weight.shape[0 if isinstance(projection, Conv1D) else 1]
        probes = torch.eye(width, dtype=weight.dtype, device=weight.device)[None]
        matrix: Tensor = projection(probes)[0] - projection(torch.zeros_like(probes[:, :1]))[0]
        return matrix

    def change(self, heads: Tensor, change: Tensor) -> Tensor:
        """The change of the states ``[B, L, d]`` by one of the heads ``[B, L, H · Dv]`` that the projection takes."""
        if self.norm is None:
            bias = self._projected(torch.zeros_like(heads[:1, :1]))
            return self.factor * (wide(self._projected(change)) - wide(bias))
        changed, unchanged = wide(self.source(self._projected(torch.cat([heads + change, heads])))).chunk(2)
        return self.factor * (changed - unchanged)

    def _projected(self, heads: Tensor) -> Tensor:
        """The states that the projection makes of all heads."""
        found: Tensor = self._projection(heads if self.share is None else self.share.own(heads, -1))
        return found

    @property
    def _projection(self) -> nn.Module:
        if self.projection is None:
            raise TypeError("the heads of this attention are not added alone")
        return self.projection


@dataclass(frozen=True, eq=False)
class Unembedding:
    """The way from the residual stream to logits, but for a cap."""

    module: nn.Module | None
    """The final norm."""
    norm: HeldNorm | None
    factor: float
    """The factor of the states behind the norm, times that of the logits behind the matrix."""
    weight: Tensor
    """``[V, d]``, or the part of it on this device."""
    bias: Tensor | None
    """``[V]``, times the factor of the logits."""

    @property
    def matrix(self) -> Tensor:
        """``[V, d]``; of a model that is spread over devices it is gathered for each use."""
        return whole_parameter(self.weight)

    def scale(self, state: Tensor, normed: Tensor | None = None) -> Tensor | None:
        """The scale ``[…, 1]`` by which the final norm makes ``normed`` of a state; None without a norm."""
        if self.module is None or self.norm is None:
            return None
        return self.norm.scale(wide(state), wide(self.module(state) if normed is None else normed))

    def held(self, part: Tensor, scale: Tensor | None) -> Tensor:
        """A part of a state behind the final norm, whose scale is given."""
        made = part if self.norm is None or scale is None else self.norm.held(part, scale)
        return made * self.factor

    def constant(self, ids: Tensor | None = None) -> Tensor:
        """The logits ``[V]``, or those of some tokens, that are there without any state."""
        matrix = self.matrix if ids is None else self.matrix[ids]
        constant = torch.zeros(
            len(matrix), dtype=torch.promote_types(matrix.dtype, torch.float32), device=matrix.device
        )
        if self.norm is not None:
            constant = wide(matrix) @ (self.norm.bias * self.factor)
        return constant if self.bias is None else constant + (self.bias if ids is None else self.bias[ids])


@dataclass(frozen=True, eq=False)
class ResidualStream:
    """The stack of a model whose last states predict tokens: the next ones, or those at their own places."""

    readout: LensReadout
    layers: Sequence[nn.Module]
    places: Mapping[LayerKey, AttentionPlace]
    """Its attentions, and its layers with implicit weights."""
    branches: Mapping[LayerKey, Branch] = field(default_factory=dict)
    unembedding: Unembedding | None = None
    without_parts: str = ""
    """The reason for which the states are no sum of parts that are known."""
    time_first: bool = False
    """True if its layers pass on states ``[L, B, d]``."""
    several_streams: bool = False
    """True if each token has several states behind a layer, as with hyper-connections."""
    unsummed_layer: int | None = None
    """The first layer that adds something else beside its attentions than one or two outputs of its modules."""

    def check_parts(self, keys: Sequence[LayerKey], param: str, adapter: Adapter | None, *, heads: bool) -> None:
        """Raise InvalidRequest unless the contributions of these attentions, or of their heads, are known."""
        if self.without_parts:
            raise InvalidRequest.at(param, f"{self.without_parts}; ask of hidden alone")
        if adapter is not None and self._held().intersection(adapter.changes):
            raise InvalidRequest.at(
                param, f"the adapter {adapter.name} changes norms or the unembedding; ask of hidden alone, or its base"
            )
        for key in keys:
            if heads and self.branches[key].projection is None:
                raise InvalidRequest.at(param, f"layer {key}: {self.branches[key].without_heads}; ask of its output")

    def beside(self, place: AttentionPlace) -> list[AttentionPlace]:
        """The attentions of the layer of one, that one too."""
        return [neighbour for neighbour in self.places.values() if neighbour.layer is place.layer]

    def _held(self) -> set[nn.Module]:
        """The modules whose numbers are held."""
        head: Any = self.readout.loaded.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        sources = {branch.source for branch in self.branches.values() if branch.norm is not None} | {head}
        module = None if self.unembedding is None else self.unembedding.module
        return sources if module is None else sources | {module}

    def number(self, place: AttentionPlace) -> int:
        """The place of an attention's layer in the stack."""
        return self._numbers[place.layer]

    @cached_property
    def _numbers(self) -> dict[nn.Module, int]:
        return {layer: at for at, layer in enumerate(self.layers)}

    @property
    def count(self) -> int:
        """The number of its layers."""
        return len(self.layers)

    @cached_property
    def states(self) -> Sequence[Point]:
        """The points of the states before the first layer, and behind each."""
        return [(_STREAM, str(number)) for number in range(self.count + 1)]

    @property
    def points(self) -> dict[Point, Site]:
        """The points of the stack: the states around its layers, and the parts that its attentions add."""
        sites = {self.states[0]: Site(self.layers[0], given=True)}
        sites |= {point: Site(layer) for point, layer in zip(self.states[1:], self.layers, strict=True)}
        for key, branch in self.branches.items():
            sites[key, ADDED] = Site(branch.source)
            if branch.norm is not None:
                sites[key, UNNORMED] = Site(branch.source, given=True)
            if branch.projection is not None:
                around = None if branch.share is None else branch.share.around
                sites[key, JOINED_HEADS] = Site(branch.projection, given=True, batch_first=around)
        if self.unembedding is not None and self.unembedding.module is not None:
            sites[NORMED] = Site(self.unembedding.module)
        return sites
