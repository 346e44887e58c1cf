"""The figure of each kind of reply."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import Names, heading
from attention_contract.schemas.attention import ForwardReply
from attention_contract.schemas.attribution import AttributionReply
from attention_contract.schemas.circuits import CircuitsReply
from attention_contract.schemas.complexity import ComplexityReply
from attention_contract.schemas.effects import EffectsReply
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.schemas.recording_statistics import RecordingStatistics
from attention_contract.schemas.rollout import RecordingRollout, RolloutReply
from attention_contract.schemas.sessions import StepReply
from attention_contract.schemas.similarity import RecordingSimilarity, SimilarityReply
from attention_contract.schemas.weights import WeightsReply
from attention_pictures.circuit_figures import circuits_figure
from attention_pictures.comparison_figures import effects_figure, rollout_figure, similarity_figure
from attention_pictures.cost_lines import cost_lines
from attention_pictures.heat_maps import heat_maps
from attention_pictures.pooled_cells import Numbers
from attention_pictures.statistic_maps import MOST_ROWS, layer_maps, left_out
from attention_pictures.weight_figures import attribution_figure, sequence_of, statistics_of, weights_figure


def figure_of(reply: Any, options: PictureOptions, names: Names) -> Figure:
    """Draw a reply. Raises InvalidRequest if it lacks the head, the sequence or the numbers of the view."""
    return FIGURES[type(reply)](reply, options, names)


def costs_figure(reply: ComplexityReply, options: PictureOptions, names: Names) -> Figure:
    """Draw costs along the sweep of their request."""
    if names.sweep is None:
        raise InvalidRequest("sweep: expected the sizes that the costs are along, to draw them", param="sweep")
    return cost_lines(reply, names.sweep, options)


def output_figure(reply: ForwardReply, options: PictureOptions, names: Names) -> Figure:
    """Draw queries × width of the output, of each head of raw attention; with ``compare``, what the edits change."""
    moved = reply.differences
    output = reply.output if moved is None else moved.output
    if output is None:
        raise InvalidRequest("return: a picture of the output needs it; list output", param="return")
    sequence = sequence_of(options, len(output) if output.ndim > 2 + names.by_head else None)
    values = np.asarray(output if sequence is None else output[sequence], np.float32)
    maps = values if names.by_head else values[None]
    titles = [f"head {head}" for head in range(len(maps))] if names.by_head else [""]
    about, quantity = ("output", "output") if moved is None else ("differences from the unedited output", "difference")
    title = heading(names, about, f"{values.shape[-2]} queries × {values.shape[-1]} numbers")
    return heat_maps(
        maps, titles, title, options, signed=True, axes_names=("query", "number"), quantity=quantity,
    )  # fmt: skip


def recording_figure(reply: RecordingStatistics, options: PictureOptions, names: Names) -> Figure:
    """Draw a map of layers × heads for each statistic."""
    attentions = reply.attentions[:MOST_ROWS]
    if not attentions:
        raise InvalidRequest("layers: the recording has no weights to draw statistics of", param="layers")
    heads = max((each.heads for each in attentions), key=len)
    notes = [*left_out(len(reply.attentions), "layers"), *left_out(len(heads), "heads")]
    heads = heads[:MOST_ROWS]
    tables: dict[str, Numbers] = {}
    for row, each in enumerate(attentions):
        for name, values in statistics_of(each.statistics, None).items():
            table = tables.setdefault(name, np.full((len(attentions), len(heads)), np.nan))
            table[row, : len(values)] = values[:MOST_ROWS]
    title = heading(names, "statistics of the recorded weights", f"{len(reply.attentions)} layers")
    return layer_maps(tables, [each.name for each in attentions], heads, title, options, notes)


FIGURES: Final[dict[type, Callable[[Any, PictureOptions, Names], Figure]]] = {
    ForwardReply: output_figure,
    StepReply: output_figure,
    WeightsReply: weights_figure,
    AttributionReply: attribution_figure,
    RecordingStatistics: recording_figure,
    ComplexityReply: costs_figure,
    CircuitsReply: circuits_figure,
    SimilarityReply: similarity_figure,
    RecordingSimilarity: similarity_figure,
    EffectsReply: effects_figure,
    RolloutReply: rollout_figure,
    RecordingRollout: rollout_figure,
}
