"""Weights as a figure of matplotlib, a heat map a head."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.tensors import Array
from attention_pictures.figure_style import styled
from attention_pictures.heat_maps import heat_maps


def draw(weights: Array, titles: Sequence[str], heading: str, queries: Sequence[str], keys: Sequence[str]) -> Figure:
    """Draw ``weights [H, Lq, Lk]`` with a title for each head, and labels of their queries and keys."""
    options = PictureOptions()
    with styled(options.theme):
        return heat_maps(np.asarray(weights, np.float32), titles, heading, options, keys=keys, queries=queries)
