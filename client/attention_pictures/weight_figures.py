"""Figures of what each head has of each pair of tokens: weights and attributions, their differences and statistics."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
from attention_pictures.token_labels import numbered
from attention_pictures.token_lines import token_lines

Tokens = tuple[Sequence[str], Sequence[str]]
"""The tokens of an attention: those that are its queries, and those that are its keys."""

_MAPS = {"gradient_attention": 3, "integrated": 3, "norm": 3, "relevance": 2, "norm_of_sum": 2}
"""The dimensions of an attribution to pairs of tokens, of one sequence."""


def weights_figure(
    reply: WeightsReply | LayerWeights, options: PictureOptions, names: Names, tokens: Tokens | None = None
) -> Figure:
    """Draw weights or their statistics; with ``compare``, what the edits change. ``tokens``: of queries and of keys."""
    differences = reply.differences
    signed, shown = differences is not None, differences or reply
    sequence = sequence_of(options, len(reply.queries) if np.ndim(reply.queries) else None)
    if options.view == "statistics":
        tables = statistics_of(shown.statistics, sequence)
        count = len(next(iter(tables.values())))
        title = heading(names, "differences of statistics" if signed else "statistics", f"{count} heads")
        heads = [head_name(names.layer, head) for head in range(count)]
        return head_table(tables, heads, title, options, signed=signed)
    weights = drawn_weights(reply, sequence, hides=options.view != "lines")
    _, keys = tokens or (None, None)
    if keys is not None and names.keys is not None and len(names.keys) != len(keys) and names.columns is None:
        raise InvalidRequest.at("labels", f"expected {len(keys)} labels, one for each key; got {len(names.keys)}")
    names = labelled(names, options, tokens)
    return _maps(weights.values, weights.about, options, names, signed=weights.signed, quantity=weights.quantity(names))


class DrawnWeights(NamedTuple):
    """The weights of one attention, or what changes about them, as they are drawn."""

    values: Numbers
    """``[H, Lq, Lk]``, or ``[Lq, Lk]`` of averaged ones; NaN is drawn as no value."""
    about: str
    noun: str
    """The name of one of the numbers."""
    signed: bool

    def quantity(self, names: Names) -> str:
        """The label of the numbers' colours."""
        return f"{self.noun}, {names.averaged_over}" if names.averaged else self.noun


def drawn_weights(reply: WeightsReply | LayerWeights, sequence: int | None, *, hides: bool = True) -> DrawnWeights:
    """The weights of one sequence; with ``compare``, their differences. Raises InvalidRequest if there are none.

    ``hides``: keys that were not looked at have no value.
    """
    shown = reply.differences or reply
    values = shown.pooled if shown.weights is None else shown.weights
    if values is None:
        raise InvalidRequest.at("return_weights", "a picture of weights needs them; leave it true")
    implicit, compared = reply.implicit is True, shown is not reply
    noun = "implicit weight" if implicit else "attention weight"
    about = "implicit weights" if implicit else "weights"
    if compared:
        of = "the base's" if isinstance(reply, LayerWeights) and reply.base is not None else "the unedited"
        about, noun = f"differences from {of} weights", f"change of the {noun}"
    weights = values if sequence is None else values[sequence]
    chosen = reply.chosen if isinstance(reply, LayerWeights) and shown.weights is not None else None
    if chosen is not None and hides:
        weights = np.where(chosen if sequence is None else chosen[sequence], weights, np.nan)
        about += " of the keys that each query may look at"
    return DrawnWeights(np.asarray(weights, np.float32), about, noun, implicit or compared)


def labelled(names: Names, options: PictureOptions, tokens: Tokens | None = None) -> Names:
    """The names with the labels of the returned queries and keys as they are drawn, with positions if so.

    ``tokens``: those of the queries and of the keys, where the request gives no labels.
    """
    queries, keys = tokens or (None, None)
    whole = names if queries is None or keys is None else names.of_tokens(queries, keys)

    def drawn(labels: Sequence[str] | None, own: Sequence[str] | None, chosen: Sequence[int] | None) -> Any:
        return numbered(labels, options.token_positions or ("repeated" if labels is own else "none"), chosen)

    of = drawn(whole.queries, queries, names.rows), drawn(whole.keys, keys, names.columns)
    return replace(whole, queries=of[0], keys=of[1], rows=None, columns=None)


def attribution_figure(reply: AttributionReply, options: PictureOptions, names: Names) -> Figure:
    """Draw the attribution of the first method that the reply has; of heads alone, a table."""
    attributions: Attributions = reply.differences or reply
    method = next((name for name in Attributions.model_fields if getattr(attributions, name) is not None), "")
    if names.method is not None:
        method = names.method
    values, compared = getattr(attributions, method), reply.differences is not None
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
    quantity = f"change of {spaced(method)}" if compared else spaced(method)
    return _maps(chosen, about, options, labelled(names, options), signed=signed, quantity=quantity)


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
        head = names.averaged_over if names.averaged else "" if one else head_name(names.layer, heads[at])
        quantity += f", {head}" if head and not names.averaged else ""
        title = heading(names, about, head, sizes)
        if options.view == "lines":
            return token_lines(maps[at], title, options, quantity=quantity, **look)
        return heat_maps(maps[at : at + 1], [""], title, options, quantity=quantity, **look)
    titles = [head_name(names.layer, head) for head in heads]
    title = heading(names, about, f"{len(maps)} heads", sizes)
    return heat_maps(maps, titles, title, options, quantity=quantity, **look)


def statistics_of(statistics: HeadStatistics, sequence: int | None) -> dict[str, Numbers]:
    """The statistics ``[H]`` of one sequence by name; those of classes by the class."""
    numbers = {
        name: np.atleast_1d(values if sequence is None else values[sequence])
        for name, values in named(statistics).items()
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
