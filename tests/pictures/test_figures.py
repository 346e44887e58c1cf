"""Pictures of replies: what is drawn is what the reply has, and what does not fit is stated."""

import io
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from PIL import Image
from tests.pictures import replies
from tests.pictures.replies import RAN, circuit, softmax

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.attribution import AttributionReply
from attention_contract.schemas.analyses.circuits import CircuitsReply
from attention_contract.schemas.analyses.effects import Effects, EffectsReply
from attention_contract.schemas.analyses.recording_statistics import RecordingStatistics, StatisticsOfAttention
from attention_contract.schemas.analyses.rollout import (
    RecordingRollout,
    RecordingRolloutRequest,
    RolloutReply,
    RolloutRequest,
)
from attention_contract.schemas.analyses.similarity import SimilarityReply
from attention_contract.schemas.attention import ForwardReply, RawForwardRequest, Taps
from attention_contract.schemas.model_requests import LayerWeights, ModelWeightsReply
from attention_contract.schemas.picture_options import DIVERGING, SEQUENTIAL, PictureOptions
from attention_contract.schemas.prompts import ModelRan, TokenLabelsReply
from attention_contract.schemas.weights import HeadStatistics, WeightsDifferences, WeightsReply
from attention_pictures.colour_ranges import colour_range, palette
from attention_pictures.figures import Names, draw, make_figure, names_of, saving_bytes, styled
from attention_pictures.heat_maps import heat_maps
from attention_pictures.pooled_cells import pool
from attention_pictures.reply_figures import figure_of
from attention_pictures.token_labels import ticks
from attention_pictures.token_lines import token_lines

SMALL = PictureOptions(width=320)
WORDS = ["[CLS]", "a", "cat", "$5", "\x00\n", "[SEP]"]
SVG_TEXT = "{http://www.w3.org/2000/svg}text"


def reply_of(weights, differences=None):
    batched = weights.ndim == 4
    heads = weights.shape[:-2]
    statistics = HeadStatistics(entropy=np.arange(np.prod(heads)).reshape(heads) / 8, max_weight=np.ones(heads))
    changed = None if differences is None else WeightsDifferences(statistics=statistics, weights=differences)
    queries = np.full(heads[0], 6) if batched else np.array(6)
    return WeightsReply(statistics=statistics, queries=queries, weights=weights, differences=changed, ran=RAN)


def drawn_arrays(figure):
    """The numbers of each map, without colour bars."""
    return [np.asarray(cells.get_array()) for axes in figure.axes if (cells := cells_of(axes)) is not None]


def cells_of(axes):
    """What the cells of a map are drawn as: rectangles, or an image."""
    maps = [each for each in axes.collections if isinstance(each, QuadMesh)] + axes.images
    return maps[0] if maps and not hasattr(axes, "_colorbar") else None


def figure(reply, names=None, **options):
    options = PictureOptions.model_validate(options)
    with styled(options.theme):
        return figure_of(reply, options, names or Names())


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_the_maps_show_the_weights_of_the_reply(rng):
    weights = softmax(2, 3, 6, 6, rng=rng)
    np.testing.assert_array_equal(drawn_arrays(figure(reply_of(weights), sequence=1)), weights[1])
    (one,) = drawn_arrays(figure(reply_of(weights[0]), Names(heads=[4, 7, 9]), view="head", head=7))
    np.testing.assert_array_equal(one, weights[0, 1])
    (mean,) = drawn_arrays(figure(reply_of(weights[0]).model_copy(update={"weights": weights[0, 0]}), view="head"))
    np.testing.assert_array_equal(mean, weights[0, 0])


def test_differences_are_drawn_about_zero(rng):
    weights, changed = softmax(3, 6, 6, rng=rng), rng.normal(size=(3, 6, 6)).astype(np.float32)
    made = figure(reply_of(weights, changed))
    np.testing.assert_array_equal(drawn_arrays(made), changed)
    norm = cells_of(made.axes[0]).norm
    assert float(norm(0.0)) == pytest.approx(0.5)
    assert float(norm(np.abs(changed).max())) == pytest.approx(1)
    assert "differences" in made.texts[0].get_text()


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("shape", [(1, 7), (600, 40), (513, 1025), (16, 16)])
def test_pooling_keeps_the_extreme_of_every_block(rng, shape, signed):
    values = rng.normal(size=shape) if signed else rng.random(shape)
    values[0, 0] = np.nan
    cells, (down, across) = pool(values, (100, 64), signed=signed)
    assert cells.shape[0] <= 100
    assert cells.shape[1] <= 64
    for row, column in np.ndindex(cells.shape):
        block = values[row * down : (row + 1) * down, column * across : (column + 1) * across].ravel()
        block = block[np.isfinite(block)]
        expected = block[np.argmax(np.abs(block) if signed else block)] if block.size else np.nan
        np.testing.assert_equal(cells[row, column], expected)


def test_512_tokens_are_not_blank(rng):
    """The usual case: a sink that takes most of each row, and the rest spread over many keys."""
    weights = softmax(1, 512, 512, rng=rng) * 0.1
    weights[:, :, 0] += 0.9
    for scale in ("auto", "linear"):
        with styled("light"):
            made = heat_maps(weights, [""], "", PictureOptions(width=280, scale=scale))
            canvas = FigureCanvasAgg(made)
            canvas.draw()
        grey = np.asarray(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("L"), float)
        box = made.axes[0].get_window_extent()
        top = grey.shape[0] - int(box.y1)
        inside = grey[top + 3 : top + int(box.height) - 3, int(box.x0) + 6 : int(box.x1) - 3]
        assert (inside.std() > 8) == (scale == "auto")
    assert "pooled by maximum: a cell is" in " ".join(text.get_text() for text in made.texts)


def test_an_even_map_has_a_linear_range_and_a_map_of_zeros_has_one_too(rng):
    even = colour_range(softmax(32, 32, rng=rng), "auto")
    assert float(even(even.vmax / 2)) == pytest.approx(0.5)
    assert float(colour_range(np.zeros((4, 4)), "auto")(0.0)) == 0
    assert float(colour_range(np.full((4, 4), np.nan), "log")(0.0)) == 0
    log = colour_range(np.array([0.0, 1e-9, 0.01, 1.0]), "log")
    assert [float(log(x)) for x in (0.0, 1e-9, 0.01, 1.0)] == pytest.approx([0, 0, 0.5, 1], abs=0.05)
    signed = colour_range(np.array([-1e-3, 1e-3, 0.1, 1.0]), "log", signed=True)
    assert [float(signed(x)) for x in (-1.0, 0.0, 1.0)] == pytest.approx([0, 0.5, 1])


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_sequential_palettes_grow_lighter_steadily(name):
    """The lightness of CIELAB, from 0 to 100: monotone, and over most of its range."""
    colours = palette(PictureOptions(palette=name))(np.linspace(0, 1, 64))[:, :3]
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    lightness = 116 * np.cbrt(np.clip(linear @ [0.2126, 0.7152, 0.0722], 0.008856, None)) - 16
    assert np.all(np.diff(lightness) > -0.1)
    assert np.ptp(lightness) > 70


@pytest.mark.parametrize("name", DIVERGING)
def test_diverging_palettes_differ_at_their_ends_for_the_colour_blind(name):
    """Without red against green (deuteranopia), blue against yellow is left: the ends differ in it."""
    low, middle, high = palette(PictureOptions(palette=name), signed=True)([0.02, 0.5, 0.98])[:, :3]
    yellow = [one[2] - (one[0] + one[1]) / 2 for one in (low, middle, high)]
    assert abs(yellow[0] - yellow[2]) > 0.25
    assert abs(yellow[1]) < 0.1


def test_labels_that_fit_stand_and_others_are_rotated_or_skipped():
    labels = [f"token{n}" for n in range(12)]
    wide = ticks(labels, 12, 1, 10.0, across=True)
    assert (wide.texts, wide.rotated) == (labels, False)
    narrow = ticks(labels, 12, 1, 2.0, across=True)
    assert (narrow.texts, narrow.rotated) == (labels, True)
    few = ticks([f"token{n}" for n in range(500)], 500, 2, 4.0, across=True)
    assert few.rotated
    assert 40 < len(few.texts) < 50
    assert (few.size, few.skipped) == (5, 11)
    step = int(few.texts[1].removeprefix("token"))
    assert few.places == [token // 2 for token in range(0, 500, step)]  # the middles of their cells
    numbers = ticks(None, 500, 1, 4.0, across=False)
    assert {int(text) % int(numbers.texts[1]) for text in numbers.texts} == {0}
    assert ticks(WORDS, 6, 1, 3.0, across=False).texts == [*WORDS[:4], r"\x00\n", "[SEP]"]


def test_lines_go_from_each_query_to_the_keys_it_looks_at(rng):
    weights = np.tril(softmax(6, 6, rng=rng))
    with styled("light"):
        made = token_lines(weights, "", SMALL, keys=WORDS, queries=WORDS)
    (lines,) = made.axes[0].collections
    ends = [(round(path.vertices[0][1]), round(path.vertices[-1][1])) for path in lines.get_paths()]
    least = weights.mean()
    assert set(ends) == set(zip(*np.nonzero(weights >= least), strict=True))
    message = " ".join(text.get_text() for text in made.texts)
    shown = weights[weights >= least]
    assert f"{len(shown)} of 21 lines are drawn: those of at least {shown.min():.2g} in weight" in message
    opacity = lines.get_edgecolors()[:, 3]
    assert np.all(np.diff(opacity) >= 0)
    assert ends[-1] == np.unravel_index(weights.argmax(), weights.shape)
    with styled("light"):
        many = token_lines(softmax(200, 300, rng=rng), "", SMALL)
    assert len(many.axes[0].collections[0].get_paths()) == 1024
    notes = " ".join(text.get_text() for text in many.texts)
    assert "pooled by maximum: a cell is 4 queries × 5 keys" in notes
    assert "1024 of 3000 lines are drawn" in notes


def test_statistics_have_their_numbers_in_the_cells(rng):
    made = figure(reply_of(softmax(3, 6, 6, rng=rng)), view="statistics")
    assert [text.get_text() for text in made.axes[0].texts] == ["0", "1.00", "0.12", "1.00", "0.25", "1.00"]
    first = StatisticsOfAttention(
        name="layers.0", heads=["a", "b"], queries=4, statistics=HeadStatistics(signed_distance=np.array([-1.0, 2.0]))
    )
    second = first.model_copy(
        update={"name": "layers.1", "heads": ["c"], "statistics": HeadStatistics(signed_distance=np.array([3.0]))}
    )
    (cells,) = drawn_arrays(figure(RecordingStatistics(id="0" * 32, attentions=[first, second])))
    np.testing.assert_equal(np.ma.filled(np.ma.masked_invalid(cells), np.nan), [[-1, 2], [3, np.nan]])


@pytest.mark.parametrize(
    ("options", "param"),
    [({"view": "head", "head": 3}, "head"), ({"sequence": 1}, "sequence")],
)
def test_what_the_reply_lacks_is_named(rng, options, param):
    with pytest.raises(InvalidRequest) as caught:
        figure(reply_of(softmax(3, 6, 6, rng=rng)), **options)
    assert caught.value.param == param


@pytest.mark.slow
def test_files_carry_their_facts_and_equal_pictures_are_equal_bytes(rng):
    reply, names = reply_of(softmax(1, 6, 6, rng=rng)), Names("demo", WORDS, WORDS)
    facts = {"module": "demo", "version": "abc", "request_id": "r-1", "shape": [1, 6, 6]}
    svg = draw(reply, SMALL, "image/svg+xml", names, facts).data
    assert svg == draw(reply, SMALL, "image/svg+xml", names, facts).data
    root = ET.fromstring(svg)  # noqa: S314 - our own
    texts = [text.text for text in root.iter(SVG_TEXT)]
    assert {*WORDS[:4], r"\x00\n", "query", "key"} <= set(texts)
    purl = "{http://purl.org/dc/elements/1.1/}"
    assert json.loads(next(root.iter(f"{purl}description")).text) == facts
    assert next(root.iter(f"{purl}identifier")).text == "r-1"
    assert not list(root.iter(f"{purl}date"))
    dark = PictureOptions(width=320, dpi=72, theme="dark")
    image = Image.open(io.BytesIO(draw(reply, dark, "image/png", names, facts).data))
    assert image.width == 320
    assert json.loads(image.text["Description"]) == facts
    assert image.convert("L").getpixel((1, 1)) < 32
    pdf = draw(reply, SMALL, "application/pdf", names, facts).data
    assert pdf.startswith(b"%PDF")
    assert b"r-1" in pdf
    assert b"CreationDate" not in pdf


def test_a_reply_draws_itself(rng):
    reply = reply_of(softmax(2, 6, 6, rng=rng))
    picture = reply.plot("svg", view="lines", head=1, labels=WORDS, query_labels=WORDS, width=320)
    root = ET.fromstring(picture.data)  # noqa: S314 - our own
    assert {"[CLS]", "$5", "query"} <= {text.text for text in root.iter(SVG_TEXT)}
    assert picture.data == reply.plot("svg", view="lines", head=1, labels=WORDS, query_labels=WORDS, width=320).data
    for fields, param in (({"theme": "blue"}, "theme"), ({"head": 5, "view": "head"}, "head")):
        with pytest.raises(InvalidRequest) as caught:
            reply.plot(**fields)
        assert caught.value.param == param
    with pytest.raises(InvalidRequest, match="format"):
        reply.plot("gif")


@pytest.mark.parametrize("method", ["gradient_attention", "relevance", "norm", "head_importance"])
def test_attributions_are_drawn_by_their_method(rng, method):
    heads = {
        "gradient_attention": (2, 3, 6, 6),
        "norm": (2, 3, 6, 6),
        "relevance": (2, 6, 6),
        "head_importance": (2, 3),
    }
    values = rng.normal(size=heads[method]).astype(np.float32)
    values = values if method == "gradient_attention" else np.abs(values)
    made = figure(AttributionReply(**{method: values}, ran=RAN), sequence=1)
    if method == "head_importance":
        assert [text.get_text() for text in made.axes[0].texts] == [f"{value:.2f}" for value in values[1]]
        return
    expected = values[1] if values.ndim == 4 else values[1:]
    np.testing.assert_array_equal(drawn_arrays(made), expected)
    assert method.replace("_", " ") in made.texts[0].get_text()
    assert (cells_of(made.axes[0]).norm.vmin < 0) == (method == "gradient_attention")


def test_circuits_are_drawn_as_lines_a_table_and_maps(rng):
    values = np.sort(rng.random((3, 4)), -1)[:, ::-1]
    parameter = {"name": "q_proj.weight", "shape": [4, 4]} | circuit(values[0])
    reply = CircuitsReply.model_validate(
        {
            "heads": np.array([0, 2, 5]), "qk": circuit(values),
            "ov": circuit(values) | {"copying": np.array([1.0, 0, -1])},
            "spectra": [parameter], "left_out": [], "ran": RAN,
            "composition": {"module": "later", "version": "v", "q": rng.random((3, 2)), "baseline": 0.5},
        }
    )  # fmt: skip
    qk, _, parameters = figure(reply).axes
    np.testing.assert_allclose([line.get_ydata() for line in qk.lines], values)
    assert [line.get_label() for line in qk.lines] == ["H0", "H2", "H5"]
    np.testing.assert_allclose(parameters.lines[0].get_ydata(), values[0])
    (scores,) = drawn_arrays(figure(reply, view="composition"))[:1]
    np.testing.assert_array_equal(scores, reply.composition.q.astype(np.float32))
    table = figure(reply, view="statistics").axes[0]
    assert [label.get_text() for label in table.get_xticklabels()][-1] == "OV copying"
    with pytest.raises(InvalidRequest, match="later module"):
        figure(reply.model_copy(update={"composition": None}), view="composition")


def test_similarity_and_effects_are_drawn(rng):
    values = rng.random((2, 3))
    made = figure(SimilarityReply(measure="cka", values=values, ran=RAN))
    np.testing.assert_array_equal(drawn_arrays(made)[0], values.astype(np.float32))
    effects = Effects(norm=values, relative=values / 2, max=values)
    swept = figure(EffectsReply(swept={"heads": [0, 1], "keys": [3, 4, 5]}, effects=effects, ran=RAN))
    np.testing.assert_array_equal(drawn_arrays(swept)[0], (values / 2).astype(np.float32))
    assert [label.get_text() for label in swept.axes[0].get_xticklabels()] == ["3", "4", "5"]
    one = figure(EffectsReply(swept={"heads": [0, 1, 2]}, effects=effects, ran=RAN), sequence=1)
    assert [label.get_text() for label in one.axes[0].get_yticklabels()] == ["H0", "H1", "H2"]
    with pytest.raises(InvalidRequest, match="one or two swept axes"):
        figure(EffectsReply(swept={axis: [0] for axis in ("heads", "queries", "keys")}, effects=effects, ran=RAN))


def test_outputs_and_their_differences_diverge_from_0(rng):
    output = rng.normal(size=(2, 3, 5)).astype(np.float32)
    plain = figure(ForwardReply(output=output, ran=RAN), sequence=1)
    np.testing.assert_array_equal(drawn_arrays(plain)[0], output[1])
    moved = ForwardReply(output=output, differences=Taps(output=output / 2), ran=RAN)
    raw = RawForwardRequest(query=np.ones((2, 3, 8)))
    by_head = figure(moved, names_of(raw))
    for drawn, expected in zip(drawn_arrays(by_head), output / 2, strict=False):
        np.testing.assert_array_equal(drawn, expected)
    norm = cells_of(by_head.axes[0]).norm
    assert norm.vmax == -norm.vmin == np.abs(output / 2).max()
    assert "differences from the unedited output" in by_head.texts[0].get_text()
    with pytest.raises(InvalidRequest, match="list output"):
        figure(ForwardReply(ran=RAN))


def test_a_rollout_is_drawn_with_the_labels_of_the_recording(rng):
    values = softmax(2, 3, rng=rng).astype(float)
    facts = {"id": "0" * 32, "layers": ["layers.0"], "tokens": ["a", "b", "c"], "values": values, "ran": RAN}
    names = names_of(RecordingRolloutRequest(queries=[2, 0], method="flow"), "tiny")
    made = figure(RecordingRollout(**facts), names)
    np.testing.assert_array_equal(drawn_arrays(made)[0], values.astype(np.float32))
    assert [label.get_text() for label in made.axes[0].get_yticklabels()] == ["c", "a"]
    assert [label.get_text() for label in made.axes[0].get_xticklabels()] == ["a", "b", "c"]
    assert "flow" in made.texts[0].get_text()
    labelled = RolloutRequest(weights=np.ones((1, 3, 3)), queries=[2, 0], labels=["a", "b", "c"])
    sent = figure(RolloutReply(values=values, ran=RAN), names_of(labelled))
    for axis in ("get_xticklabels", "get_yticklabels"):
        of_both = [[label.get_text() for label in getattr(each.axes[0], axis)()] for each in (made, sent)]
        assert of_both[0] == of_both[1]
    lines = figure(RecordingRollout(**facts), names, view="lines").axes[0].collections[0]
    assert len(lines.get_paths()) == np.count_nonzero(values >= values.mean())


def test_many_layers_and_heads_of_a_recording_are_left_out_with_a_note():
    """One attention with many heads beside many layers would be a table of their product."""
    named = [(f"layers.{layer}", 3000 if layer == 0 else 1) for layer in range(300)]
    attentions = [
        StatisticsOfAttention(
            name=name, heads=["h"] * heads, queries=1, statistics=HeadStatistics(entropy=np.ones(heads))
        )
        for name, heads in named
    ]
    figure = figure_of(RecordingStatistics(id="0" * 32, attentions=attentions), SMALL, Names())
    assert max(cells.size for cells in drawn_arrays(figure)) == 256 * 256
    texts = [text.get_text() for text in figure.texts]
    assert any("44 layers are left out" in text for text in texts)
    assert any("2744 heads are left out" in text for text in texts)


@pytest.mark.sampled(media_type=1)
@pytest.mark.parametrize("media_type", ["image/png", "image/svg+xml", "application/pdf"])
def test_the_pixels_of_a_png_are_limited(media_type):
    options = PictureOptions(width=4096, dpi=600, view="statistics")
    heads = HeadStatistics(entropy=np.ones(256))
    figure = make_figure(WeightsReply(statistics=heads, queries=1, ran=RAN), options, Names())
    if media_type == "image/png":
        with pytest.raises(InvalidRequest, match="4096 × 29") as caught:
            saving_bytes(figure, media_type)
        assert caught.value.param == "dpi"
    else:
        assert saving_bytes(figure, media_type) == 0


def of_a_model(layers, weights=True, several=False):
    """The reply of a whole model, each layer with two heads over three tokens, of one text or of two."""
    rng, lead = np.random.default_rng(0), (2,) if several else ()
    labels = TokenLabelsReply(tokens=["<s>", " the", "\n"], ids=[0, 1, 2], spans=[None, (0, 4), (4, 5)])
    ran = ModelRan(
        model="net", architecture="Net", device="cpu", dtype="float32", kernels=["fused"], compute_ms=1, queue_ms=0,
        peak_bytes=1,
    )  # fmt: skip
    made = [
        LayerWeights(
            layer=layer, statistics=HeadStatistics(entropy=rng.random((*lead, 2))), queries=np.full(lead, 3),
            weights=rng.random((*lead, 2, 3, 3), np.float32) if weights else None,
        )
        for layer in layers
    ]  # fmt: skip
    return ModelWeightsReply(labels=[labels] * 2 if several else labels, ran=ran, layers=made)


def words_of(picture):
    return [text.text for text in ET.fromstring(picture.data).iter(SVG_TEXT)]  # noqa: S314 - made here


@pytest.mark.parametrize("several", [False, True])
def test_one_layer_of_a_model_is_drawn_with_its_tokens(several):
    words = words_of(of_a_model(["cross.1"], several=several).plot())
    assert "layer cross.1 · weights · 2 heads · 3 queries × 3 keys" in words
    assert {"<s>", "the", "'\\n'", "cross.1 H1"} <= set(words)


def test_a_key_that_was_not_chosen_has_no_value_and_a_weight_of_0_has_one():
    reply = of_a_model([3])
    layer = reply.layers[0]
    weights = np.array(layer.weights)
    weights[:, 2, 0] = weights[:, 1, 1] = 0
    chosen = np.array([[True, False, False], [True, True, False], [False, True, True]])
    layer = layer.model_copy(update={"weights": weights, "chosen": chosen})
    picture = figure(reply.model_copy(update={"layers": [layer]}))
    for cells, expected in zip(drawn_arrays(picture), weights, strict=True):
        np.testing.assert_array_equal(np.ma.filled(np.ma.masked_invalid(cells), np.nan)[~chosen], np.full(4, np.nan))
        np.testing.assert_array_equal(np.asarray(cells)[chosen], expected[chosen])
    assert "weights of the keys that each query may look at" in picture.texts[0].get_text()


@pytest.mark.parametrize("layers", [[0, 1, 2], [0]])
def test_statistics_of_a_model_are_layers_and_heads(layers):
    words = words_of(of_a_model(layers, weights=False).plot())
    assert f"statistics · {len(layers)} layers" in words
    assert {"entropy, nats", *(f"L{layer}" for layer in layers)} <= set(words)


def test_weights_of_several_layers_are_no_picture():
    with pytest.raises(InvalidRequest, match="layers: the view head is of one layer"):
        of_a_model([0, 1]).plot(view="head")


def test_the_facts_of_a_models_picture_name_it():
    assert b"Attention of net" in of_a_model([0]).plot().data


DRAWN = {
    "weights": lambda rng: reply_of(softmax(2, 6, 6, rng=rng)),
    "statistics of weights": lambda rng: replies.weights(2, 6),
    "a layer": lambda rng: of_a_model([0]),
    "layers": lambda rng: of_a_model([0, 1]),
    "statistics of layers": lambda rng: of_a_model([0, 1], weights=False),
    "attribution": lambda rng: replies.importance()[0],
    "maps of an attribution": lambda rng: AttributionReply(norm=np.ones((2, 6, 6), np.float32), ran=RAN),
    "effects": lambda rng: replies.effects(2, 6)[0],
    "circuits": lambda rng: replies.circuits()[0],
    "similarity": lambda rng: replies.recorded_similarity()[0],
    "recorded statistics": lambda rng: replies.recorded_statistics()[0],
    "recorded rollout": lambda rng: replies.rollout(6)[0],
    "rollout": lambda rng: RolloutReply(values=np.eye(6), ran=RAN),
    "output": lambda rng: ForwardReply(output=np.ones((6, 6), np.float32), ran=RAN),
}
GIVEN = {
    "labels": [f"k{at}" for at in range(6)], "query_labels": [f"q{at}" for at in range(6)], "heads": [5, 7],
    "sweep": {"query_length": [1, 2]},
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("kind", DRAWN)
def test_a_name_that_is_given_is_shown_or_refused(rng, kind, name):
    reply = DRAWN[kind](rng)
    view = "statistics" if kind == "statistics of weights" else None
    given = GIVEN[name][:3] if kind == "a layer" and "labels" in name else GIVEN[name]
    try:
        shown = reply.plot(view=view, **{name: given}).data
    except InvalidRequest as fault:
        shown = fault.param
    assert shown == name or shown != reply.plot(view=view).data
