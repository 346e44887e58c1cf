"""The layout of pictures in the widths of papers, by the boxes of the texts that are drawn."""

import io
from itertools import combinations, product

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from fontTools.fontBuilder import FontBuilder
from fontTools.pens.t2CharStringPen import T2CharStringPen
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.transforms import Bbox
from PIL import Image
from tests.pictures.replies import (
    circuits,
    effects,
    effects_of_heads,
    importance,
    recorded_similarity,
    recorded_statistics,
    rollout,
    weights,
)

from attention_contract.reply_names import Names
from attention_contract.schemas.picture_options import PictureOptions
from attention_pictures import text_sizes
from attention_pictures.figures import make_figure, save, styled
from attention_pictures.text_sizes import fitted, width_of, wrapped

WIDTHS = {85: 1004, 170: 2008}
"""Pixels at 300 dpi of one and of two columns of a paper, by millimetres."""
LEAST = 750
"""The least width at 300 dpi."""
VOCABULARY = ["[CLS]", "the", "attention", "of", "antidisestablishmentarianism", "cat", "##ing", "注意力", "."]
TOUCHING = 1.0
"""Pixels by which boxes may meet: they are larger than their ink."""


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


class Walker(RendererAgg):
    """A renderer that draws nothing and notes the boxes of the texts."""

    def __init__(self, *size):
        super().__init__(*size)
        self.boxes = []

    def draw_text(self, gc, x, y, s, prop, angle, ismath=False, mtext=None):
        if mtext is None:  # one of several lines
            width, high, deep = self.get_text_width_height_descent(s, prop, ismath=False)
            low = self.height - y - deep
            self.boxes.append((s, Bbox.from_extents(x, low, x + width, low + high), None))
        else:
            self.boxes.append((mtext.get_text(), mtext.get_window_extent(self), mtext.axes))

    def draw_path(self, *_, **__):
        pass

    draw_image = draw_markers = draw_path_collection = draw_quad_mesh = draw_path


def walked(figure, theme="light"):
    """Return the texts that are drawn, their boxes and axes."""
    canvas = FigureCanvasAgg(figure)
    width, height = canvas.get_width_height()
    walker = Walker(width, height, figure.dpi)
    with styled(theme):
        figure.draw(walker)
    return walker.boxes


def shared(one, other):
    """The pixels of the smaller side of what two boxes have in common."""
    return min(min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0))


def faults(figure):
    """Return the texts outside the picture, over another text, or over a map that they are no part of."""
    boxes, (width, height) = walked(figure), FigureCanvasAgg(figure).get_width_height()
    assert boxes
    found = [
        ("outside", text, [round(side) for side in box.extents])
        for text, box, _ in boxes
        if min(box.x0, box.y0) < -TOUCHING or box.x1 > width + TOUCHING or box.y1 > height + TOUCHING
    ]
    found += [("overlap", one[0], two[0]) for one, two in combinations(boxes, 2) if shared(one[1], two[1]) > TOUCHING]
    found += [
        ("over a map", text)
        for text, box, of in boxes
        for axes in figure.axes
        if axes is not of and shared(box, axes.bbox) > TOUCHING
    ]
    return found


def words(tokens):
    return [VOCABULARY[at % len(VOCABULARY)] for at in range(tokens)]


def drawn(reply, names, **options):
    return make_figure(reply, PictureOptions(dpi=300, **options), names)


def labels_of(figure, name):
    """Return how many labels the axis with most of them has, and how many tokens the note says one is of."""
    ticks = max(len(getattr(axes, f"get_{name}ticklabels")()) for axes in figure.axes)
    return ticks, " ".join(text.get_text() for text in figure.texts)


NARROW, WIDE = WIDTHS.values()
SEEN = [(NARROW, 24, 128), (NARROW, 1, 128), (NARROW, 8, 5), (WIDE, 24, 5), (WIDE, 8, 128)]
"""Widths, heads and tokens of every run; the slow ones are all of them."""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("width", "heads", "tokens"),
    [
        pytest.param(*each, marks=() if each in SEEN else pytest.mark.slow)
        for each in product(WIDTHS.values(), (1, 2, 3, 6, 8, 12, 16, 24), (5, 12, 32, 128))
    ],
)
def test_grids_of_heads_fit_the_columns_of_a_paper(width, heads, tokens):
    names = Names("a-model-with-a-name", words(tokens), words(tokens))
    figure = drawn(weights(heads, tokens), names, width=width)
    assert faults(figure) == []
    count, labels = labels_of(figure, "x")
    assert count == tokens or "labelled: 1 of" in labels, "no label is dropped in silence"


@pytest.mark.sampled(view=2)
@pytest.mark.parametrize("view", ["head", "lines", "statistics"])
@pytest.mark.parametrize("tokens", [*slow(5, 32), 128])
@pytest.mark.parametrize("width", [LEAST, *slow(*WIDTHS.values())])
@pytest.mark.parametrize("labelled", [True, *slow(False)])
def test_one_head_fits(width, tokens, view, labelled):
    texts = words(tokens) if labelled else None
    figure = drawn(weights(24, tokens), Names("a-model-with-a-name", texts, texts), width=width, view=view)
    assert faults(figure) == []
    if labelled and view != "statistics":
        count, note = labels_of(figure, "y")
        assert count == tokens or "labelled: 1 of" in note


OTHERS = {
    "rollout": (rollout, "rollout"),
    "rollout lines": (rollout, "lines"),
    "similarity": (recorded_similarity, "similarity"),
    "statistics": (recorded_statistics, "statistics"),
    "spectra": (circuits, "spectra"),
    "circuits": (circuits, "statistics"),
    "composition": (circuits, "composition"),
    "effects": (effects, "effects"),
    "effects of heads": (effects_of_heads, "effects"),
    "importance": (importance, "statistics"),
}


@pytest.mark.sampled(kind=5)
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("width", [*slow(LEAST), 1004, *slow(2008)])
def test_every_other_view_fits(width, kind):
    make, view = OTHERS[kind]
    reply, names = make()
    assert faults(drawn(reply, names, width=width, view=view)) == []


@pytest.mark.sampled(shape=2)
@pytest.mark.parametrize(
    ("shape", "scale"), [((1, 40), "log"), ((40, 1), "linear"), ((1, 1), "log"), ((200, 3), "linear")]
)
def test_maps_of_any_shape_fit(shape, scale):
    figure = drawn(weights(2, *shape), Names(), width=LEAST, scale=scale)
    assert faults(figure) == []
    assert faults(drawn(weights(1, *shape, signed=True), Names(), width=LEAST, scale=scale)) == []


def test_the_boxes_of_a_text_that_leaves_the_picture_are_found():
    figure = drawn(weights(1, 5), Names(), width=LEAST)
    figure.text(0.2, 0.5, "a text that is too long for a picture of this width")
    kinds = {fault[0] for fault in faults(figure)}
    assert kinds == {"outside", "overlap", "over a map"}


def test_long_headings_are_wrapped_and_may_be_left_out():
    reply, long = weights(1, 5), "An attention map whose heading is longer than one column of a paper is wide"
    figure = drawn(reply, Names(), width=LEAST, title=long)
    assert faults(figure) == []
    heading = [text.get_text() for text in figure.texts if text.get_weight() == "bold"]
    assert " ".join(heading) == long
    assert len(heading) > 1
    bare = drawn(reply, Names("m"), width=LEAST, title="none")
    assert not [text for text in bare.texts if text.get_weight() == "bold"]
    assert bare.get_figheight() < drawn(reply, Names("m"), width=LEAST).get_figheight()


def svg_of(figure):
    return save(figure, PictureOptions(), "image/svg+xml", {}).data


@pytest.mark.slow
def test_cells_of_small_maps_are_rectangles_and_those_of_large_ones_an_image():
    small, large = (drawn(weights(2, tokens), Names(), width=1004) for tokens in (16, 64))
    assert svg_of(small).count(b"<image") == 1, "the colour bar"
    assert svg_of(large).count(b"<image") == 3
    cells = [each for axes in small.axes for each in axes.collections if each.get_array() is not None][:2]
    for found, expected in zip(cells, weights(2, 16).weights, strict=True):
        np.testing.assert_array_equal(found.get_array(), expected)


def test_one_head_has_the_colours_that_it_has_in_the_grid():
    reply = weights(8, 12)
    grid, one = (drawn(reply, Names(), width=2008, view=view, head=2) for view in ("heads", "head"))
    norms = [axes.collections[0].norm for axes in (grid.axes[2], one.axes[0])]
    assert type(norms[0]) is type(norms[1])
    assert (norms[0].vmin, norms[0].vmax) == (norms[1].vmin, norms[1].vmax) == (0, reply.weights.max())
    many = weights(2, 60)
    bars = [drawn(many, Names(), width=2008, view=view).texts[-1].get_text() for view in ("heads", "head")]
    assert bars == ["attention weight (logarithmic)", "attention weight, H0 (logarithmic)"]


def test_one_number_a_head_is_a_bar():
    reply, names = importance()
    (axes,) = drawn(reply, names, width=1004).axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(list(reply.head_importance))
    assert [text.get_text() for text in axes.texts] == [f"{value:.2f}" for value in reply.head_importance]


def test_lines_stand_between_the_layers_of_a_similarity():
    reply, names = recorded_similarity(layers=3, heads=4)
    lines = drawn(reply, names, width=1004).axes[0].lines
    across = {tuple(line.get_ydata()) for line in lines} - {(0, 1)}
    down = {tuple(line.get_xdata()) for line in lines} - {(0, 1)}
    assert across == down == {(3.5, 3.5), (7.5, 7.5)}
    layers = reply.model_copy(update={"rows": reply.rows[::4], "columns": reply.columns[::4]})
    assert not drawn(layers.model_copy(update={"values": reply.values[::4, ::4]}), names, width=1004).axes[0].lines


def test_a_rollout_names_its_layers():
    for layers, label in ((2, "layers.0, layers.1"), (12, "layers.0 to layers.11 (12 layers)")):
        reply, names = rollout(layers=layers)
        heading = drawn(reply, names, width=4000).texts[0].get_text()
        assert f"rollout · {label} ·" in heading


def test_the_background_is_white_or_transparent():
    for background, pixel in (("theme", (255, 255, 255, 255)), ("none", (255, 255, 255, 0))):
        options = PictureOptions(background=background)
        picture = save(make_figure(weights(1, 5), options, Names()), options, "image/png", {})
        assert Image.open(io.BytesIO(picture.data)).convert("RGBA").getpixel((1, 1)) == pixel


def test_a_font_with_chinese_glyphs_is_taken_where_it_is_installed(monkeypatch):
    installed = ["DejaVu Sans", "IPAexGothic", "Comic Sans MS", "Noto Sans CJK SC"]
    monkeypatch.setattr(text_sizes.fontManager, "get_font_names", lambda: installed)
    text_sizes.families.cache_clear()
    assert text_sizes.families() == ["DejaVu Sans", "Noto Sans CJK SC", "IPAexGothic"]
    text_sizes.families.cache_clear()


@pytest.fixture
def a_font(monkeypatch, tmp_path):
    """Return a function that installs a font with one wide character, with TrueType or PostScript outlines."""

    def install(*, postscript):
        builder = FontBuilder(1000, isTTF=not postscript)
        builder.setupGlyphOrder([".notdef", "attend"])
        builder.setupCharacterMap({ord("注"): "attend"})
        pen = T2CharStringPen(1000, None) if postscript else TTGlyphPen(None)
        pen.moveTo((0, 0))
        for corner in ((0, 900), (900, 900), (900, 0)):
            pen.lineTo(corner)
        pen.closePath()
        if postscript:
            glyph = pen.getCharString()
            builder.setupCFF("Unifont", {"FullName": "Unifont"}, {".notdef": glyph, "attend": glyph}, {})
        else:
            glyph = pen.glyph()
            builder.setupGlyf({".notdef": glyph, "attend": glyph})
        builder.setupHorizontalMetrics(dict.fromkeys((".notdef", "attend"), (1000, 0)))
        builder.setupHorizontalHeader(ascent=900, descent=-100)
        builder.setupNameTable({"familyName": "Unifont", "styleName": "Regular", "psName": "Unifont"})
        builder.setupOS2(sTypoAscender=900, usWinAscent=900, usWinDescent=100)
        builder.setupPost()
        file = tmp_path / "font.otf"
        builder.save(file)
        monkeypatch.setattr(text_sizes.fontManager, "ttflist", [*text_sizes.fontManager.ttflist])
        text_sizes.fontManager.addfont(file)
        _forget_fonts()

    _forget_fonts()
    yield install
    monkeypatch.undo()
    _forget_fonts()


def _forget_fonts():
    text_sizes.fontManager._findfont_cached.cache_clear()
    for remembered in (text_sizes.families, text_sizes._glyphs, text_sizes.width_of):
        remembered.cache_clear()


@pytest.mark.sampled(postscript=1, kept=1)
@pytest.mark.parametrize(("postscript", "kept"), [(False, b"/Subtype /CIDFontType2"), (True, b"/Subtype /Type3")])
def test_a_pdf_keeps_the_glyphs_of_any_kind_of_font(a_font, postscript, kept):
    a_font(postscript=postscript)
    options = PictureOptions(title="注")
    picture = save(make_figure(weights(1, 5), options, Names()), options, "application/pdf", {})
    assert b"Unifont" in picture.data
    assert kept in picture.data


@pytest.mark.sampled(media_type=1)
@pytest.mark.parametrize("media_type", ["image/png", "application/pdf"])
def test_characters_that_no_font_has_are_reported(a_font, monkeypatch, media_type):
    monkeypatch.setattr(text_sizes, "_CJK", ())
    _forget_fonts()
    options = PictureOptions(title="注意 weights")
    figure = make_figure(weights(1, 5), options, Names())
    with pytest.warns(UserWarning, match=r"no font here has '意注'; the picture has boxes"):
        save(figure, options, media_type, {})
    save(figure, options, "image/svg+xml", {})


@pytest.mark.parametrize("size", [5.0, 8.0])
def test_wide_characters_have_the_width_of_a_font_that_has_them(size):
    with styled("light"):
        assert width_of("注意力", size) >= 3 * size / 72


def test_texts_are_wrapped_and_cut_to_a_width():
    text = "one two three antidisestablishmentarianism four"
    lines = wrapped(text, 8, 0.8)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(width_of(line, 8) <= 0.8 for line in lines)
    assert fitted("antidisestablishmentarianism", 8, 0.5).endswith("…")
    assert fitted("cat", 8, 0.5) == "cat"
