"""Cells of a map: rectangles where they are few, an image where they are many."""

from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import QuadMesh
from matplotlib.colors import Normalize

from attention_pictures.pooled_cells import Numbers

MOST_RECTANGLES: Final = 4096
"""Cells of a picture that are rectangles: at most 1 MB of SVG. Some programs blur the cells of an image."""
_SEAM_POINTS: Final = 0.5
"""The width of a cell's edge in its own colour, without which programs show the background between two cells."""


class Cells(QuadMesh):
    """Cells whose edges cover the seams of a vector picture.

    The cells of a raster meet at whole pixels without them; an edge would cut a pixel off the corners.
    """

    def draw(self, renderer: Any) -> None:
        """Draw the cells, with edges unless they become pixels."""
        self.set_linewidth(0 if isinstance(renderer, RendererAgg) else _SEAM_POINTS)
        super().draw(renderer)


def draw_cells(
    axes: Axes, cells: Numbers, norm: Normalize, colours: Any, *, total: int,
    place: tuple[float, float, float, float] | None = None,
) -> ScalarMappable:  # fmt: skip
    """Draw ``cells [rows, columns]``, the first row above. ``total``: the cells of all maps of the picture.

    ``place``: left, top, width and height of one of several maps of the axes; by default it is all of them.
    """
    rows, columns = cells.shape
    left, top, width, height = place or (-0.5, -0.5, columns, rows)
    if total > MOST_RECTANGLES:
        extent = (left, left + width, top + height, top)
        return axes.imshow(cells, norm=norm, cmap=colours, interpolation="none", aspect="auto", extent=extent)
    across, down = left + np.arange(columns + 1) * (width / columns), top + np.arange(rows + 1) * (height / rows)
    corners = np.stack(np.meshgrid(across, down), axis=-1)
    drawn = Cells(corners, array=np.ma.masked_invalid(cells), norm=norm, cmap=colours, edgecolors="face")
    axes.add_collection(drawn)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    return drawn
