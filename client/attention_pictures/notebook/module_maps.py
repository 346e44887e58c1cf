"""Maps of what modules and recordings answer: weights, attributions, statistics, differences; costs as a table."""

from typing import Any, Final

import numpy as np

from attention_contract.reply_names import head_name
from attention_contract.schemas.analyses.attribution import SIGNED_METHODS, AttributionReply
from attention_contract.schemas.analyses.recording_statistics import RecordingStatistics
from attention_contract.schemas.attention import ForwardReply
from attention_contract.schemas.costs.complexity import ComplexityReply
from attention_contract.schemas.weights import HeadStatistics, WeightsReply
from attention_pictures.notebook.html_tables import table_html
from attention_pictures.notebook.notebook_maps import Maps, html_of, maps_of, statistic_maps, weight_maps
from attention_pictures.statistic_tables import named

_OF_PAIRS: Final = {
    "gradient_attention": "", "integrated": "", "norm": "", "relevance": "mean of the heads",
    "norm_of_sum": "sum of the heads",
}  # fmt: skip
"""Attributions to pairs of tokens; those that have one map for all heads, with its name."""


def forward_html(reply: ForwardReply) -> str | None:
    """Maps of returned weights, and of what edits change."""
    moved, weights, output, names = reply.differences, reply.weights, reply.output, reply.request_names
    averaged: bool | None = names.averaged
    if weights is not None and weights.ndim < 4 and not averaged and not names.by_head:
        # Three dimensions may be those of heads or, averaged over them, of sequences.
        averaged = None if output is None or weights.ndim <= output.ndim else False
    maps = weight_maps(weights, None if moved is None else moved.weights, names, averaged=averaged)
    if moved is not None and moved.output is not None:
        title = "Differences from the unedited output: queries × width"
        by_head = names.by_head or moved.output.ndim == 4
        maps.append(maps_of(moved.output, title, averaged=False if by_head else None, signed=True))
    return html_of(maps)


def weights_html(reply: WeightsReply) -> str | None:
    """Maps of weights, and of what edits change about them and their statistics."""
    moved, averaged = reply.differences, reply.weights is not None and reply.weights.ndim - reply.queries.ndim == 2
    maps = weight_maps(
        reply.weights, None if moved is None else moved.weights, reply.request_names, averaged=averaged,
        implicit=reply.implicit is True,
    )  # fmt: skip
    return html_of(maps if moved is None else maps + _statistic_maps(moved.statistics))


def _statistic_maps(differences: HeadStatistics) -> list[Maps]:
    """A map of sequences × heads for the differences of each statistic."""
    statistics = {name: np.atleast_2d(x) for name, x in named(differences).items()}
    if not statistics:
        return []
    values = np.stack(list(statistics.values()))
    rows = [f"sequence {at}" for at in range(values.shape[1])]
    columns = [head_name(None, at) for at in range(values.shape[2])]
    return [Maps(values, list(statistics), rows, columns, "Differences of the statistics", "Statistic", signed=True)]


def attribution_html(reply: AttributionReply) -> str | None:
    """Maps of attributions to pairs of tokens."""
    maps = []
    for name, merged in _OF_PAIRS.items():
        for attributions, about in ((reply, ""), (reply.differences, "differences of ")):
            values = getattr(attributions, name, None)
            if values is not None:
                title = f"{about}{name.replace('_', ' ')}".capitalize()
                signed = bool(about) or name in SIGNED_METHODS
                look: dict[str, Any] = {"averaged": bool(merged), "merged": merged, "signed": signed}
                maps.append(maps_of(values, title, reply.request_names, **look))
    return html_of(maps)


def recorded_html(reply: RecordingStatistics) -> str | None:
    """Maps of layers × heads, one a statistic."""
    return html_of(statistic_maps([(attention.name, named(attention.statistics)) for attention in reply.attentions]))


def complexity_html(reply: ComplexityReply) -> str:
    """A table of the costs, a row for each size of the sweep and each alternative."""
    sweep = reply.request_names.sweep
    varied = [f"{sweep.dimension} {value}" for value in sweep.values] if sweep is not None else []
    rows = [
        (series.label, varied[at] if at < len(varied) else "", series.costs[at].kernel,
         f"{series.costs[at].executed_flops:.3g}", f"{series.costs[at].peak_bytes.request / 1024**2:.4g}",
         f"{series.costs[at].predicted_ms:.3g}")
        for series in reply.series
        for at in range(len(series.costs))
    ]  # fmt: skip
    growth = f"{reply.device_name}: time {reply.growth.time_order}, memory {reply.growth.memory_order}"
    return table_html(growth, ("", "size", "kernel", "FLOPs", "peak MiB", "predicted ms"), rows)
