"""Attention over the image itself: the patches that one token looks at, head by head."""

import math
from base64 import b64decode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageOps

from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import Names, head_name, heading
from attention_contract.schemas.model_requests import LayerWeights, ModelWeightsReply
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.schemas.prompts import TokenLabelsReply
from attention_pictures.colour_ranges import bar_label, colour_range, palette
from attention_pictures.figure_style import EDGE_IN, Sheet
from attention_pictures.heat_maps import BAR_IN, MOST_HEADS, bar, bar_height, columns_of, columns_within
from attention_pictures.pooled_cells import Numbers
from attention_pictures.text_sizes import widest

_SIDE: Final = 512
"""Pixels of the longer side of the image that is drawn."""
_SINK: Final = 8
"""Times an even share that a patch takes from all queries in the mean, so that it is marked as a sink."""
_GAP_IN, _TITLE_IN = 0.14, 0.2
_PIXEL_BYTES: Final = 8
Place = tuple[slice, slice]


@dataclass(frozen=True)
class DrawnImage:
    """An image as it is drawn."""

    pixels: Numbers
    """``[height, width]``, 0 to 255."""
    scale: float
    """Drawn pixels for each pixel of the image."""


@dataclass(frozen=True)
class Panel:
    """One head over one image."""

    title: str
    pixels: Numbers
    heat: Numbers
    sinks: Sequence[tuple[float, float]]


def making_bytes(names: Names) -> int:
    """Estimate the memory in which the images of a picture are decoded."""
    return sum(_PIXEL_BYTES * math.prod(_opened(image).size) for image in names.images)


def image_figure(
    reply: ModelWeightsReply, layer: LayerWeights, sequence: int | None, options: PictureOptions, names: Names
) -> Figure:
    """Draw the weights of one query over the patches of the image, for each head. Raises InvalidRequest.

    The query is the first one selected; by default CLS, or the last token of a text; without either, their mean.
    """
    weights = np.asarray(layer.weights, np.float32)
    weights = weights if sequence is None else weights[sequence]
    weights = weights[None] if names.averaged else weights
    queries, keys = reply.tokens_of(layer.layer, sequence or 0)
    patches = keys.patches or []
    if names.columns is not None:
        raise InvalidRequest.at("select.keys", "the view image shows all patches; leave the keys out")
    if not names.images or not any(patches):
        raise InvalidRequest.at("view", "the layer sees no patches of an image; take another view")
    rows, about = _rows(weights, queries, names)
    heads = list(range(len(weights))) if names.heads is None else list(names.heads)
    shown = [heads.index(options.head)] if options.head in heads else range(len(heads))
    images = {patch[0]: _drawn(names.images[patch[0]]) for patch in patches if patch}
    panels = [(image, at) for image in sorted(images) for at in shown][:MOST_HEADS]
    whole = names.rows is None and weights.shape[1] == len(queries.tokens)
    drawn = []
    for image, at in panels:
        places = _places(images[image], keys, image)
        drawn.append(
            Panel(
                f"{'mean' if names.averaged else head_name(layer.layer, heads[at])}: {_shares(rows[at], keys, places)}",
                images[image].pixels,
                _heat(images[image], rows[at], places),
                [_middle(places[place]) for place in _sinks(weights[at], places)] if whole else [],
            )
        )
    notes = [f"× takes {_SINK} times an even share of all queries"] if any(panel.sinks for panel in drawn) else []
    return _sheet(drawn, heading(names, f"layer {layer.layer}", about), notes, options)


def _rows(weights: Numbers, queries: TokenLabelsReply, names: Names) -> tuple[Numbers, str]:
    """The weights ``[H, Lk]`` to draw, and the token that they are of."""
    if names.rows is not None:
        return weights[:, 0], f"of {queries.tokens[names.rows[0]]!r}"
    if any(queries.spans):
        return weights[:, -1], f"of {queries.tokens[len(weights[0]) - 1]!r}"
    if (queries.patches or [None])[0] is None:
        return weights[:, 0], f"of {queries.tokens[0]!r}"
    return weights.mean(1), "mean of all queries"


def _places(image: "DrawnImage", keys: TokenLabelsReply, number: int) -> dict[int, Place]:
    """The keys that are patches of an image, and the pixels of each as they are drawn."""
    place_of_key = {}
    for at, (patch, rectangle) in enumerate(zip(keys.patches or (), keys.rectangles or (), strict=True)):
        if patch is not None and patch[0] == number and rectangle is not None:
            left, top, right, bottom = (round(side * image.scale) for side in rectangle)
            place_of_key[at] = slice(top, max(bottom, top + 1)), slice(left, max(right, left + 1))
    return place_of_key


def _heat(image: "DrawnImage", row: Numbers, places: Mapping[int, Place]) -> Numbers:
    """The sum of the weights of the patches that show each pixel; NaN where none does."""
    heat = np.full(image.pixels.shape, np.nan)
    for at, place in places.items():
        heat[place] = np.nan_to_num(heat[place]) + row[at]
    return heat


def _shares(row: Numbers, keys: TokenLabelsReply, places: Collection[int]) -> str:
    """The share of the image, and of the token besides that takes most."""
    others = {at: float(row[at]) for at, patch in enumerate((keys.patches or [])[: len(row)]) if patch is None}
    largest = max(others, key=lambda at: others[at], default=None)
    rest = "" if largest is None else f", {keys.tokens[largest].strip() or '␣'} {others[largest]:.2f}"
    return f"{sum(float(row[at]) for at in places):.2f} here{rest}"


def _sinks(weights: Numbers, places: Collection[int]) -> list[int]:
    """The patches that take much more than an even share of all queries."""
    share = weights.mean(0) * weights.shape[-1]
    return [at for at in places if share[at] >= _SINK]


def _middle(place: Place) -> tuple[float, float]:
    down, across = place
    return (across.start + across.stop - 1) / 2, (down.start + down.stop - 1) / 2


def _opened(content: str) -> Image.Image:
    """Read the header alone."""
    return Image.open(BytesIO(b64decode(content)))


def _drawn(content: str) -> "DrawnImage":
    image = _opened(content)
    longest = max(image.size)
    image.draft("L", (_SIDE, _SIDE))
    turned = ImageOps.exif_transpose(image).convert("L")
    turned.thumbnail((_SIDE, _SIDE))
    return DrawnImage(np.asarray(turned, np.float64), max(turned.size) / longest)


def _sheet(panels: "Sequence[Panel]", title: str, notes: Sequence[str], options: PictureOptions) -> Figure:
    """Draw the panels in rows, with one colour bar."""
    width = options.inches
    maps_width, size = width - BAR_IN - 2 * EDGE_IN, 7 if columns_of(len(panels)) < 4 else 5
    across = columns_within(len(panels), maps_width, widest([panel.title for panel in panels], size), _GAP_IN)
    down = math.ceil(len(panels) / across)
    side = (maps_width - _GAP_IN * (across - 1)) / across
    height = side * min(max(panel.pixels.shape[0] / panel.pixels.shape[1] for panel in panels), 1.6)
    norm = colour_range(np.concatenate([panel.heat.ravel() for panel in panels]), options.scale)
    label, maps_in = bar_label("weight", norm), down * (height + _TITLE_IN) - _TITLE_IN
    tall = max(min(maps_in, 3.2), bar_height(label))
    sheet = Sheet(options, title, notes, max(maps_in, tall) + _TITLE_IN + _GAP_IN)
    colours = palette(options).with_extremes(bad=(0, 0, 0, 0))
    for at, panel in enumerate(panels):
        row, column = divmod(at, across)
        place = EDGE_IN + column * (side + _GAP_IN), _TITLE_IN + row * (height + _TITLE_IN)
        axes = sheet.axes(*place, side, height)
        axes.imshow(panel.pixels, cmap="gray", vmin=0, vmax=255, interpolation="bilinear")
        strength = np.nan_to_num(np.asarray(norm(np.nan_to_num(panel.heat)), np.float64)).clip(0, 1)
        axes.imshow(panel.heat, norm=norm, cmap=colours, interpolation="none", alpha=0.25 + 0.55 * strength)
        for x, y in panel.sinks:
            axes.plot(x, y, "x", color="#ff3b30", markersize=5, markeredgewidth=1.2)
        axes.set_title(panel.title, fontsize=size)
        axes.set_xticks([])
        axes.set_yticks([])
    bar(sheet, norm, colours, label, (_TITLE_IN, tall))
    return sheet.figure
