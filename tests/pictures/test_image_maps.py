"""Weights over an image: each patch has its colour where it is, crops add up, and sinks are marked."""

import base64
import io

import numpy as np
import pytest
from PIL import Image
from tests.pictures.test_layout import faults

from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import Names
from attention_contract.schemas.model_requests import LayerWeights, ModelWeightsReply
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.schemas.prompts import ModelRan, TokenLabelsReply
from attention_contract.schemas.weights import HeadStatistics
from attention_pictures.figures import make_figure, making_bytes

RAN = ModelRan(
    model="net", architecture="Net", device="cpu", dtype="float32", kernels=["fused"], compute_ms=1, queue_ms=0,
    peak_bytes=1,
)  # fmt: skip
IMAGE = PictureOptions(view="image")


def content(width=40, height=20, form="PNG", **options):
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 10, 10)).save(file, form, **options)
    return base64.b64encode(file.getvalue()).decode()


def labels(*rectangles, others=("CLS",), text=()):
    """Return the labels of tokens, patches of a row, and words."""
    count = len(others) + len(rectangles) + len(text)
    nothing = [None] * len(others), [None] * len(text)
    place = [(0, 0, number) for number in range(len(rectangles))]
    return TokenLabelsReply(
        tokens=[*others, *(f"[0,{number}]" for number in range(len(rectangles))), *text], ids=[*range(count)],
        spans=[None] * (count - len(text)) + [(0, 1)] * len(text),
        patches=[*nothing[0], *place, *nothing[1]], crops=[*nothing[0], *[0] * len(rectangles), *nothing[1]],
        rectangles=[*nothing[0], *rectangles, *nothing[1]],
    )  # fmt: skip


HALVES = (0, 0, 20, 20), (20, 0, 40, 20)


def figure(weights, text_labels, names=None, layer=0, **fields):
    weights = np.asarray(weights, np.float32)
    layers = [LayerWeights(layer=layer, statistics=HeadStatistics(), queries=np.array(3), weights=weights)]
    reply = ModelWeightsReply(labels=text_labels, ran=RAN, layers=layers, **fields)
    return make_figure(reply, IMAGE, names or Names("net", images=[content()]))


def heat(axes):
    return np.ma.filled(axes.images[1].get_array(), np.nan)


def test_each_patch_has_the_weight_of_the_query_where_it_is():
    weights = np.full((2, 3, 3), 0.1)
    weights[:, 0] = [[0.2, 0.7, 0.1], [0.5, 0.0, 0.5]]
    drawn = figure(weights, labels(*HALVES))
    first, second = heat(drawn.axes[0]), heat(drawn.axes[1])
    assert first.shape == (20, 40)
    np.testing.assert_allclose(first[:, :20], 0.7, atol=1e-6)
    np.testing.assert_allclose(first[:, 20:], 0.1, atol=1e-6)
    np.testing.assert_allclose(second[:, 20:], 0.5, atol=1e-6)
    assert drawn.axes[0].get_title() == "L0H0: 0.80 here, CLS 0.20"


def test_patches_that_overlap_add_up_and_pixels_of_none_are_left():
    weights = np.full((1, 3, 3), 0.25)
    drawn = figure(weights, labels((0, 0, 20, 20), (10, 0, 30, 20)))
    found = heat(drawn.axes[0])
    np.testing.assert_allclose(found[:, 12:18], 0.5)
    assert np.isnan(found[:, 32:]).all()


def test_a_text_looks_with_its_last_token_or_with_the_one_that_is_selected():
    weights = np.zeros((1, 4, 4))
    weights[0, 3, 1], weights[0, 2, 2] = 0.9, 0.6
    text_labels = labels(*HALVES, others=("<boi>",), text=("mat",))
    assert heat(figure(weights, text_labels).axes[0])[0, 0] == pytest.approx(0.9)
    names = Names("net", queries=["2"], heads=[3], images=[content()])
    assert heat(figure(weights[:, 2:3], text_labels, names).axes[0])[0, 30] == pytest.approx(0.6)


def test_sinks_are_marked_in_their_middle():
    count = 20
    rectangles = [(2 * at, 0, 2 * at + 2, 20) for at in range(count)]
    weights = np.full((1, count, count), 0.5 / (count - 1))
    weights[:, :, 4] = 0.5
    drawn = figure(weights, labels(*rectangles, others=()))
    (mark,) = drawn.axes[0].lines
    assert (mark.get_xdata()[0], mark.get_ydata()[0]) == (8.5, 9.5)
    assert any("even share" in each.get_text() for each in drawn.texts)


def test_a_turned_image_is_drawn_as_it_is_seen():
    exif = Image.Exif()
    exif[0x0112] = 6
    names = Names("net", images=[content(40, 20, "JPEG", exif=exif)])
    text_labels = labels((0, 0, 20, 20), (0, 20, 20, 40))
    drawn = figure(np.full((1, 3, 3), 0.3), text_labels, names)
    assert drawn.axes[0].images[0].get_array().shape == (40, 20)


def test_a_large_image_is_drawn_small_and_counted():
    names = Names("net", images=[content(2000, 1000)])
    rectangles = (0, 0, 1000, 1000), (1000, 0, 2000, 1000)
    found = heat(figure(np.full((1, 3, 3), 0.3), labels(*rectangles), names).axes[0])
    assert found.shape == (256, 512)
    assert not np.isnan(found).any()
    assert making_bytes(names) >= 2000 * 1000


def test_layers_of_crops_are_drawn_crop_by_crop():
    weights = np.stack([np.full((1, 3, 3), 0.1), np.full((1, 3, 3), 0.2)])
    text_labels = labels(*HALVES)
    drawn = figure(weights, text_labels, layer="vision.0", image_labels=[text_labels, text_labels])
    assert heat(drawn.axes[0])[0, 0] == pytest.approx(0.1)


def test_what_shows_no_image_is_refused():
    with pytest.raises(InvalidRequest) as fault:
        figure(np.full((1, 3, 3), 0.3), labels(*HALVES), Names("net"))
    assert fault.value.param == "view"


@pytest.mark.sampled(width=2)
@pytest.mark.parametrize("width", [750, pytest.param(2008, marks=pytest.mark.slow), 1004])
@pytest.mark.parametrize("heads", [1, 24])
def test_heads_over_an_image_fit_the_columns_of_a_paper(heads, width):
    layer = LayerWeights(layer=0, statistics=HeadStatistics(), queries=np.array(3), weights=np.full((heads, 3, 3), 0.1))
    reply = ModelWeightsReply(labels=labels(*HALVES), ran=RAN, layers=[layer])
    options = PictureOptions(view="image", width=width, dpi=300)
    assert faults(make_figure(reply, options, Names("a-model-with-a-name", images=[content()]))) == []
