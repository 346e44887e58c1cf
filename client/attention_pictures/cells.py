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


class _Cells(QuadMesh):
    """Cells whose edges cover the seams of a vector picture.

    The cells of a raster meet at whole pixels without them; an edge would cut a pixel off the corners.
    """

    def draw(self, renderer: Any) -> None:
        """Draw the cells, with edges unless they become pixels."""
        self.set_linewidth(0 if isinstance(renderer, RendererAgg) else _SEAM_POINTS)
        super().draw(renderer)


def draw_cells(axes: Axes, cells: Numbers, norm: Normalize, colours: Any, *, total: int) -> ScalarMappable:
    """Draw ``cells [rows, columns]``, the first row above. ``total``: the cells of all maps of the picture."""
    if total > MOST_RECTANGLES:
        return axes.imshow(cells, norm=norm, cmap=colours, interpolation="none", aspect="auto")
    rows, columns = cells.shape
    corners = np.stack(np.meshgrid(np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5), axis=-1)
    drawn = _Cells(corners, array=np.ma.masked_invalid(cells), norm=norm, cmap=colours, edgecolors="face")
    axes.add_collection(drawn)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    return drawn
