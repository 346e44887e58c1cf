"""Weights of a recording as a figure of matplotlib."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from attention_contract.drawing import styled
from attention_contract.drawing.heat_maps import heat_maps
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.picture_options import PictureOptions

if TYPE_CHECKING:
    from attention_client.recording.recorded import Recording


def draw(recording: "Recording", layer: str | int, head: int | None) -> Figure:
    """Draw a heat map for each head, or for one of them. Raises InvalidRequest for a layer that is not there."""
    name = layer if isinstance(layer, str) and not layer.isdecimal() else f"layers.{layer}"
    attention = recording.facts.attention(name)
    if attention is None:
        raise InvalidRequest(f"layer: the recording has no attention {name!r}", param="layer")
    weights = np.asarray(recording.read(layer, heads=head), np.float32)
    queries, keys = recording.tokens(layer)
    titles = attention.heads if head is None else [attention.heads[head]]
    options = PictureOptions()
    with styled(options.theme):
        return heat_maps(weights, titles, f"{recording.facts.model} · {name}", options, keys=keys, queries=queries)
