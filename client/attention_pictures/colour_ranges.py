"""Colours of numbers: palettes, and linear or logarithmic ranges that fit the numbers."""

from typing import Final

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Colormap, LinearSegmentedColormap, LogNorm, Normalize, SymLogNorm

from attention_contract.schemas.picture_options import DIVERGING, SEQUENTIAL, PictureOptions, Scale, Theme
from attention_pictures.figure_style import NO_VALUE
from attention_pictures.pooled_cells import Numbers
from attention_pictures.sign_colours import DIVERGING_SCALES

_MATPLOTLIB_NAMES: Final = {"rdbu": "RdBu_r", "puor": "PuOr_r", "brbg": "BrBG_r"}
"""Matplotlib's names, where they are others."""
_SKEWED: Final = 50
"""The ratio of the largest to the median number from which ``auto`` is logarithmic."""
_DECADES: Final = 1e-4
"""The least number that a logarithmic range tells from 0, as a share of the largest."""


def palette(options: PictureOptions, *, signed: bool = False) -> Colormap:
    """The colour map of weights, or of differences if ``signed``; by default if the palette is of the other kind."""
    name: str = "blue_orange" if signed else "viridis"
    if options.palette in (DIVERGING if signed else SEQUENTIAL):
        name = str(options.palette)
    colours = _blue_orange(options.theme) if name == "blue_orange" else colormaps[_MATPLOTLIB_NAMES.get(name, name)]
    return colours.with_extremes(bad=NO_VALUE[options.theme])


def _blue_orange(theme: Theme) -> Colormap:
    stops = [tuple(part / 255 for part in colour) for colour in DIVERGING_SCALES[theme]]
    return LinearSegmentedColormap.from_list("blue_orange", stops)


def colour_range(values: Numbers, scale: Scale, *, signed: bool = False) -> Normalize:
    """The range of colours from 0 (of differences, from −max) to the largest magnitude.

    ``auto`` is logarithmic for skewed numbers, but for differences: a small one beside a large one is to look small. A
    logarithmic range begins at the first percentile of the magnitudes above 0, and gives smaller ones its first colour.
    Of differences, it is linear below the lower quartile.
    """
    sizes = np.abs(values[np.isfinite(values)]).astype(np.float64)
    positive = sizes[sizes > 0]
    top = float(positive.max()) if positive.size else 1.0
    skewed = positive.size > 0 and float(np.median(positive)) * _SKEWED < top
    if scale == "linear" or not positive.size or (scale == "auto" and (signed or not skewed)):
        return Normalize(-top if signed else 0.0, top)
    least = max(float(np.percentile(positive, 25 if signed else 1)), top * _DECADES)
    least = min(least, top / 10)
    if signed:
        return SymLogNorm(least, vmin=-top, vmax=top, base=10)
    return LogNorm(least, top, clip=True)


def scale_of(scale: Scale, keys: int) -> Scale:
    """The scale of maps of so many keys, which a head alone and a grid of all heads share.

    ``auto`` is logarithmic where an even share, 1 / keys, is far below the largest possible weight.
    """
    return scale if scale != "auto" else "log" if keys > _SKEWED else "linear"


def bar_label(name: str, norm: Normalize) -> str:
    """The label of a colour bar."""
    return name if type(norm) is Normalize else f"{name} (logarithmic)"
