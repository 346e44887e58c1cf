"""The grids of patches that an image processor makes of an image, and the pixels that each patch shows.

The processor itself is asked: a picture whose colours are its own coordinates goes the way of the image through resize,
crop, tiles and padding, and the coordinates that come out tell where each pixel came from. So this holds for every
processor, without a word about any.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

_TOP: Final = 254
"""The largest colour that stands for a coordinate, so that the dither stays below 256."""
_INSIDE: Final = 250
"""The least blue of a pixel that came from the image; padding has less."""
_GOLDEN: Final = 0.6180339887498949
Floats = NDArray[np.float64]
Rectangle = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels of the image."""


class Patch(NamedTuple):
    """One patch of an image that is a token."""

    image: int
    crop: int
    row: int
    column: int
    rectangle: Rectangle | None
    """None for a patch of padding."""


class Axis(NamedTuple):
    """A line that leads from the patches of a crop to pixels of the image, along one side."""

    start: float
    """The pixel at which patch 0 begins."""
    step: float
    """Pixels of the image in one patch."""
    size: int
    """Pixels of the image along this side."""

    def edges(self, patch: int) -> tuple[float, float] | None:
        """The first and the last pixel of a patch that are in the image; None if none is."""
        low, high = (min(max(self.start + self.step * index, 0.0), self.size) for index in (patch, patch + 1))
        return (round(low, 1), round(high, 1)) if high - low > 0.02 * self.step else None


@dataclass(frozen=True)
class Crop:
    """One picture that the processor makes of an image, as a grid of patches."""

    rows: int
    columns: int
    x: Axis | None
    """None for a picture that shows nothing of the image."""
    y: Axis | None

    def merged(self, times: int) -> "Crop":
        """The same with squares of so many patches a side merged."""
        x, y = (axis and axis._replace(step=axis.step * times) for axis in (self.x, self.y))
        return replace(self, rows=self.rows // times, columns=self.columns // times, x=x, y=y)

    def patches(self, image: int, crop: int) -> list[Patch]:
        """The patches, row by row."""
        return [
            Patch(image, crop, row, column, self._rectangle(row, column))
            for row in range(self.rows)
            for column in range(self.columns)
        ]

    def _rectangle(self, row: int, column: int) -> Rectangle | None:
        across, down = self.x and self.x.edges(column), self.y and self.y.edges(row)
        return None if across is None or down is None else (across[0], down[0], across[1], down[1])


def crops_of(
    processor: Callable[..., Any], width: int, height: int, patch: tuple[int, int], merge: int = 1
) -> list[Crop]:
    """The crops that a processor makes of an image of this size.

    ``patch``: height and width of the model's patches; ``merge``: patches along a side of the squares in which the
    processor puts them in order, if it makes rows of patches.
    """
    picture = Image.fromarray(_coordinates(width, height))
    made: Mapping[str, Any] = processor(images=[picture], do_rescale=False, do_normalize=False, return_tensors="pt")
    return [_crop(crop_picture, width, height, patch) for crop_picture in pictures(made, patch, merge)]


def pictures(made: Mapping[str, Any], patch: tuple[int, int], merge: int) -> list[Floats]:
    """The pictures ``[3, height, width]`` in what a processor made of one image."""
    values: Tensor = made["pixel_values"].detach().double().cpu()
    down, across = patch
    if "image_grid_thw" in made:  # rows of merged squares of patches, each [3, frames, height, width]
        _, rows, columns = made["image_grid_thw"][0].tolist()
        split = values.view(rows // merge, columns // merge, merge, merge, 3, -1, down, across)[:, :, :, :, :, 0]
        values = split.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * down, columns * across)
    elif "spatial_shapes" in made:  # rows of patches, each [height, width, 3]
        rows, columns = made["spatial_shapes"][0].tolist()
        split = values[0, : rows * columns].view(rows, columns, down, across, 3)
        values = split.permute(4, 0, 2, 1, 3).reshape(1, 3, rows * down, columns * across)
    values = values.flatten(0, -4)
    return [value.numpy() for value in values]


def _coordinates(width: int, height: int) -> NDArray[np.uint8]:
    """A picture ``[height, width, 3]``: red grows with x, green with y, and blue is full.

    A dither carries the fractions of a colour, of which there are only 255.
    """
    x, y = np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32)
    across = (x + 0.5) / width * _TOP + (y * _GOLDEN % 1)[:, None]
    down = ((y + 0.5) / height * _TOP)[:, None] + (x * _GOLDEN % 1)
    return np.stack([across, down, np.full_like(across, 255)], -1).astype(np.uint8)


def _crop(picture: Floats, width: int, height: int, patch: tuple[int, int]) -> Crop:
    down, across = patch
    inside = picture[2] > _INSIDE
    rows, columns = (_middle(inside.any(axis)) for axis in (1, 0))
    x = y = None
    if rows is not None and columns is not None:
        x = _axis(picture[0, rows, columns].mean(0), columns.start, width, across)
        y = _axis(picture[1, rows, columns].mean(1), rows.start, height, down)
    return Crop(picture.shape[1] // down, picture.shape[2] // across, x, y)


def _middle(inside: NDArray[np.bool_]) -> slice | None:
    """The places that are inside, without the edges, at which resizing repeats pixels."""
    inner = np.flatnonzero(inside)
    if len(inner) < 2:
        return None
    edge = len(inner) // 8
    return slice(int(inner[0]) + edge, int(inner[-1]) + 1 - edge)


def _axis(colours: Floats, first: int, size: int, patch: int) -> Axis:
    """Fit the line from places of a picture to pixels of the image. ``first``: the place of the first colour."""
    step, start = np.polynomial.Polynomial.fit(first + np.arange(len(colours)) + 0.5, colours, 1).convert().coef[::-1]
    pixel = size / _TOP
    return Axis(float(start) * pixel, float(step) * pixel * patch, size)


def patch_name(patch: Patch, images: int, *, crops: bool = False) -> str:
    """A patch for reading: ``[row,column]``, with the image before and the crop behind it where there are several."""
    image, crop = f"{patch.image}:" if images > 1 else "", f"/{patch.crop}" if crops else ""
    return f"[{image}{patch.row},{patch.column}]{crop}"


def patch_labels(patches: Sequence[Patch | None]) -> dict[str, Any]:
    """The fields of labels that tell which patches tokens are."""
    return {
        "patches": [patch and (patch.image, patch.row, patch.column) for patch in patches],
        "crops": [None if patch is None else patch.crop for patch in patches],
        "rectangles": [patch and patch.rectangle for patch in patches],
    }
