"""The score of a query, dimension by dimension: what the page draws adds up to the score that the API answers."""

import json
import re

import numpy as np
import pytest

from tests.web.conftest import RECORDING, live

TEXT = "Kate met Tamiro in the park. Then Tam"


@pytest.fixture(scope="module")
def site(site_with_t5):
    return site_with_t5


def exported(page) -> dict:
    """What the view saves of its drawing: q, k, the products and the scores."""
    page.locator(".dimensions canvas").wait_for()
    page.get_by_label("What is saved").select_option(label="q · k by dimension")
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON", exact=True).click()
    return json.loads(download.value.path().read_text("utf-8"))


def drawn_signs(page, shown: dict) -> np.ndarray:
    """The signs of the products as the canvas shows them: 1 orange, −1 blue, 0 pale. ``[keys, dimensions]``"""
    keys, width = len(shown["k"]), len(shown["q"])
    pixels, wide, high = page.locator(".dimensions canvas").evaluate(
        "c => { const {data, width, height} = c.getContext('2d').getImageData(0, 0, c.width, c.height);"
        " return [Array.from(data), width, height] }"
    )
    image = np.array(pixels).reshape(high, wide, 4).astype(int)
    client_width = page.locator(".dimensions").evaluate("e => e.clientWidth")
    cell = max(200 / width, min(14, max(1.5, (max(620, client_width) - 104 - 2 * 122 - 3 * 18) / (2 * width))))
    x = (104 + cell * width + 18 + (np.arange(width) + 0.4) * cell).astype(int)
    y = 64 + np.arange(keys) * 18 + 9
    red, blue = (image[y][:, x, channel] for channel in (0, 2))
    return np.where(red - blue > 20, 1, np.where(blue - red > 20, -1, 0))


def check_drawing(page, shown: dict, scores: np.ndarray) -> None:
    """The parts are scale · q · k, add up to these scores, and are drawn in the colours of their signs."""
    parts = np.array(shown["products"])
    np.testing.assert_allclose(parts.sum(-1), scores, rtol=1e-3, atol=1e-4 * abs(scores).max())
    np.testing.assert_allclose(
        parts, shown["scale"] * np.array(shown["q"]) * np.array(shown["k"]), rtol=1e-4, atol=1e-6
    )
    signs = drawn_signs(page, shown)
    clear = abs(parts) > 0.25 * abs(parts).max()
    assert clear.any()
    np.testing.assert_array_equal(signs[clear], np.sign(parts)[clear])
    assert (signs[abs(parts) < 0.02 * abs(parts).max()] == 0).all()


def test_the_parts_of_a_recorded_score_add_up_to_the_api_s(visit):
    from attention_client.recording import Recording

    fields = live(Recording.load(RECORDING), 1) | {
        "return": ["scores", "weights"],
        "select": {"heads": [3], "queries": [8]},
    }
    reply = visit.http.post("/v1/attention/forward", json=fields).json()
    page = visit.open("#/query?layer=1&head=3&query=8")
    shown = exported(page)
    check_drawing(page, shown, np.array(reply["scores"])[0, 0])
    np.testing.assert_allclose(shown["weights"], reply["weights"][0][0], rtol=1e-4)
    section = page.get_by_role("region", name="q · k by dimension")
    section.scroll_into_view_if_needed()
    visit.picture("dimensions", page.locator(".dimensions canvas"))
    canvas = page.locator(".dimensions canvas")
    canvas.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    readout = section.locator(".readout")
    readout.filter(has_text=re.compile(r"^cat, dimension 1: ")).wait_for()
    part = float(re.search(r"= (\S+),", readout.inner_text())[1].replace("−", "-"))
    assert part == pytest.approx(shown["products"][2][1], rel=6e-3)
    assert page.locator(".tokens .key").all_inner_texts() == ["cat"]
    assert visit.violations() == []


@pytest.mark.parametrize("kind", ["rope", "alibi"])
def test_the_vectors_of_a_module_are_those_that_give_the_score(visit, kind):
    spec = {"masks": [{"name": "causal"}], "position": {"name": kind}}
    config = {"d_model": 32, "num_heads": 4, "num_kv_heads": 2, "spec": spec}
    assert visit.http.post("/v1/modules", json={"name": "page-turned", "config": config, "seed": 1}).is_success
    query = np.random.default_rng(0).normal(size=(6, 32)).round(2).tolist()
    chosen = {"heads": [2], "queries": [4]}
    fields = {"query": query, "return": ["q", "k", "scores", "masked_scores"], "select": chosen}
    reply = visit.http.post("/v1/modules/page-turned/forward", json=fields).json()
    page = visit.open(f"#/query?source=module:page-turned&input={json.dumps(query)}&head=2&query=4")
    shown = exported(page)
    check_drawing(page, shown, np.array(reply["scores"])[0, 0])
    np.testing.assert_allclose(shown["q"], np.array(reply["q"])[0, 0], rtol=1e-5)
    np.testing.assert_allclose(shown["k"], np.array(reply["k"])[0], rtol=1e-5)
    text = page.get_by_role("region", name="q · k by dimension").locator("p").first.inner_text()
    assert ("rotated by position" in text) == (kind == "rope")
    assert ("position bias" in text) == (kind == "alibi")
    visit.http.delete("/v1/modules/page-turned")


def test_a_whole_model_s_score_has_parts_after_its_rotation(visit):
    chosen = {"layers": [1], "select": {"heads": [0], "queries": [13]}, "top_k": 0}
    fields = {"text": TEXT, "return": ["scores", "q"]} | chosen
    reply = visit.http.post("/v1/models/tiny/forward", json=fields).json()["layers"][0]
    page = visit.open("#/query?source=model:tiny&layer=1&head=0&query=13")
    shown = exported(page)
    check_drawing(page, shown, np.array(reply["scores"])[0, 0])
    np.testing.assert_allclose(shown["q"], np.array(reply["q"])[0, 0], rtol=1e-4)
    assert "RoPE" in page.get_by_role("region", name="q · k by dimension").locator("p").first.inner_text()


def test_a_model_with_a_bias_and_no_scale_has_parts_and_steps_too(visit):
    chosen = {"layers": ["encoder.1"], "select": {"heads": [2], "queries": [3]}, "top_k": 0}
    fields = {"text": "the cat sat on the mat", "return": ["scores", "masked_scores"]} | chosen
    reply = visit.http.post("/v1/models/t5/forward", json=fields).json()["layers"][0]
    page = visit.open("#/query?source=model:t5&text=the+cat+sat+on+the+mat&layer=1&head=2&query=3")
    shown = exported(page)
    assert shown["scale"] == pytest.approx(1, abs=1e-4)
    check_drawing(page, shown, np.array(reply["scores"])[0, 0])
    rows = page.locator("table").first.locator("tbody tr")
    masked = [float(row.locator("td").nth(1).inner_text().replace("−", "-")) for row in rows.all()]
    np.testing.assert_allclose(masked, np.array(reply["masked_scores"])[0, 0], atol=6e-4)


def test_a_score_that_is_no_product_is_reported_to_have_no_parts(visit):
    config = {"d_model": 16, "num_heads": 2, "spec": {"score": {"name": "additive"}}}
    assert visit.http.post("/v1/modules", json={"name": "page-sums", "config": config}).is_success
    page = visit.open("#/query?source=module:page-sums")
    page.get_by_text("no sum of products").wait_for()
    assert page.locator(".dimensions").count() == 0
    visit.http.delete("/v1/modules/page-sums")


@pytest.mark.parametrize("visit", [{"viewport": {"width": 390, "height": 844}, "has_touch": True}], indirect=True)
def test_the_drawing_scrolls_on_a_phone(visit):
    page = visit.open("#/query?layer=1&head=3&query=8")
    drawing = page.locator(".dimensions")
    drawing.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert drawing.evaluate("e => e.scrollWidth") > 390
