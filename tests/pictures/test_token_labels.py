"""Labels of tokens: a user's own, chosen ones, and their positions."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from tests.pictures.test_figures import WORDS, figure, reply_of
from tests.pictures.test_head_overview import model

from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import Names
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.schemas.prompts import TokenLabelsReply
from attention_pictures.figures import make_figure
from attention_pictures.token_labels import numbered, ticks

TOKENS = [" c", " a", " c", "\n", " a", " b"]


def whole_model():
    found = model([0], 1, 6)
    labels = TokenLabelsReply(tokens=TOKENS, ids=[*range(6)], spans=[None] * 6)
    return found.model_copy(update={"labels": labels})


def sides(names, **options):
    """The labels of queries and of keys of a picture of one head."""
    (axes, *_) = make_figure(whole_model(), PictureOptions(**options), names).axes
    return [[text.get_text() for text in each] for each in (axes.get_yticklabels(), axes.get_xticklabels())]


def test_repeated_tokens_have_their_position():
    shown = ["c·0", "a·1", "c·2", "'\\n'", "a·4", "b"]
    assert sides(Names("net")) == [shown, shown]
    assert sides(Names("net"), token_positions="none")[1] == ["c", "a", "c", "'\\n'", "a", "b"]
    assert sides(Names("net"), token_positions="all")[1] == ["c·0", "a·1", "c·2", "'\\n'·3", "a·4", "b·5"]


def test_labels_take_the_place_of_tokens_and_have_positions_if_asked():
    own = ["x", "x", "y", "z", "z", "z"]
    assert sides(Names("net", own)) == [own, own]
    assert sides(Names("net", own), token_positions="repeated")[1] == ["x·0", "x·1", "y", "z·3", "z·4", "z·5"]
    queries = sides(Names("net", queries=own))
    assert queries == [own, ["c·0", "a·1", "c·2", "'\\n'", "a·4", "b"]]
    with pytest.raises(InvalidRequest, match="6 labels") as refused:
        sides(Names("net", own[:5]))
    assert refused.value.param == "labels"


def test_chosen_tokens_keep_their_positions():
    found = whole_model()
    kept = found.layers[0].model_copy(update={"weights": found.layers[0].weights[:, [2]][..., [4, 0]]})
    reply = found.model_copy(update={"layers": [kept]})
    (axes, *_) = make_figure(reply, PictureOptions(), Names("net", rows=[2], columns=[4, 0])).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["c·2"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a·4", "c·0"]


def test_a_module_has_the_labels_of_its_request_as_they_are():
    weights = np.full((1, 6, 2), 0.5, np.float32)
    (axes, *_) = figure(reply_of(weights), Names("m", WORDS, WORDS, columns=[2, 5])).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["cat", "[SEP]"]
    (axes, *_) = figure(reply_of(weights), Names("m", columns=[2, 5])).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["2", "5"]


def test_a_position_is_not_cut_off():
    (long, _) = numbered(["antidisestablishmentarianism"] * 2, "repeated")
    assert long.endswith("…·0")
    assert len(long) == 18
    (cut, _) = ticks([long, "b"], 2, 1, 1.0, across=False, most_width=0.5).texts
    assert cut.endswith("…·0")
