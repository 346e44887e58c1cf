"""Models whose layers, all or some, mix tokens by a running state with weights of each channel."""

import httpx
import numpy as np
import pytest

from tests.conftest import live_server
from tests.web.conftest import PHONE, numbers

tiny_models = pytest.importorskip("tests.client.tiny_models")
model_types = pytest.importorskip("tools.models_walk.model_types")
TEXT = "the cat sat on the mat"
VIEWS = [
    "overview", "head", "query", "compare", "edit", "effects", "decode", "gradient", "lens", "context", "similarity",
    "rollout", "learn",
]  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with a Mamba, and a Jamba whose layer 1 attends, both random."""
    folder = tmp_path_factory.mktemp("models")
    for model_type in ("mamba", "jamba"):
        model_types.built(model_type).save_pretrained(folder / model_type)
        tiny_models.tokenizer().save_pretrained(folder / model_type)
    with live_server(folder) as url:
        yield url


def weights_of(visit, model, layer, head):
    fields = {"text": TEXT, "layers": [layer]}
    (found,) = visit.http.post(f"/v1/models/{model}/weights", json=fields).json()["layers"]
    return np.array(found["weights"])[head]


def asked(visit):
    """The ends of the paths that the page posts to, from now on."""
    found = []
    visit.page.on("request", lambda each: found.append(each.url.rpartition("/")[2]) if each.method == "POST" else None)
    return found


@pytest.mark.parametrize("model", ["mamba", "jamba"])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_answers_or_says_why_not(visit, view, model):
    page = visit.open(f"#/{view}?source=model:{model}&text={TEXT}")
    page.locator("main h2").wait_for()
    assert page.get_by_role("alert").count() == 0
    assert visit.faults == []  # no request was refused


@PHONE
@pytest.mark.parametrize("view", ["overview", "effects", "lens", "learn", "edit"])
def test_views_fit_a_phone(visit, view):
    page = visit.open(f"#/{view}?source=model:mamba&text={TEXT}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.violations() == []


def test_the_overview_shows_the_channels_of_one_layer_and_another_can_be_chosen(visit):
    page = visit.open(f"#/overview?source=model:mamba&text={TEXT}")
    page.get_by_role("heading", name="L0H0").wait_for()
    assert page.locator(".multiples a").count() == 48
    np.testing.assert_allclose(numbers(page), weights_of(visit, "mamba", 0, 0), rtol=2e-3, atol=1e-6)
    page.locator(".subject label", has_text="Layer").locator("select").select_option("layers.1")
    page.get_by_role("heading", name="L1H0").wait_for()
    assert page.locator(".multiples a").count() == 48
    np.testing.assert_allclose(numbers(page), weights_of(visit, "mamba", 1, 0), rtol=2e-3, atol=1e-6)
    assert visit.violations() == []


def test_an_attention_among_layers_of_channels_is_one_choice_away(visit):
    page = visit.open(f"#/overview?source=model:jamba&text={TEXT}&layer=1")
    page.get_by_role("heading", name="L1H0").wait_for()
    assert page.locator(".multiples a").count() == 4
    page.get_by_text("layers.0: each channel has its own weights").wait_for()


def test_a_view_with_a_question_of_its_own_asks_for_no_weights(visit):
    for model, source in (("mamba", "mamba"), ("tiny", "tiny")):
        for view in ("lens", "effects", "edit"):
            found = asked(visit)
            visit.open(f"#/{view}?source=model:{source}&text=Kate met Tam")
            assert "weights" not in found, (model, view)


def test_the_effects_of_channels_are_those_of_the_chosen_layer(visit):
    page = visit.open(f"#/effects?source=model:mamba&text={TEXT}&layer=1")
    page.get_by_text("the heads of this layer: the change of the prediction").wait_for(state="attached")
    body = {"text": TEXT, "layers": [1], "sweep": {"tap": "context", "set": 0, "over": ["layers", "heads"]}}
    found = visit.http.post("/v1/models/mamba/effects", json=body).json()["effects"]["value"]
    np.testing.assert_allclose(numbers(page), -np.array(found), rtol=2e-2, atol=1e-3)


def test_a_head_without_a_softmax_is_taken_away_from_the_prediction(visit):
    page = visit.open(f"#/edit?source=model:mamba&text={TEXT}")
    assert page.get_by_text("Hide later keys").count() == 0
    page.get_by_role("button", name="Knock out L0H1", exact=True).click()
    page.get_by_role("heading", name="Prediction").wait_for()
    edits = {"0": [{"tap": "context", "heads": [1], "set": 0}]}
    body = {"text": TEXT, "edits": edits, "top_k": 1}
    (one,) = visit.http.post("/v1/models/mamba/forward", json=body).json()["predictions"]
    [best] = one["top"]
    row = page.locator("table", has_text="Likeliest tokens").locator("tbody tr", has_text=best["token"].strip())
    assert float(row.locator("td").nth(1).inner_text()) == pytest.approx(best["probability"], rel=1e-2)


def test_generated_tokens_come_without_attention(visit):
    page = visit.open(f"#/decode?source=model:mamba&text={TEXT}&length=3")
    page.get_by_role("button", name="Generate").click()
    page.get_by_text("mix tokens by a running state, so that no head looks at a token").wait_for()
    body = {"model": "mamba", "prompt": TEXT, "max_tokens": 3, "temperature": 0, "logprobs": 1}
    (choice,) = httpx.post(f"{visit.url}/v1/completions", json=body, timeout=60).json()["choices"]
    expected = choice["logprobs"]["tokens"]
    shown = page.locator(".generated button").all_inner_texts()
    assert [each.strip("·") for each in shown] == [each.strip() for each in expected]


def test_learn_tells_the_rule_of_a_running_state(visit):
    page = visit.open(f"#/learn?source=model:mamba&text={TEXT}")
    page.get_by_text("The layer keeps a state S").wait_for()
    assert page.get_by_label("Temperature").count() == 0
    assert visit.violations() == []
