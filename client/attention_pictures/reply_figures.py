"""The figure of each kind of reply."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import Names, head_name, heading, layer_name
from attention_contract.schemas.analyses.attribution import AttributionReply
from attention_contract.schemas.analyses.circuits import CircuitsReply
from attention_contract.schemas.analyses.effects import EffectsReply
from attention_contract.schemas.analyses.lenses import ModelLensReply
from attention_contract.schemas.analyses.model_effects import ModelEffectsReply
from attention_contract.schemas.analyses.recording_statistics import RecordingStatistics
from attention_contract.schemas.analyses.rollout import RecordingRollout, RolloutReply
from attention_contract.schemas.analyses.similarity import RecordingSimilarity, SimilarityReply
from attention_contract.schemas.attention import ForwardReply
from attention_contract.schemas.costs.complexity import ComplexityReply
from attention_contract.schemas.model_requests import LayerWeights, ModelWeightsReply
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.schemas.sessions import StepReply
from attention_contract.schemas.weights import WeightsReply
from attention_pictures.circuit_figures import circuits_figure
from attention_pictures.comparison_figures import (
    effects_figure,
    model_effects_figure,
    rollout_figure,
    similarity_figure,
)
from attention_pictures.cost_lines import cost_lines
from attention_pictures.heads.head_overview import LayerMaps, head_overview
from attention_pictures.heat_maps import heat_maps
from attention_pictures.image_maps import image_figure
from attention_pictures.lens.lens_figure import lens_figure
from attention_pictures.pooled_cells import Numbers
from attention_pictures.statistic_maps import MOST_ROWS, layer_maps, left_out
from attention_pictures.statistic_tables import tables
from attention_pictures.weight_figures import (
    attribution_figure,
    drawn_weights,
    sequence_of,
    statistics_of,
    weights_figure,
)


def figure_of(reply: Any, options: PictureOptions, names: Names) -> Figure:
    """Draw a reply. Raises InvalidRequest if it lacks the head, the sequence or the numbers of the view."""
    return FIGURES[type(reply)](reply, options, names)


def costs_figure(reply: ComplexityReply, options: PictureOptions, names: Names) -> Figure:
    """Draw costs along the sweep of their request."""
    if names.sweep is None:
        raise InvalidRequest.at("sweep", "expected the sizes that the costs are along, to draw them")
    return cost_lines(reply, names.sweep, options)


def output_figure(reply: ForwardReply, options: PictureOptions, names: Names) -> Figure:
    """Draw queries × width of the output, of each head of raw attention; with ``compare``, what the edits change."""
    moved = reply.differences
    output = reply.output if moved is None else moved.output
    if output is None:
        raise InvalidRequest.at("return", "a picture of the output needs it; list output")
    sequence = sequence_of(options, len(output) if output.ndim > 2 + names.by_head else None)
    values = np.asarray(output if sequence is None else output[sequence], np.float32)
    maps = values if names.by_head else values[None]
    titles = [head_name(None, head) for head in range(len(maps))] if names.by_head else [""]
    about, quantity = (
        ("output", "output") if moved is None else ("differences from the unedited output", "change of the output")
    )
    title = heading(names, about, f"{values.shape[-2]} queries × {values.shape[-1]} numbers")
    return heat_maps(
        maps, titles, title, options, signed=True, axes_names=("query", "number"), quantity=quantity,
    )  # fmt: skip


def model_figure(reply: ModelWeightsReply, options: PictureOptions, names: Names) -> Figure:
    """Draw the weights of one layer of a model; of several layers, a map of layers × heads for each statistic.

    The view ``heads`` of several layers, and a selection of them, are drawn as maps of all their heads.
    """
    several, (first, *_) = len(reply.layers) > 1, reply.layers
    has_weights = first.weights is not None or first.pooled is not None
    if several and draws_maps(options, names) and (has_weights or options.view is not None):
        return _overview(reply, options, names)
    if several or (options.view is None and not has_weights):
        if options.view not in {None, "statistics"}:
            problem = f"the view {options.view} is of one layer; name it, or ask for the view heads or statistics"
            raise InvalidRequest.at("layers", problem)
        rows = [
            (layer_name(listed.layer), statistics_of(listed.statistics, _sequence(reply, listed, options)))
            for listed in reply.layers
        ]
        return layers_figure(rows, None, options, heading(names, "statistics", f"{len(rows)} layers"))
    layer = reply.layers[0]
    sequence = _sequence(reply, layer, options)
    if options.view == "image":
        return image_figure(reply, layer, sequence, options, names)
    queries, keys = (
        [token.strip() or repr(token) for token in side.tokens] for side in reply.tokens_of(layer.layer, sequence or 0)
    )
    named = replace(names, title=heading(names, f"layer {layer.layer}"), layer=layer.layer)
    return weights_figure(layer, options, named, (queries, keys))


def draws_maps(options: PictureOptions, names: Names) -> bool:
    """True if a picture of several layers shows the weights of their heads, and not the statistics of all."""
    chosen = (names.heads, names.rows, names.columns)
    return options.view == "heads" or (options.view is None and (names.averaged or chosen != (None,) * 3))


def _overview(reply: ModelWeightsReply, options: PictureOptions, names: Names) -> Figure:
    """Draw the weights of all heads of several layers."""
    weights_by_layer = [(layer, drawn_weights(layer, _sequence(reply, layer, options))) for layer in reply.layers]
    maps = [of.values[None] if names.averaged else of.values for _, of in weights_by_layer]
    heads = list(names.heads or range(max(map(len, maps))))
    rows = [
        LayerMaps(layer_name(layer.layer), of, range(len(of)))
        for (layer, _), of in zip(weights_by_layer, maps, strict=True)
    ]
    signed = [of for _, of in weights_by_layer if of.signed]
    of = (signed or [of for _, of in weights_by_layer])[0]
    sizes = {of.shape[-2:] for of in maps}
    size = "{} queries × {} keys".format(*next(iter(sizes))) if len(sizes) == 1 else ""
    columns = ["mean"] if names.averaged else [head_name(None, head) for head in heads]
    title = heading(names, of.about, f"{len(rows)} layers", size)
    return head_overview(rows, columns, title, options, quantity=of.quantity(names), signed=bool(signed))


def _sequence(reply: ModelWeightsReply, layer: LayerWeights, options: PictureOptions) -> int | None:
    """The text, image or crop to draw; None if the numbers of the layer have no batch dimension."""
    media = reply.media_labels_of(layer.layer)
    if media is None and (reply.image_labels is not None or reply.audio_labels is not None):
        return None
    batch = reply.labels if media is None else media
    return sequence_of(options, len(batch) if isinstance(batch, list) else None)


def recording_figure(reply: RecordingStatistics, options: PictureOptions, names: Names) -> Figure:
    """Draw a map of layers × heads for each statistic."""
    attentions = reply.attentions[:MOST_ROWS]
    if not attentions:
        raise InvalidRequest.at("layers", "the recording has no weights to draw statistics of")
    heads = max((attention.heads for attention in attentions), key=len)
    title = heading(names, "statistics of the recorded weights", f"{len(reply.attentions)} layers")
    rows = [(attention.name, statistics_of(attention.statistics, None)) for attention in reply.attentions]
    return layers_figure(rows, heads, options, title)


def layers_figure(
    layers: Sequence[tuple[str, Mapping[str, Numbers]]],
    heads: Sequence[str] | None,
    options: PictureOptions,
    title: str,
) -> Figure:
    """Draw layers × heads of each statistic. ``heads``: their labels, by default their numbers."""
    shown = layers[:MOST_ROWS]
    count = max((len(values) for _, tables in shown for values in tables.values()), default=0)
    labels = heads or [head_name(None, head) for head in range(count)]
    notes = [*left_out(len(layers), "layers"), *left_out(len(labels), "heads")]
    labels = labels[:MOST_ROWS]
    maps = tables([statistics for _, statistics in shown], len(labels))
    return layer_maps(maps, [name for name, _ in shown], labels, title, options, notes)


FIGURES: Final[dict[type, Callable[[Any, PictureOptions, Names], Figure]]] = {
    ForwardReply: output_figure,
    StepReply: output_figure,
    WeightsReply: weights_figure,
    ModelWeightsReply: model_figure,
    AttributionReply: attribution_figure,
    RecordingStatistics: recording_figure,
    ComplexityReply: costs_figure,
    CircuitsReply: circuits_figure,
    SimilarityReply: similarity_figure,
    RecordingSimilarity: similarity_figure,
    EffectsReply: effects_figure,
    ModelEffectsReply: model_effects_figure,
    ModelLensReply: lens_figure,
    RolloutReply: rollout_figure,
    RecordingRollout: rollout_figure,
}
