"""Pictures of lenses: each cell has its token, and the colour of its number."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from tests.pictures.test_figures import cells_of, drawn_arrays, figure

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import LayerLens, LensReading, LensTop, ModelLensReply
from attention_contract.schemas.prompts import ModelRan, TokenLabelsReply
from attention_pictures.lens.lens_grid import grid_of

RAN = ModelRan(
    model="net", architecture="Net", device="cpu", dtype="float32", kernels=[], compute_ms=1, queue_ms=0, peak_bytes=1
)
TOKENS = [" the", " cat", " <b>", " sat"]
POSITIONS = [1, 2, 3]


def top(*shape, rng, probabilities=False):
    numbers = np.sort(rng.random((*shape, 2)).astype(np.float32), -1)[..., ::-1]
    ids = rng.integers(0, len(TOKENS), (*shape, 2))
    return LensTop(ids=ids, logits=numbers, **({"probabilities": numbers} if probabilities else {}))


def reply(rng, *, hidden=True, heads=True, top_k=True, targets=(), texts=0):
    batch = (texts,) if texts else ()
    layers = []
    for layer in range(2):
        parts = {}
        for name, shape, wanted in (("hidden", (*batch, 3), hidden), ("heads", (*batch, 5, 3), heads)):
            if wanted:
                found = {"top": top(*shape, rng=rng, probabilities=name == "hidden")} if top_k else {}
                if targets:
                    found["targets"] = rng.normal(size=(*shape, len(targets))).astype(np.float32)
                parts[name] = LensReading(**found)
        layers.append(LayerLens(layer=layer, **parts))
    labels = TokenLabelsReply(tokens=TOKENS, ids=[0, 1, 2, 3], spans=[None] * 4)
    return ModelLensReply(
        labels=[labels] * texts if texts else labels, ran=RAN, kind="logit", layers=layers, targets=list(targets),
        positions=[POSITIONS] * texts if texts else POSITIONS, names={str(at): each for at, each in enumerate(TOKENS)},
    )  # fmt: skip


def written(made):
    """The texts in the cells of a figure."""
    return [each.get_text() for each in made.axes[0].texts]


def test_each_cell_has_the_likeliest_token_and_its_probability(rng):
    given = reply(rng)
    made = figure(given)
    (values,) = drawn_arrays(made)
    np.testing.assert_array_equal(values, [layer.hidden.top.probabilities[:, 0] for layer in given.layers])
    expected = [TOKENS[token].strip() for layer in given.layers for token in layer.hidden.top.ids[:, 0]]
    assert written(made) == expected
    assert [each.get_text() for each in made.axes[0].get_xticklabels()] == ["cat", "<b>", "sat"]
    assert float(cells_of(made.axes[0]).norm(1.0)) == 1


def test_heads_have_the_colours_of_a_target_or_of_the_difference_of_two(rng):
    given = reply(rng, hidden=False, targets=(1, 3))
    made = figure(given)
    (values,) = drawn_arrays(made)
    expected = np.concatenate([layer.heads.targets[..., 0] - layer.heads.targets[..., 1] for layer in given.layers])
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    norm = cells_of(made.axes[0]).norm
    assert float(norm(0.0)) == pytest.approx(0.5)
    assert [each.get_text() for each in made.axes[0].get_yticklabels()][:6] == [*(f"L0H{i}" for i in range(5)), "L1H0"]
    assert len(written(made)) == 30
    assert grid_of(reply(rng, top_k=False, targets=(1,)), None).quantity == "logit of cat"


def test_one_of_several_texts_is_drawn(rng):
    given = reply(rng, heads=False, texts=2)
    (values,) = drawn_arrays(figure(given, sequence=1))
    np.testing.assert_array_equal(values, [layer.hidden.top.probabilities[1, :, 0] for layer in given.layers])
    with pytest.raises(InvalidRequest, match="there is no sequence 2"):
        figure(given, sequence=2)


def test_of_more_tokens_than_fit_the_last_are_drawn(rng):
    given = reply(rng, heads=False)
    long = [LayerLens(layer=0, hidden=LensReading(top=top(400, rng=rng, probabilities=True)))]
    labels = given.labels.model_copy(update={"tokens": [str(at) for at in range(400)]})
    made = figure(given.model_copy(update={"layers": long, "positions": list(range(400)), "labels": labels}))
    (values,) = drawn_arrays(made)
    assert 1 < values.shape[1] < 40
    np.testing.assert_array_equal(values[0], long[0].hidden.top.probabilities[-values.shape[1] :, 0])
    assert any(f"the last {values.shape[1]} of 400 tokens" in each.get_text() for each in made.texts)


def test_a_reply_without_readings_has_no_picture(rng):
    given = reply(rng, hidden=False, heads=False)
    with pytest.raises(InvalidRequest, match="at least one layer"):
        figure(given)
    assert "<caption>ModelLensReply</caption>" in given._repr_html_()


def test_a_notebook_shows_a_table_whose_tokens_are_no_markup(rng):
    given = reply(rng, heads=False)
    shown = given._repr_html_()
    assert shown.count("<td") == 6
    assert "<b>" not in shown
    assert "&lt;b&gt;" in shown
    assert reply(rng, heads=False, texts=2)._repr_html_().count("<table") == 2
    assert given.plot().data.startswith(b"<?xml")
