"""Figures over several heads or layers: similarity of every pair, effects of the edits of a sweep, rollout."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure

from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import Names, head_name, heading
from attention_contract.schemas.analyses.effects import EffectsReply
from attention_contract.schemas.analyses.rollout import RecordingRollout, RolloutReply
from attention_contract.schemas.analyses.similarity import ComparedPart, RecordingSimilarity, SimilarityReply
from attention_contract.schemas.picture_options import PictureOptions
from attention_pictures.heat_maps import heat_maps
from attention_pictures.statistic_maps import head_table
from attention_pictures.token_lines import token_lines
from attention_pictures.weight_figures import sequence_of

_MEASURES = {"jensen_shannon": "divergence in nats", "cka": "linear CKA"}
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
    found = [at for at, (one, after) in enumerate(pairwise(parts), 1) if one.layer != after.layer]
    return [] if len(found) == len(parts) - 1 else found


def _part(part: ComparedPart) -> str:
    return part.layer if part.head is None else f"{part.layer} {part.head}"


def effects_figure(reply: EffectsReply, options: PictureOptions, names: Names) -> Figure:
    """Draw the effect of each edit: one swept axis as a table, two as a map of ‖Δ‖ / ‖output‖."""
    swept, effects = reply.swept, reply.effects
    batched = effects.norm.ndim > len(swept)
    sequence = sequence_of(options, len(effects.norm) if batched else None)
    found = {
        name: values if sequence is None else values[sequence]
        for name in type(effects).model_fields
        if (values := getattr(effects, name)) is not None
    }
    axes = list(swept)
    if len(axes) == 1:
        labels = [_swept(axes[0], index) for index in swept[axes[0]]]
        return head_table(found, labels, heading(names, f"effects of edits over {axes[0]}"), options, rows_name="edit")
    if len(axes) > 2:
        raise InvalidRequest.at("sweep.over", f"a picture shows one or two swept axes, got {len(axes)}; sweep fewer")
    rows, columns = ([head_name(None, n) if axis == "heads" else str(n) for n in swept[axis]] for axis in axes)
    singular = {"heads": "head", "queries": "query", "keys": "key"}
    return heat_maps(
        np.asarray(found["relative"], np.float32)[None], [""], heading(names, f"effects over {' × '.join(axes)}"),
        options, queries=rows, keys=columns, axes_names=(singular[axes[0]], singular[axes[1]]),
        quantity="relative change of the output",
    )  # fmt: skip


def _swept(axis: str, index: int) -> str:
    return head_name(None, index) if axis == "heads" else f"{axis.removesuffix('s')} {index}"


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
        return token_lines(values, title, options, keys=keys, queries=queries, axes_names=("token", "input"))
    return heat_maps(
        values[None], [""], title, options,
        keys=keys, queries=queries, axes_names=("token", "input"), quantity=about,
    )  # fmt: skip
