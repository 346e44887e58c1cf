"""Figures of what each head has of each pair of tokens: weights and attributions, their differences and statistics."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import Names, head_name, heading
from attention_contract.schemas.analyses.attribution import SIGNED_METHODS, AttributionReply, Attributions
from attention_contract.schemas.model_requests import LayerWeights
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.schemas.weights import HeadStatistics, WeightsReply
from attention_pictures.colour_ranges import scale_of
from attention_pictures.figure_style import spaced
from attention_pictures.heat_maps import heat_maps
from attention_pictures.pooled_cells import Numbers
from attention_pictures.statistic_maps import head_table
from attention_pictures.statistic_tables import named
from attention_pictures.token_lines import token_lines

_MAPS = {"gradient_attention": 3, "integrated": 3, "norm": 3, "relevance": 2, "norm_of_sum": 2}
"""The dimensions of an attribution to pairs of tokens, of one sequence."""


def weights_figure(reply: WeightsReply | LayerWeights, options: PictureOptions, names: Names) -> Figure:
    """Draw weights or their statistics; with ``compare``, what the edits change."""
    differences = reply.differences
    signed, found = differences is not None, differences or reply
    sequence = sequence_of(options, len(reply.queries) if np.ndim(reply.queries) else None)
    if options.view == "statistics":
        tables = statistics_of(found.statistics, sequence)
        count = len(next(iter(tables.values())))
        title = heading(names, "differences of statistics" if signed else "statistics", f"{count} heads")
        heads = [head_name(names.layer, head) for head in range(count)]
        return head_table(tables, heads, title, options, signed=signed)
    values = found.pooled if found.weights is None else found.weights
    if values is None:
        raise InvalidRequest.at("return_weights", "a picture of weights needs them; leave it true")
    implicit = reply.implicit is True
    about = "differences from the unedited weights" if signed else "implicit weights" if implicit else "weights"
    weights = values if sequence is None else values[sequence]
    chosen = reply.chosen if isinstance(reply, LayerWeights) and found.weights is not None else None
    if chosen is not None and options.view != "lines":
        weights = np.where(chosen if sequence is None else chosen[sequence], weights, np.nan)  # drawn as no value
        about += " of the keys that each query may look at"
    quantity = "difference" if signed else "weight"
    return _maps(weights, about, options, names, signed=signed or implicit, quantity=quantity)


def attribution_figure(reply: AttributionReply, options: PictureOptions, names: Names) -> Figure:
    """Draw the attribution of the first method that the reply has; of heads alone, a table."""
    found: Attributions = reply.differences or reply
    method = next((name for name in Attributions.model_fields if getattr(found, name) is not None), "")
    if names.method is not None:
        method = names.method
    values, compared = getattr(found, method), reply.differences is not None
    signed = compared or method in SIGNED_METHODS
    about = f"differences of {spaced(method)}" if compared else spaced(method)
    if options.view == "statistics" or method not in _MAPS:
        if method in _MAPS:
            raise InvalidRequest.at("view", f"{method} has no statistics; expected heads, head or lines")
        chosen = values if values.ndim == 1 else values[sequence_of(options, len(values))]
        heads = [head_name(names.layer, head) for head in range(len(chosen))]
        return head_table({method: chosen}, heads, heading(names, about, f"{len(heads)} heads"), options, signed=signed)
    batched = values.ndim > _MAPS[method]
    sequence = sequence_of(options, len(values) if batched else None)
    chosen = values if sequence is None else values[sequence]
    return _maps(chosen, about, options, names, signed=signed, quantity=spaced(method))


def _maps(values: Numbers, about: str, options: PictureOptions, names: Names, *, signed: bool, quantity: str) -> Figure:
    """Draw ``[H, Lq, Lk]`` or ``[Lq, Lk]`` of one sequence in the view that the options name."""
    one = values.ndim == 2
    maps = np.asarray(values[None] if one else values, np.float32)
    heads = list(range(len(maps))) if names.heads is None or one else list(names.heads)
    look: dict[str, Any] = {"keys": names.keys, "queries": names.queries, "signed": signed, "pooled": names.pool}
    look |= {"scale": scale_of(options.scale, maps.shape[-1] * names.pool), "ranged": maps}
    rows, columns = names.sizes or (maps.shape[-2] * names.pool, maps.shape[-1] * names.pool)
    sizes = f"{rows} queries × {columns} keys"
    if options.view in {"head", "lines"} or len(maps) == 1:
        at = 0 if one else _place(heads, options.head)
        head = "mean of the heads" if names.averaged else "" if one else head_name(names.layer, heads[at])
        title = heading(names, about, head, sizes)
        if options.view == "lines":
            return token_lines(maps[at], title, options, **look)
        return heat_maps(maps[at : at + 1], [""], title, options, quantity=quantity, **look)
    titles = [head_name(names.layer, head) for head in heads]
    title = heading(names, about, f"{len(maps)} heads", sizes)
    return heat_maps(maps, titles, title, options, quantity=quantity, **look)


def statistics_of(found: HeadStatistics, sequence: int | None) -> dict[str, Numbers]:
    """The statistics ``[H]`` of one sequence by name; those of classes by the class."""
    numbers = {
        name: np.atleast_1d(values if sequence is None else values[sequence]) for name, values in named(found).items()
    }
    if not numbers:
        raise InvalidRequest.at("statistics", "expected at least one to draw")
    return numbers


def sequence_of(options: PictureOptions, batch: int | None) -> int | None:
    """The sequence to draw; None if there is no batch dimension."""
    if options.sequence >= (batch or 1):
        raise InvalidRequest.at(
            "sequence", f"there is no sequence {options.sequence}; the batch has {batch or 1}, counted from 0"
        )
    return None if batch is None else options.sequence


def _place(heads: Sequence[int], head: int | None) -> int:
    if head is None:
        return 0
    if head not in heads:
        shown = ", ".join(map(str, heads[:16])) + (", …" if len(heads) > 16 else "")
        raise InvalidRequest.at("head", f"the reply has no head {head}; it has {shown}")
    return heads.index(head)
