"""The attentions of a loaded model: computed where it asks the interface of transformers, else observed."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_contract.errors import InvalidCheckpoint
from attention_service.models.folders.checkpoint_facts import import_instead
from attention_service.models.inputs.input_reader import InputReader
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.attention_places import (
    BOTH,
    MEDIA,
    AttentionPlace,
    find_places,
    named_layers,
)
from attention_service.models.passes.device_heads import DeviceHeads, not_spread
from attention_service.models.passes.layer_attention import LayerAttention
from attention_service.models.passes.mixers.implicit_layers import ImplicitLayers, kind_of, mixers_of
from attention_service.models.passes.observed.attention_trial import try_sights
from attention_service.models.passes.observed.observed_attention import ObservedAttention
from attention_service.models.passes.observed.own_functions import Sight
from attention_service.models.passes.observed.windowed_attention import attend_over_pairs
from attention_service.models.passes.unrun_models import NOT_RUNNING, does_not_run
from attention_service.models.passes.ways import AttentionWay
from attention_service.runtime.device.torch_device import Device
from attention_transformers.model_layers import (
    AttentionModule,
    LayerKey,
    UnsupportedModel,
    attention_modules,
    layered,
    own_attentions,
    type_names,
)

_ENTERING: Final = {"tokens": "a text", "tokens and media": "a text", "pixels": "an image", "frames": "a sound"}
"""The input of a model by what enters its first layer."""
Layers = Sequence[tuple[AttentionModule, tuple[LayerKey, ...]]]


class ShortRun(Protocol):
    """One short run of the model."""

    def __call__(self, arguments: Mapping[str, Tensor], **more: Any) -> Any:
        """Run the model over a few tokens, or a small image. Returns its output."""


class FoundAttentions(NamedTuple):
    """The attentions of a model, and where each stands, by the text of its key; no place if none is seen."""

    attention: AttentionWay
    places: dict[str, AttentionPlace]


class FoundMixers(NamedTuple):
    """The layers that mix tokens by a running state, and where each stands, by the text of its key."""

    layers: ImplicitLayers
    places: dict[str, AttentionPlace]


def find_mixers(
    model: PreTrainedModel, reader: InputReader, run: ShortRun, known: Mapping[str, AttentionPlace]
) -> FoundMixers:
    """Find the layers of a model that mix tokens by a running state in short runs; ``known``: its attentions.

    One beside an attention of the same layer has its kind before its number, as in ``state_space.3``.
    """
    named = []
    for one, keys in _named(model, reader, mixers_of(model)):
        kind = kind_of(one.module)
        own = (f"{kind}.{str(key).rpartition('.')[2]}" if str(key) in known else key for key in keys)
        named.append((one, tuple(own)))
    implicit = ImplicitLayers(model, named)
    if not named:
        return FoundMixers(implicit, {})
    named_places = find_places(model, implicit, named, _within(implicit, reader, run), reader.short_text)
    places = {
        key: replace(place, mixes=kind_of(place.module), state_width=implicit.state_widths[place.module])
        for key, place in named_places.items()
        if place.queries == "text"
    }
    return FoundMixers(implicit, places)


def find_attentions(
    model: PreTrainedModel, reader: InputReader, device: Device, run: ShortRun, share: DeviceHeads | None = None
) -> FoundAttentions:
    """Make a model attend by this package, or see how it attends itself, and find its attentions in short runs.

    ``share``: see ``LayerAttention``. Raises InvalidCheckpoint if it is given, and the model attends itself.
    """
    try:
        modules = attention_modules(model)
    except UnsupportedModel:
        modules = []
    if modules:
        layers = _named(model, reader, modules)
        computed = LayerAttention(layers, device, share)
        computed.install(model, modules)
        with computed.trying() as called:
            places = find_places(model, computed, layers, _within(computed, reader, run), reader.short_text)
            by_run = _named_by_run(layers, _runs(called, computed))
        if by_run is not None:
            computed.name_layers(by_run)
            with computed.beside.trying():
                places = find_places(model, computed, by_run, _within(computed, reader, run), reader.short_text)
        if places:
            return FoundAttentions(computed, places)
        computed.remove()  # its text passes others
        model.set_attn_implementation("eager")
    if share is not None:
        raise not_spread(model, "computes its attention itself")
    attend_over_pairs(model)
    sights: dict[nn.Module, Sight] = {}
    for arguments in reader.short_runs():
        batch = len(next(iter(arguments.values())))
        sights |= try_sights(model, partial(_itself, model, run, arguments), batch)
    layers = _named(model, reader, [one for one in layered(model, sights) if len(one.keys) == sights[one.module].runs])
    observed = ObservedAttention(model, layers, sights)
    places = find_places(model, observed, layers, _within(observed, reader, run), reader.short_text)
    if reader.enters != "pixels":  # of which windows and pooled tokens are no tokens
        tokens = {"text", "media", *(("target", BOTH) if reader.pairs else ())}
        places = {key: place for key, place in places.items() if {place.queries, place.keys} <= tokens}
    return FoundAttentions(observed, places)


def not_observed(model: nn.Module, places: Collection[AttentionPlace]) -> Iterable[nn.Module]:
    """Return the modules that compute their attention themselves and are none of these places."""
    seen = {place.module for place in places}
    return [attention for attention in own_attentions(model) if seen.isdisjoint(attention.modules())]


def _named(model: PreTrainedModel, reader: InputReader, modules: Sequence[AttentionModule]) -> Layers:
    if reader.tower is None:
        return named_layers(modules)
    part, stack = reader.tower
    return named_layers(modules, type(getattr(model.config, part, None)), stack)


def _runs(called: Iterable[nn.Module], attention: AttentionWay) -> list[nn.Module]:
    """The modules in the order of their runs, of those in the order of their calls of the attention function."""
    calls, modules_called = Counter[nn.Module](), []
    for module in called:
        if calls[module] % attention.calls_of(module) == 0:
            modules_called.append(module)
        calls[module] += 1
    return modules_called


def _named_by_run(layers: Layers, ran: Sequence[nn.Module]) -> Layers | None:
    """Return the modules with a key for each run in a pass, if some run several times under one key; else None.

    The layers of a stack of such modules are numbered in the order in which they run. Those that see images or hear
    sounds keep their keys, since their runs depend on the input.
    """
    counts = Counter(ran)
    stacks = {one.module: str(keys[0]).rpartition(".")[0] for one, keys in layers}
    repeated = {stacks[one.module] for one, keys in layers if counts[one.module] > len(keys)} - MEDIA
    if not repeated:
        return None
    numbers, keys_of = Counter[str](), dict[nn.Module, list[LayerKey]]()
    for module in (*ran, *(one.module for one, _ in layers if not counts[one.module])):
        stack = stacks[module]
        keys_of.setdefault(module, []).append(f"{stack}.{numbers[stack]}" if stack else numbers[stack])
        numbers[stack] += 1
    return [(one, tuple(keys_of[one.module]) if stacks[one.module] in repeated else keys) for one, keys in layers]


def _within(attention: AttentionWay, reader: InputReader, run: ShortRun) -> Callable[[AttentionPass], None]:
    """All short runs, as one pass."""

    def whole(attention_pass: AttentionPass) -> None:
        for arguments in reader.short_runs():
            with attention.running(attention_pass):
                run(arguments)

    return whole


def _itself(model: PreTrainedModel, run: ShortRun, arguments: Mapping[str, Tensor], weights: bool) -> Any:
    try:
        return run(arguments, **({"output_attentions": True} if weights else {}))
    except NOT_RUNNING as fault:
        raise does_not_run(model, fault) from fault


def no_layers_seen(model: PreTrainedModel, reader: InputReader) -> InvalidCheckpoint:
    """The error for a model of which neither attentions nor layers with implicit weights are seen."""
    own = ", ".join(type_names(own_attentions(model))) or "none of its modules"
    return InvalidCheckpoint.at(
        "checkpoint",
        f"{_ENTERING[reader.enters]} passes no attention of {type(model).__name__} that uses the attention interface "
        f"of transformers, and of its own ({own}) none has a softmax over pairs of tokens whose weights it returns or "
        f"multiplies values by"
        f"{import_instead(Path(model.name_or_path or ''))}",
    )
