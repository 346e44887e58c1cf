"""A request to a model, checked: its input, and the layers that it names."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.schemas.attention import Edit
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.prompts import ModelInput
from attention_service.core.inspection.statistics import SIGNED_STATISTICS
from attention_service.models.inputs.input_stacks import Inputs, Stack
from attention_service.models.inputs.key_stacks import extended, in_windows, joined
from attention_service.models.loaded.adapters import Adapter
from attention_service.models.loaded.edit_checks import check_edits, check_edits_of_embeddings
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.watched_probes import WatchedProbe
from attention_service.models.passes.attention_pass import NOTHING, LayerTask
from attention_service.models.passes.attention_places import BOTH, AttentionPlace, kinds_of
from attention_service.models.passes.layer_keys import LayerWindows
from attention_service.models.passes.mixers.implicit_layers import is_by_channel
from attention_service.models.passes.points import EDITED_EMBEDDINGS
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.binding.selection import bind_keys, bind_selection, check_label_count
from attention_transformers.model_layers import LayerKey

IMPLICIT: Final = "its weights are implicit: they may be negative, and their rows need not sum to one"
"""The reason for which layers that mix tokens by a running state cannot answer some requests."""

_OF_ALL = frozenset({"logits", "pooled", "tokens", "embeddings"})
"""Names of what no layer has."""
_TELL_ANSWERS: Final = ModelForwardRequest, ModelGradientsRequest, ModelEffectsRequest
"""Requests whose replies tell of the log-probability of an answer."""
LayerRequest = ModelForwardRequest | ModelWeightsRequest | ModelGradientsRequest
Ask = Callable[[AttentionPlace, BoundRequest], LayerTask]
"""Makes the task at the layers of one kind, of which it gets one."""
LONGEST: Final = 2048
"""Tokens of a text up to which its question is answered together with others."""
TEXT_ARGUMENTS: Final = frozenset({"input_ids", "attention_mask", "position_ids"})
"""The arguments of models whose texts can be filled up with those of others."""


@dataclass(frozen=True)
class CheckedRequest:
    """A request to a model, checked: its input, and the layers that it names."""

    inputs: Inputs
    places: list[AttentionPlace]
    """The layers to answer for, in the order asked."""
    edits: Mapping[str, Sequence[Edit]]
    """The edits of each layer, by the text of its key, and of the embeddings."""
    adapter: Adapter | None = None
    """The adapter that answers; None for the base."""
    watch: Sequence[WatchedProbe] = ()
    """The probes that score its tokens."""
    _cut: dict[LayerWindows, Stack] = field(default_factory=dict)
    """The tokens of layers that attend within windows."""

    @cached_property
    def kinds(self) -> list[tuple[AttentionPlace, int]]:
        """One layer of each kind among those to answer for, and the number of those of its kind."""
        return kinds_of(self.places)

    def bound(self, place: AttentionPlace) -> BoundRequest:
        """The attention of a layer over this input, without numbers."""
        queries, keys = self.queries(place), self.keys(place)
        return place.bound(len(queries.ids), queries.length, keys.length, batched=self.several(place))

    def queries(self, place: AttentionPlace) -> Stack:
        """The queries of a layer: tokens, or those of every window."""
        stack, windows = self.stack(place.queries), place.windows
        if windows is None:
            return stack
        if windows not in self._cut:
            self._cut[windows] = in_windows(stack, windows)
        return self._cut[windows]

    def keys(self, place: AttentionPlace) -> Stack:
        """The keys of a layer: tokens, and those that stand for several tokens or are those of another text."""
        if place.windows is not None:
            return self.queries(place)
        if place.keys == BOTH and self.inputs.target is not None:
            return joined(self.inputs.target, self.inputs.text)
        stack = self.stack(place.keys)
        return stack if place.compression is None else extended(stack, place.compression)

    def stack(self, name: str | None) -> Stack:
        """The tokens of queries, or of keys that are the tokens of one text."""
        own = {"target": self.inputs.target, "media": self.inputs.media}.get(name or "")
        return self.inputs.text if own is None else own

    @property
    def edited_layers(self) -> list[str]:
        """The keys of the layers with edits."""
        return [key for key in self.edits if key != EDITED_EMBEDDINGS]

    @property
    def repeats(self) -> bool:
        """True if its texts can come several times in one pass, one batch behind the other."""
        inputs = self.inputs
        beside = inputs.media is not None and inputs.media is not inputs.predicted
        return not beside and all(len(x) == len(inputs.predicted.ids) for x in inputs.arguments.values())

    def several(self, place: AttentionPlace) -> bool:
        """True if the results of a layer's attention have a batch dimension: of texts, or of windows."""
        return place.windows is not None or self.several_states(place)

    def several_states(self, place: AttentionPlace) -> bool:
        """True if the states that a layer returns have a batch dimension."""
        return self.inputs.several or self.stack(place.queries) is self.inputs.media


def check_request(
    loaded: LoadedModel, request: ModelInput, answers: Callable[[AttentionPlace], bool] | None = None
) -> CheckedRequest:
    """Read the input of a request and find its layers. Raises InvalidRequest that names the field at fault.

    ``answers``: true for a layer with implicit weights that can answer the request, so that it is one of ``all``;
    None for a request that such layers cannot answer.
    """
    if request.mask_seed and not loaded.reader.leaves_out:
        raise InvalidRequest.at("mask_seed", "this model sees all of its input; leave it out")
    if request.answer is not None and loaded.head.predicts != "next":
        if loaded.without_masks is not None:
            name = type(loaded.model).__name__
            raise InvalidRequest.at(
                "answer", f"{name} does not predict the tokens of an answer; send it as a part of the text"
            )
        if not isinstance(request, _TELL_ANSWERS):
            raise InvalidRequest.at("answer", "the answer in place of mask tokens changes nothing here; leave it out")
    inputs = loaded.reader.read(request)
    absent = loaded.reader.absent(inputs)
    if request.layers == "all":
        every = loaded.places.values() if answers is None else loaded.all_places
        places = [place for place in every if absent is None or place.queries != absent]
        places = [place for place in places if place.mixes == "attention" or (answers and answers(place))]
    else:
        places = [_present(loaded, key, f"layers.{index}", absent) for index, key in enumerate(request.layers)]
    for index, place in enumerate(places):
        if answers is None and place.mixes != "attention":
            raise InvalidRequest.at(f"layers.{index}", f"layer {place.key}: {IMPLICIT}; leave the layer out")
    checked = CheckedRequest(inputs, places, request.edits, loaded.adapters.active)
    for key, edits in request.edits.items():
        if key == EDITED_EMBEDDINGS:
            check_edits_of_embeddings(loaded.runner, edits, checked.bound(loaded.entered_place))
            continue
        place = _present(loaded, key, f"edits.{key}", absent)
        if answers is None and place.mixes != "attention":
            raise InvalidRequest.at(f"edits.{key}", f"layer {place.key}: {IMPLICIT}; leave its edits out")
        check_edits(loaded.runner, place, edits, checked.bound(place))
    return checked


def read_request(loaded: LoadedModel, request: LayerRequest) -> CheckedRequest:
    """Read the input of a request and find its layers. Raises InvalidRequest that names the field at fault."""

    def answers(place: AttentionPlace) -> bool:
        return not loaded.places or _answers(place, request)  # without attentions, all are asked, or refused by name

    checked, every = check_request(loaded, request, answers), request.layers == "all"
    if every and not loaded.places and (wide := [place for place in checked.places if _has_too_many(place, request)]):
        raise InvalidRequest.at(
            "layers",
            f"{loaded.without_attention} by channel, {wide[0].widths.heads} matrices each; name some layers",
        )
    if getattr(request, "keep", False):
        for index, place in enumerate(checked.places):
            if place.mixes != "attention":
                raise InvalidRequest.at(
                    "keep" if every else f"layers.{index}",
                    f"no recording holds layer {place.key}: {IMPLICIT}; leave keep or the layer out",
                )
    return checked


def layer_tasks(
    loaded: LoadedModel, checked: CheckedRequest, request: ModelForwardRequest | ModelWeightsRequest, ask: Ask
) -> dict[LayerKey, LayerTask]:
    """The tasks of a pass at the layers that a request names, and the edits of all. Raises InvalidRequest."""
    if request.keep and (checked.inputs.several or request.select is not None or request.average_heads):
        raise InvalidRequest.at(
            "keep",
            "a recording holds every head and query of one text; leave select and average_heads out, and send one text",
        )
    of_kind: dict[Hashable, LayerTask] = {}
    for place, _ in checked.kinds:
        if request.keep and place.windows is not None:
            raise InvalidRequest.at(
                "keep",
                f"layer {place.key} attends within windows, whose weights have no tokens in common with those of other "
                "layers, so that no recording holds them; leave keep out",
            )
        if request.keep:
            loaded.runner.check_tap(place, "hidden", "read", "keep")
        bound = checked.bound(place)
        task = ask(place, bound)
        if isinstance(request, ModelWeightsRequest):
            check_label_count("labels", request.labels, bound.keys, f"key of layer {place.key}")
            check_label_count("query_labels", request.query_labels, bound.queries, f"query of layer {place.key}")
        of_kind[place.kind] = replace(
            task,
            selection=task.selection if request.select is None else bind_selection(request.select, bound),
            keys=bind_keys(request.select, bound),
            whole=("weights",) if request.keep and place.keys_of == "tokens" else (),
            batched=checked.several(place),
            query_mask=checked.queries(place).mask,
        )
    return edit_tasks(loaded, checked, {place.key: of_kind[place.kind] for place in checked.places})


def edit_tasks(
    loaded: LoadedModel, checked: CheckedRequest, tasks: Mapping[LayerKey, LayerTask] | None = None
) -> dict[LayerKey, LayerTask]:
    """The edits of a request as tasks, which touch no padding, beside other tasks at layers."""
    edited = {} if tasks is None else {**tasks}
    for key, edits in checked.edits.items():
        if key == EDITED_EMBEDDINGS:
            edited[key] = LayerTask(edits=edits)
            continue
        place = loaded.place_of(key)
        real = checked.keys(place).mask
        edited[place.key] = replace(edited.get(place.key, NOTHING), edits=edits, key_mask=real)
    return edited


def may_have_more_rows(
    loaded: LoadedModel, request: ModelForwardRequest | ModelWeightsRequest, checked: CheckedRequest
) -> bool:
    """True if the pass of a request may have further rows, which change none of its own."""
    inputs = checked.inputs
    places = [*[place for place, _ in checked.kinds], *[loaded.place_of(key) for key in checked.edited_layers]]
    seen = inputs.media or inputs.target or request.images or set(inputs.arguments) - TEXT_ARGUMENTS
    # No trial has shown that texts of an observed attention do not change each other; a choice is one question.
    if request.alone or request.keep or seen or loaded.head.unit == "choice" or not loaded.stacks_texts:
        return False
    others = {(place.keys_of, place.mixes) for place in places} - {("tokens", "attention")}
    return inputs.text.length <= LONGEST and not others and not loaded.reader.mixes_padding(2 * inputs.text.length)


def _has_too_many(place: AttentionPlace, request: LayerRequest) -> bool:
    """True for a request for weights by channel, of which one layer has too many to be one of all."""
    named = {*getattr(request, "return_", ()), *getattr(request, "wrt", ())}
    return is_by_channel(place.module) and (isinstance(request, ModelWeightsRequest) or "weights" in named)


def _answers(place: AttentionPlace, request: LayerRequest) -> bool:
    """True if a layer with implicit weights can answer a request for all layers."""
    named = {*getattr(request, "return_", ()), *getattr(request, "wrt", ())}
    if _has_too_many(place, request):
        return False
    if isinstance(request, ModelWeightsRequest):
        signed = SIGNED_STATISTICS.issuperset(request.statistics or ())
        return not request.keep and (request.normalize == "absolute" or (signed and not request.normalize))
    return not getattr(request, "keep", False) and named - _OF_ALL <= (place.taps or frozenset())


def _present(loaded: LoadedModel, key: LayerKey, param: str, absent: str | None) -> AttentionPlace:
    """An attention that an input passes. ``absent``: the tokens that it does not have."""
    place = _place(loaded, key, param)
    if absent is not None and place.queries == absent:
        does = loaded.reader.senses if absent == "media" else "reads texts"
        raise InvalidRequest.at(param, f"layer {place.key} {does}; send one")
    return place


def attention_of(loaded: LoadedModel, key: LayerKey, param: str) -> AttentionPlace:
    """The attention of a layer, the field ``param``. Raises InvalidRequest for a layer that has none."""
    place = _place(loaded, key, param)
    if place.mixes != "attention":
        raise InvalidRequest.at(param, f"layer {place.key}: {IMPLICIT}; leave the layer out")
    return place


def _place(loaded: LoadedModel, key: LayerKey, param: str) -> AttentionPlace:
    place = loaded.places.get(str(key)) or loaded.implicit.get(str(key))
    if place is None and str(key) in loaded.in_parts:
        raise InvalidRequest.at(param, loaded.in_parts[str(key)])
    if place is None:
        known = [str(other.key) for other in loaded.all_places]
        reason = ", ".join(known[:8]) + (f", …, {known[-1]}" if len(known) > 9 else "")
        raise InvalidRequest.at(param, f"the model has no attention {str(key)!r}; it has {reason}")
    return place
