"""The cells of a map: whole rectangles of pixels in a PNG, without seams in an SVG."""

import io

import numpy as np
import pytest
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from PIL import Image

from attention_pictures.cells import draw_cells


def board(**saved):
    """The file of a chess board of 7 × 9 cells without a frame."""
    figure, file = Figure(figsize=(3.1, 2.3)), io.BytesIO()
    axes = figure.add_axes((0, 0, 1, 1))
    draw_cells(axes, np.indices((7, 9)).sum(0) % 2.0, Normalize(0, 1), ListedColormap(["#0000ff", "#ff0000"]), total=63)
    axes.axis("off")
    figure.savefig(file, **saved)
    return file


@pytest.mark.sampled(dpi=2)
@pytest.mark.parametrize(
    "dpi", [100, 150, pytest.param(200, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.slow)]
)
def test_every_cell_of_a_png_is_a_whole_rectangle(dpi):
    pixels = np.asarray(Image.open(board(format="png", dpi=dpi)).convert("RGB"))
    red = pixels[..., 0] > 128
    np.testing.assert_array_equal(red, red[:, :1] ^ red[:1] ^ red[0, 0])
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) == 2


def test_the_cells_of_an_svg_cover_their_seams():
    drawn = board(format="svg").getvalue().decode()
    assert "stroke: #ff0000" in drawn
