"""All heads of a model in one figure: in the widths of papers, with the colours and labels of other figures."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.collections import QuadMesh
from tests.pictures.replies import softmax
from tests.pictures.test_figures import of_a_model, words_of
from tests.pictures.test_image_maps import RAN
from tests.pictures.test_layout import faults

from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import Names
from attention_contract.schemas.model_requests import LayerWeights, ModelWeightsReply
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.schemas.prompts import TokenLabelsReply
from attention_contract.schemas.weights import HeadStatistics, WeightsDifferences
from attention_pictures.figures import make_figure
from attention_pictures.sign_colours import DIVERGING_SCALES

COLUMN, PAGE = 85, 170
"""Millimetres."""


def model(layers, heads, tokens=6, **fields):
    """The weights of every head, of layers with these names, over so many tokens."""
    rng = np.random.default_rng(1)
    made = [
        LayerWeights(
            layer=layer, statistics=HeadStatistics(entropy=rng.random(heads)), queries=np.array(tokens),
            weights=softmax(heads, tokens, tokens, rng=rng, spread=3), **fields,
        )
        for layer in layers
    ]  # fmt: skip
    labels = TokenLabelsReply(tokens=[f" t{at}" for at in range(tokens)], ids=[*range(tokens)], spans=[None] * tokens)
    return ModelWeightsReply(labels=labels, ran=RAN, layers=made)


def overview(reply, names=None, **options):
    return make_figure(reply, PictureOptions(view="heads", **options), names or Names("a-model"))


def maps(figure):
    return [each for axes in figure.axes for each in [*axes.collections, *axes.images]
            if each.get_array() is not None and not hasattr(axes, "_colorbar")]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("width", [COLUMN, PAGE])
@pytest.mark.parametrize(
    ("layers", "heads", "tokens"),
    [(range(4), 4, 7), (range(2), 1, 30), (range(12), 12, 20),
     pytest.param(range(32), 32, 8, marks=pytest.mark.slow),  # a second
     ([f"{stack}.{at}" for stack in ("encoder", "decoder", "cross") for at in range(6)], 8, 12)],
)  # fmt: skip
def test_all_heads_fit_a_column_and_a_page(layers, heads, tokens, width):
    reply = model(layers, heads, tokens)
    figure = overview(reply, width_mm=width)
    assert figure.get_figwidth() * 25.4 == pytest.approx(width)
    assert faults(figure) == []
    drawn = maps(figure)
    assert len(drawn) == len(layers) * heads
    sizes = [text.get_fontsize() for axes in figure.axes for text in [*axes.get_xticklabels(), *axes.get_yticklabels()]]
    assert min(sizes) >= 5
    assert len({(each.norm.vmin, each.norm.vmax) for each in drawn}) == 1
    written = [text.get_text() for text in figure.texts]
    assert "attention weight" in written
    heads_named = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert len(heads_named) == heads or any("labelled: 1 of" in each for each in written)


def test_each_map_has_the_weights_of_its_head():
    reply = model(range(3), 2)
    figure = overview(reply)
    expected = np.concatenate([each.weights for each in reply.layers])
    for found, weights in zip(maps(figure), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(found.get_array()), weights)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["L0", "L1", "L2"]


def test_a_selection_of_several_layers_is_drawn_as_maps_and_their_statistics_without_one():
    reply, names = model(range(3), 2), Names("net", heads=[5, 9])
    drawn = make_figure(reply, PictureOptions(), names)
    assert [text.get_text() for text in drawn.axes[0].get_xticklabels()] == ["H5", "H9"]
    assert "entropy, nats" in words_of(of_a_model([0, 1]).plot())
    averaged = reply.model_copy(
        update={"layers": [each.model_copy(update={"weights": each.weights.mean(0)}) for each in reply.layers]}
    )
    figure = make_figure(averaged, PictureOptions(), Names("net", averaged=True, heads=[0, 1, 2, 3]))
    assert any("mean of heads 0 to 3" in " ".join(each.get_text() for each in figure.texts) for _ in [0])
    assert len(maps(figure)) == 3
    with pytest.raises(InvalidRequest, match="return_weights"):
        overview(of_a_model([0, 1], weights=False))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_less_is_blue_and_more_is_orange(theme):
    moved = WeightsDifferences(statistics=HeadStatistics(), weights=np.array([[[-1.0, 0.0], [0.0, 1.0]]], np.float32))
    reply = model(range(2), 1, 2, differences=moved)
    figure = overview(reply, theme=theme)
    assert "change of the attention weight" in " ".join(text.get_text() for text in figure.texts)
    less, _, more = DIVERGING_SCALES[theme]
    for each in maps(figure):
        assert isinstance(each, QuadMesh)
        assert [round(255 * part) for part in each.cmap(each.norm(-1.0))[:3]] == [*less]
        assert [round(255 * part) for part in each.cmap(each.norm(1.0))[:3]] == [*more]


def test_more_layers_than_a_figure_has_are_told():
    figure = overview(model(range(70), 1, 2))
    assert any("6 layers are left out" in text.get_text() for text in figure.texts)
