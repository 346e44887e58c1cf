"""Weights of a recording as a figure of matplotlib."""

import math
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from attention_contract.errors import InvalidRequest

if TYPE_CHECKING:
    from attention_client.recording.recorded import Recording

_MOST_LABELS = 48
_COLUMNS = 4


def draw(recording: "Recording", layer: str | int, head: int | None) -> Figure:
    """One heat map for each head, or for one of them. Labels are left out if there are too many."""
    weights = recording.read(layer, heads=head)
    queries, keys = recording.tokens(layer)
    labels = _head_labels(recording, layer, head)
    columns = min(_COLUMNS, len(labels))
    rows = math.ceil(len(labels) / columns)
    side = min(8.0, max(2.4, 0.22 * max(len(queries), len(keys)) + 1.2))
    figure = Figure(figsize=(side * columns, side * rows), layout="constrained")
    figure.suptitle(f"{recording.facts.model}, {layer if isinstance(layer, str) else f'layers.{layer}'}")
    most = float(weights.max(initial=0.0)) or 1.0
    for place, (label, map_) in enumerate(zip(labels, weights.astype("float32"), strict=True), 1):
        axes = figure.add_subplot(rows, columns, place)
        shown = axes.imshow(map_, vmin=0, vmax=most, cmap="Blues", interpolation="nearest", aspect="auto")
        axes.set(title=label, xlabel="key", ylabel="query")
        if max(len(queries), len(keys)) <= _MOST_LABELS:
            axes.set_xticks(range(len(keys)), [_plain(key) for key in keys], rotation=90, fontsize=7)
            axes.set_yticks(range(len(queries)), [_plain(query) for query in queries], fontsize=7)
    figure.colorbar(shown, ax=figure.axes, shrink=0.7, label="weight")
    return figure


def _plain(label: str) -> str:
    """The label as it is: matplotlib would read dollar signs as formulas."""
    return label.replace("$", r"\$")


def _head_labels(recording: "Recording", layer: str | int, head: int | None) -> list[str]:
    name = layer if isinstance(layer, str) and not layer.isdecimal() else f"layers.{layer}"
    attention = recording.facts.attention(name)
    if attention is None:
        raise InvalidRequest(f"layer: the recording has no attention {name!r}", param="layer")
    return attention.heads if head is None else [attention.heads[head]]
