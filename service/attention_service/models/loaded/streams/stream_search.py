"""The search for the residual stream of a model in short runs.

No list of classes says how a model is made. Short runs show what each module is given and returns; a sum is taken for
one only if the numbers are it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit
from attention_service.core.tensors import wide
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.held_norm import HeldNorm
from attention_service.models.loaded.streams.module_traces import ModuleTraces, traced
from attention_service.models.loaded.streams.readout import LensReadout, check_has_unembedding, every_layer, list_of
from attention_service.models.loaded.streams.residual_stream import Branch, ResidualStream, Unembedding
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
from attention_service.models.passes.device_heads import DeviceHeads
from attention_transformers.model_layers import LayerKey


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
