"""Pictures that the page saves have the ground of the server's pictures."""

import re
from pathlib import Path

import pytest

GROUND = pytest.importorskip("attention_pictures.figure_style").GROUND
COLOURS = Path(__file__).parent.parent.parent / "web/src/drawing/colour.ts"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_that_the_page_saves_have_the_ground_of_the_server_s(theme):
    line = next(line for line in COLOURS.read_text("utf-8").splitlines() if line.startswith("export const GROUND"))
    assert re.search(rf'{theme}: "(#[0-9a-f]{{6}})"', line).group(1) == GROUND[theme]


def test_a_weight_of_zero_is_as_white_as_the_ground():
    weights = COLOURS.read_text("utf-8").split("const WEIGHTS", 1)[1]
    assert re.search(r"light: \[\[([^\]]*)\]", weights).group(1) == "1, 0, 0"  # white in OKLab
    assert GROUND["light"] == "#ffffff"
