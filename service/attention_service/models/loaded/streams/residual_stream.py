"""The residual stream of a model: what each layer adds to it, by its attention and beside it, and how it is read out.

No list of classes says how a model is made. Short runs show what each module is given and returns; a sum is taken for
one only if the numbers are it. Source: Elhage et al. 2021, A mathematical framework for transformer circuits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit
from attention_service.core.tensors import wide
from attention_service.models.loaded.adapters import Adapter
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.held_norm import HeldNorm
from attention_service.models.loaded.streams.module_traces import ModuleTraces, traced
from attention_service.models.loaded.streams.readout import LensReadout, check_has_unembedding, every_layer, list_of
from attention_service.models.loaded.streams.state_sums import (
    are_summed,
    factors_beside,
    factors_of,
    ratio_of,
    same,
    tolerance_of,
)
from attention_service.models.passes.attention_pass import AttentionPass, LayerTask
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.device_heads import DeviceHeads, whole_parameter
from attention_service.models.passes.points import Point, Site
from attention_transformers.model_layers import LayerKey

ADDED: Final = "added"
"""The point of an attention at which its branch is added to the states, times a factor."""
UNNORMED: Final = "unnormed"
"""The point before the norm of a branch, if it has one."""
HEADS: Final = "heads"
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
                sites[key, HEADS] = Site(branch.projection, given=True, batch_first=around)
        if self.unembedding is not None and self.unembedding.module is not None:
            sites[NORMED] = Site(self.unembedding.module)
        return sites


def find_stream(loaded: LoadedModel) -> ResidualStream:
    """Find the residual stream of a model in short runs, and name its points.

    Raises InvalidRequest for a model that predicts no tokens of a text, or whose states cannot be read by themselves.
    """
    stream = _stream(loaded)
    loaded.points.name(stream.points)
    return stream


def _stream(loaded: LoadedModel) -> ResidualStream:
    name = type(loaded.model).__name__
    check_has_unembedding(loaded, "kind")
    wanted = "target" if loaded.reader.pairs else "text"
    places = {place.key: place for place in loaded.all_places if place.queries == wanted}
    stack = next(
        (stack_layers for place in places.values() if (stack_layers := list_of(loaded, place.layer)) is not None), None
    )
    if stack is None:
        raise InvalidRequest.at("kind", f"the layers of {name} that read the text are in no list")
    layers = [*stack]
    with traced(loaded.model.modules()) as traces, torch.no_grad():
        logits = loaded.run(loaded.reader.short_runs()[0], AttentionPass({})).logits
    for number, layer in enumerate(layers):
        if layer not in traces.made:
            raise InvalidRequest.at("kind", f"a layer of {name} returns no states")
        if not bool(traces.made[layer].isfinite().all()):
            raise InvalidRequest.at(
                "kind",
                f"the states behind layer {number} of {name} are not finite in {str(loaded.model.dtype)[6:]}; load the "
                "model with a dtype of a larger range, such as bfloat16 or float32",
            )
    time_first = {place.layer for place in loaded.all_places if place.time_first}
    last = traces.ended[layers[-1]]
    last = last.transpose(0, 1) if layers[-1] in time_first else last
    if last.shape[:2] != logits.shape[:2]:
        raise InvalidRequest.at(
            "kind",
            f"the layers of {name} return states of the shape {[*last.shape]} for {logits.shape[1]} tokens; a lens "
            "reads one state of each token",
        )
    returned = {layer: traces.returned[layer] for layer in every_layer(loaded) if layer in traces.returned}
    encoder = loaded.model.get_encoder() if loaded.reader.pairs else None
    readout = LensReadout(loaded, returned, time_first, None if encoder is None else traces.returned.get(encoder))
    readout.check(last, logits, tolerance_of(loaded.model.dtype))
    stream = ResidualStream(readout, layers, places, time_first=layers[-1] in time_first, several_streams=last.ndim > 3)
    if stream.time_first:
        return replace(stream, without_parts=f"{name}: its layers pass on states token by token, text by text within")
    try:
        stream = replace(stream, branches=_branches(loaded, stream, traces))
        unsummed = _unsummed_layer(stream, traces, tolerance_of(loaded.model.dtype))
        unembedding = _unembedding(loaded, layers[-1], traces, logits)
        return replace(stream, unembedding=unembedding, unsummed_layer=unsummed)
    except _NoSumError as fault:
        return replace(stream, without_parts=f"{name}: {fault}")


class _NoSumError(Exception):
    """The states of a model are no sum of parts that are known."""


# ── behind the last layer ────────────────────────────────────────────────────────────────────────────────────────────


def _unembedding(loaded: LoadedModel, last: nn.Module, traces: ModuleTraces, logits: Tensor) -> Unembedding:
    head: Any = loaded.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    state, tolerance = traces.made[last], tolerance_of(loaded.model.dtype)
    if head not in traces.made or not isinstance(head, nn.Linear):
        raise _NoSumError("its unembedding is no linear layer")
    if head.weight.is_meta:
        raise _NoSumError("its unembedding is on disk, and is read for each pass")
    given, made = traces.given[head], traces.made[head]
    of_logits = ratio_of(wide(logits), wide(made), tolerance) or 1.0  # a cap keeps no ratio
    bias = None if head.bias is None else wide(head.bias) * of_logits
    if (ratio := ratio_of(wide(given), wide(state), tolerance)) is not None:
        return Unembedding(None, None, ratio * of_logits, head.weight, bias)
    inside = {module for layer in every_layer(loaded) for module in layer.modules()}
    for module in traces.made.keys() - inside:
        if same(state, traces.given.get(module), tolerance) and not [*module.children()]:
            ratio = ratio_of(wide(given), wide(traces.made[module]), tolerance)
            norm = HeldNorm.of(module, state)
            if ratio is not None and norm and norm.explains(wide(state), wide(traces.made[module]), tolerance):
                return Unembedding(module, norm, ratio * of_logits, head.weight, bias)
    raise _NoSumError("between its last layer and its unembedding is something else than a norm")


# ── inside the layers ────────────────────────────────────────────────────────────────────────────────────────────────


def _branches(loaded: LoadedModel, stream: ResidualStream, traces: ModuleTraces) -> dict[LayerKey, Branch]:
    tolerance, layers = tolerance_of(loaded.model.dtype), stream.layers
    for number, (one, other) in enumerate(pairwise(layers)):
        if not same(traces.made[one], traces.given.get(other), tolerance):
            raise _NoSumError(f"layer {number + 1} is not given what layer {number} returns")
    if any(place.turn for place in stream.places.values()):
        raise _NoSumError("its layers share modules")
    branches: dict[LayerKey, Branch] = {}
    zeroed = _without_two_heads(loaded, stream)
    for layer in layers:
        own = [place for place in stream.places.values() if place.layer is layer]
        if own:
            branches |= _branches_of(loaded, layer, own, traces, zeroed)
    if lost := [place.key for place in stream.places.values() if place.key not in branches]:
        raise _NoSumError(f"the attention of layer {lost[0]} is not in its layers")
    return branches


def _without_two_heads(loaded: LoadedModel, stream: ResidualStream) -> ModuleTraces:
    """The same run without the first and the last head of each attention whose context is seen."""
    tasks = {
        place.key: LayerTask(edits=[Edit(tap="context", heads=[*{0, place.widths.heads - 1}], set=0)])
        for place in stream.places.values()
        if place.taps is None or "context" in place.taps
    }
    with traced([module for layer in stream.layers for module in layer.modules()]) as traces, torch.no_grad():
        loaded.run(loaded.reader.short_runs()[0], AttentionPass(tasks))
    return traces


def _branches_of(
    loaded: LoadedModel, layer: nn.Module, places: Sequence[AttentionPlace], traces: ModuleTraces, zeroed: ModuleTraces
) -> dict[LayerKey, Branch]:
    """The branches of the attentions of one layer. Raises _NoSumError if they are not added to its input."""
    tolerance = tolerance_of(loaded.model.dtype)
    begin, end = traces.given.get(layer), traces.made[layer]
    if begin is None or begin.shape != end.shape or begin.ndim != 3:
        raise _NoSumError("its layers carry several streams of states")
    modules = [module for module in layer.modules() if module is not layer]
    attending = {place.key: {*place.module.modules()} for place in places}
    options = []
    for place in places:
        foreign = {module for key, inner in attending.items() if key != place.key for module in inner}
        own = [module for module in modules if module not in foreign]
        options.append([*_options(place, own, traces, zeroed, tolerance, loaded.share)])
    mids = [traces.given[module] for module in modules if module in traces.given]
    sums = [mid - begin for mid in mids if mid.shape == begin.shape and not torch.equal(mid, begin)]
    ends_in_norm = any(same(end, traces.made.get(module), tolerance) for module in modules if not [*module.children()])
    others = _others(layer, places, traces)
    for chosen in product(*options):
        parts = [traces.made[branch.source] for branch in chosen]
        if any(part.shape != begin.shape for part in parts):
            continue
        factors = next((x for total in sums if (x := factors_of(total, parts, (), tolerance))), None)
        if factors is None or ends_in_norm:
            factors = factors_beside(end - begin, parts, others, tolerance)
        if factors:
            return {
                place.key: replace(option, factor=factor)
                for place, option, factor in zip(places, chosen, factors, strict=True)
            }
    if ends_in_norm:
        raise _NoSumError(f"layer {places[0].key} returns its sum behind a norm, so its parts do not add up")
    raise _NoSumError(f"the attention of layer {places[0].key} is not added to the states that it is given")


def _others(layer: nn.Module, places: Sequence[AttentionPlace], traces: ModuleTraces) -> list[Tensor]:
    """The states that the modules of a layer make beside its attentions."""
    end, within = traces.made[layer], {module for place in places for module in place.module.modules()}
    rests = [
        traces.made[module] for module in layer.modules() if module not in {*within, layer} and module in traces.made
    ]
    return [x.reshape(end.shape) for x in rests if x.numel() == end.numel() and x.shape[-1] == end.shape[-1]]


def _unsummed_layer(stream: ResidualStream, traces: ModuleTraces, tolerance: float) -> int | None:
    for number, layer in enumerate(stream.layers):
        places = [place for place in stream.places.values() if place.layer is layer]
        branches = [stream.branches[place.key] for place in places]
        end = wide(traces.made[layer])
        added = (
            end
            - wide(traces.given[layer])
            - sum(branch.factor * wide(traces.made[branch.source]) for branch in branches)
        )
        if not are_summed(added, _others(layer, places, traces), tolerance, end):
            return number
    return None


def _options(
    place: AttentionPlace, modules: Sequence[nn.Module], traces: ModuleTraces, zeroed: ModuleTraces, tolerance: float,
    share: DeviceHeads | None,
) -> Iterator[Branch]:  # fmt: skip
    """The branches that an attention may have: its projection or what it returns, or a norm of either."""
    projection, why, share = _projection(place, modules, traces, zeroed, share)
    sources = [source for source in (projection, place.module) if source is not None and source in traces.made]
    for source in sources:
        of_heads = source is projection or (
            projection is not None and same(traces.made[projection], traces.made[source], tolerance)
        )
        heads = (projection, "", share) if of_heads else (None, why or "its heads are not added alone", None)
        yield Branch(source, 1.0, None, *heads)
        for module in modules:
            given = traces.given.get(module)
            if module is source or module not in traces.made or not same(traces.made[source], given, tolerance):
                continue
            norm = None if [*module.children()] else HeldNorm.of(module, traces.made[source])
            if norm and norm.explains(wide(traces.made[source]), wide(traces.made[module]), tolerance):
                yield Branch(module, 1.0, norm, *heads)


def _projection(
    place: AttentionPlace, modules: Sequence[nn.Module], traces: ModuleTraces, zeroed: ModuleTraces,
    share: DeviceHeads | None,
) -> tuple[nn.Module | None, str, DeviceHeads | None]:  # fmt: skip
    """The matrix whose input has a part for each head, which is zero where the head's context is; or the reason.

    With it the share of the heads that it is given, if it is not given all.
    """
    heads = place.widths.heads
    if place.taps is not None and "context" not in place.taps:
        return None, "the context of its heads is not seen", None
    for module in modules:
        if not isinstance(module, nn.Linear | Conv1D) or module not in traces.given or module not in zeroed.given:
            continue
        before, after = traces.given[module], zeroed.given[module]
        width, own = heads * place.widths.value_dim, None
        if share is not None and before.shape[-1] * share.devices == width:
            own, before, after = share, share.whole(before, -1), share.whole(after, -1)
        if before.shape[-1] != width or module.weight.is_meta:
            continue
        shares = [x.reshape(-1, heads, place.widths.value_dim).abs().sum((0, 2)) for x in (before, after)]
        gone = {0, heads - 1}
        if bool((shares[0] > 0).all()) and all((shares[1][head] == 0) == (head in gone) for head in range(heads)):
            return module, "", own
    return None, "no matrix takes its heads one behind the other", None
