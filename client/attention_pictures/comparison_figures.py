"""Figures over several heads or layers: similarity of every pair, effects of the edits of a sweep, rollout."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import OF_REPLY, Names, head_name, heading, layer_name, token_name
from attention_contract.schemas.analyses.effects import EffectsReply
from attention_contract.schemas.analyses.model_effects import ModelEffectsReply
from attention_contract.schemas.analyses.rollout import RecordingRollout, RolloutReply
from attention_contract.schemas.analyses.similarity import ComparedPart, RecordingSimilarity, SimilarityReply
from attention_contract.schemas.picture_options import PictureOptions
from attention_pictures.heat_maps import heat_maps
from attention_pictures.pooled_cells import Numbers
from attention_pictures.statistic_maps import head_table
from attention_pictures.token_labels import labels_in_place, numbered
from attention_pictures.token_lines import token_lines
from attention_pictures.weight_figures import sequence_of

_MEASURES = {"jensen_shannon": "divergence in nats", "cka": "linear CKA"}
_SINGULAR = {
    "layers": "layer", "heads": "head", "queries": "query", "keys": "key", "scales": "scale", "from": "from",
    "to": "to",
}  # fmt: skip
_MOST_NAMED = 3
"""Layers that a heading lists."""


def similarity_figure(reply: SimilarityReply, options: PictureOptions, names: Names) -> Figure:
    """Draw ``values [A, B]``; rows and columns are heads or layers."""
    rows = columns = None
    rules: tuple[list[int], list[int]] = [], []
    axes_names = ("a", "b")
    if isinstance(reply, RecordingSimilarity):
        rows, columns = [_part(one) for one in reply.rows], [_part(one) for one in reply.columns]
        rules = _new_layers(reply.rows), _new_layers(reply.columns)
        axes_names = ("head", "head") if any(one.head for one in reply.rows) else ("layer", "layer")
    quantity = _MEASURES[reply.measure]
    sizes = f"{reply.values.shape[0]} × {reply.values.shape[1]}"
    return heat_maps(
        np.asarray(reply.values, np.float32)[None], [""], heading(names, f"similarity: {quantity}", sizes), options,
        queries=rows, keys=columns, axes_names=axes_names, quantity=quantity, rules=rules,
    )  # fmt: skip


def _new_layers(parts: Sequence[ComparedPart]) -> list[int]:
    """The heads at which another layer begins; none if each layer is one part."""
    begins = [at for at, (one, after) in enumerate(pairwise(parts), 1) if one.layer != after.layer]
    return [] if len(begins) == len(parts) - 1 else begins


def _part(part: ComparedPart) -> str:
    return part.layer if part.head is None else f"{part.layer} {part.head}"


def effects_figure(reply: EffectsReply, options: PictureOptions, names: Names) -> Figure:
    """Draw the effect of each edit: one swept axis as a table, two as a map of ‖Δ‖ / ‖output‖."""
    swept, effects = reply.swept, reply.effects
    batched = effects.norm.ndim > len(swept)
    sequence = sequence_of(options, len(effects.norm) if batched else None)
    measures = {
        name: values if sequence is None else values[sequence]
        for name in type(effects).model_fields
        if (values := getattr(effects, name)) is not None
    }
    return _swept_figure(swept, measures, "relative", "relative change of the output", options, names)


def model_effects_figure(reply: ModelEffectsReply, options: PictureOptions, names: Names) -> Figure:
    """Draw the effect of each edit or path on a prediction: one swept axis as a table, two as a map of the change."""
    effects = reply.effects
    batched = effects.value.ndim > len(reply.swept)
    sequence = sequence_of(options, len(effects.value) if batched else None)
    every = {"value": effects.value, "divergence": effects.divergence}
    measures = {name: x if sequence is None else x[sequence] for name, x in every.items() if x is not None}
    tokens = reply.token_names or []
    token = tokens[min(sequence or 0, len(tokens) - 1)] if tokens else ""
    measured = names.measured.replace(OF_REPLY, token.strip() or repr(token))
    if not measured or (OF_REPLY in names.measured and not token):
        measured = "the measured number"
    quantity = f"change of {measured}" + (", nats" if "log p" in measured else "")
    columns = {{"value": quantity, "divergence": "divergence, nats"}[name]: x for name, x in measures.items()}
    swept: dict[str, list[Any]] = {axis: list(indices) for axis, indices in reply.swept.items()}
    words = _words(reply, sequence, names.keys)
    positions = options.token_positions or ("repeated" if names.keys is None else "none")
    return _swept_figure(
        swept, columns, quantity, quantity, options, names, signed=True, tokens=numbered(words, positions)
    )


def _words(reply: ModelEffectsReply, sequence: int | None, labels: Sequence[str] | None) -> Sequence[str] | None:
    """The tokens that are queries and keys, or the labels in their place; None if layers have different tokens."""
    if reply.encoder_labels is None and reply.key_labels is None:
        tokens = reply.labels_of(sequence or 0).tokens
        return labels_in_place([token.strip() or repr(token) for token in tokens], labels)
    places: list[Any] = [place for axis in reply.swept.keys() & {"queries", "keys"} for place in reply.swept[axis]]
    count = 1 + max((index for place in places for index in np.atleast_1d(place)), default=-1)
    if labels is not None and len(labels) < count:
        raise InvalidRequest.at("labels", f"expected {count} labels, one for each token; got {len(labels)}")
    return labels


def _swept_figure(
    swept: Mapping[str, Sequence[Any]], measures: Mapping[str, Numbers], chief: str, quantity: str,
    options: PictureOptions, names: Names, *, signed: bool = False, tokens: Sequence[str] | None = None,
) -> Figure:  # fmt: skip
    """Draw the measures of a sweep over one axis, or the chief one of two. ``tokens``: those of queries and keys."""
    axes = list(swept)
    if len(axes) > 2:
        raise InvalidRequest.at("sweep.over", f"a picture shows one or two swept axes, got {len(axes)}; sweep fewer")
    labels = [[_swept(axis, index, tokens) for index in swept[axis]] for axis in axes]
    if len(axes) == 1:
        rows = [name if axes[0] in {"heads", "layers"} else f"{_SINGULAR[axes[0]]} {name}" for name in labels[0]]
        title = heading(names, f"effects of edits over {axes[0]}")
        return head_table(measures, rows, title, options, signed=signed, rows_name="edit")
    return heat_maps(
        np.asarray(measures[chief], np.float32)[None], [""], heading(names, f"effects over {' × '.join(axes)}"),
        options,
        queries=labels[0], keys=labels[1], axes_names=(_SINGULAR[axes[0]], _SINGULAR[axes[1]]), quantity=quantity,
        signed=signed,
    )  # fmt: skip


def _swept(axis: str, index: Any, tokens: Sequence[str] | None) -> str:
    """The name of one index: of a head, a token, a layer, or a group of tokens."""
    if axis == "heads":
        return head_name(None, index)
    if axis == "layers":
        return layer_name(index)
    if axis == "scales":
        return f"{index:g}"
    return token_name(index, tokens) if axis in {"queries", "keys"} else str(index)


def _layers(names: Sequence[str]) -> str:
    """The layers of a rollout by their names: all of a few, else the first and the last."""
    if len(names) <= _MOST_NAMED:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]} ({len(names)} layers)"


def rollout_figure(reply: RolloutReply, options: PictureOptions, names: Names) -> Figure:
    """Draw the share that each traced token has from each input, as a map or as lines."""
    keys, queries, layers = names.keys, names.queries, ""
    if isinstance(reply, RecordingRollout):
        keys, layers = reply.tokens, _layers(reply.layers)
        if queries is None and len(reply.values) == len(keys):
            queries = keys
        elif queries is not None:
            queries = [keys[int(row)] for row in queries]
    about = names.method or "rollout"
    title = heading(names, about, layers, f"{reply.values.shape[0]} tokens × {reply.values.shape[1]} inputs")
    values = np.asarray(reply.values, np.float32)
    if options.view == "lines":
        return token_lines(
            values, title, options, keys=keys, queries=queries, axes_names=("token", "input"),
            quantity=f"share of each input ({about})",
        )  # fmt: skip
    return heat_maps(
        values[None], [""], title, options,
        keys=keys, queries=queries, axes_names=("token", "input"), quantity=f"share of each input ({about})",
    )  # fmt: skip
