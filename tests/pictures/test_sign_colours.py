"""One rule for signs: blue below 0 and orange above, in the page, in figures, in notebooks and in the terminal."""

import re
from pathlib import Path

import numpy as np
import pytest
from rich.color import Color

from attention_client.cli.commands.context_commands import _style
from attention_contract.schemas.picture_options import PictureOptions
from attention_pictures.notebook.html_tables import tokens_html
from attention_pictures.notebook.notebook_maps import Maps
from attention_pictures.sign_colours import DIVERGING_SCALES, NEGATIVE, POSITIVE

PAGE = Path(__file__).parents[2] / "web/src/drawing"


def is_blue(red, green, blue):
    return blue > red


def from_oklab(light, a, b):
    """OKLab to sRGB. Source: Björn Ottosson 2020."""
    long, medium, short = (
        (light + 0.3963377774 * a + 0.2158037573 * b) ** 3,
        (light - 0.1055613458 * a - 0.0638541728 * b) ** 3,
        (light - 0.0894841775 * a - 1.291485548 * b) ** 3,
    )
    linear = np.array([
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.707614701 * short,
    ]).clip(0, 1)  # fmt: skip
    bright = 1.055 * linear ** (1 / 2.4) - 0.055
    return tuple(np.round(255 * np.where(linear <= 0.0031308, 12.92 * linear, bright)).astype(int).tolist())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_figures_have_the_colours_of_the_page(theme):
    matplotlib_palette = pytest.importorskip("attention_pictures.colour_ranges").palette
    source = PAGE.joinpath("colour.ts").read_text("utf-8")
    scales = source[source.index("const DIFFERENCES") :]
    row = re.search(rf"{theme}: \[\[(.*?)\]\],", scales).group(1)
    ends = [from_oklab(*map(float, stop.split(","))) for stop in row.split("], [")]
    assert tuple(ends) == DIVERGING_SCALES[theme]
    colours = matplotlib_palette(PictureOptions(theme=theme), signed=True)
    drawn = [tuple(round(255 * part) for part in colours(at)[:3]) for at in (0.0, 1.0)]
    assert drawn == [ends[0], ends[2]]


def test_less_is_blue_and_more_is_orange_everywhere():
    for scale in DIVERGING_SCALES.values():
        assert is_blue(*scale[0])
        assert not is_blue(*scale[2])
    assert is_blue(*NEGATIVE)
    assert not is_blue(*POSITIVE)
    shown = tokens_html("", ["a", "b"], [-6.82, 0.5])
    assert re.findall(r"rgba\((\d+,\d+,\d+)", shown) == [",".join(map(str, NEGATIVE)), ",".join(map(str, POSITIVE))]
    page = Maps(np.array([[[-6.82, 0.5]]]), ["h"], ["q"], ["a", "b"], "t", signed=True).html()
    assert str(list(map(list, DIVERGING_SCALES["light"]))) in page
    for strength in (-1.0, 1.0):
        painted = Color.parse(_style(strength).removeprefix("white on ")).triplet
        assert is_blue(*painted) == (strength < 0)
    bars = PAGE.joinpath("drawings.ts").read_text("utf-8")
    assert "fill: signed && value > 0 ? inks.second : inks.accent" in bars, "accent is blue, second is orange"


def test_a_small_difference_beside_a_large_one_looks_small():
    colour_range = pytest.importorskip("attention_pictures.colour_ranges").colour_range
    norm = colour_range(np.array([-6.82, *[0.0066] * 20]), "auto", signed=True)
    assert norm(0.0066) == pytest.approx(0.5, abs=0.001)
