"""Layers without a softmax, drawn about zero, and keys that a layer did not choose, drawn unlike a weight of zero."""

import httpx
import numpy as np
import pytest

from tests.conftest import live_server
from tests.web.conftest import PHONE, numbers

tiny_models = pytest.importorskip("tests.client.tiny_models")
model_types = pytest.importorskip("tools.models_walk.model_types")
TEXT = "the cat sat on the mat"
PIXELS = """(colours) => {
  const canvas = document.querySelector(".stage canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const is = (at) => colours.some((colour) => colour.every((channel, i) => data[at + i] === channel));
  return Array.from({ length: data.length / 4 }, (_, i) => 4 * i).filter(is).length;
}"""
"""The pixels of the first map that have one of these colours."""
UNCHOSEN = [[0xC9, 0xC6, 0xBD]]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with a small Qwen3.5, whose layer 0 is linear, and a small sparse GLM, both random."""
    folder = tmp_path_factory.mktemp("models")
    for name, model_type in (("hybrid", "qwen3_5"), ("sparse", "glm_moe_dsa")):
        model_types.built(model_type).save_pretrained(folder / name)
        tiny_models.tokenizer().save_pretrained(folder / name)
    with live_server(folder) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "sparse"}, timeout=120).raise_for_status()
        yield url


def weights_of(visit, model, layer, head, part="weights"):
    fields = {"text": TEXT, "layers": [layer]}
    (found,) = visit.http.post(f"/v1/models/{model}/weights", json=fields).json()["layers"]
    return np.array(found[part])[head]


@pytest.mark.parametrize("resident", [False, True])
def test_all_layers_are_shown_in_their_order(visit, resident):
    if resident:
        visit.http.post("/v1/models", json={"checkpoint": "hybrid"}).raise_for_status()
    page = visit.open(f"#/overview?source=model:hybrid&text={TEXT}&layer=1&head=1")
    page.get_by_role("heading", name="L1H1").wait_for()
    assert page.locator(".multiples a").count() == 8
    np.testing.assert_allclose(numbers(page), weights_of(visit, "hybrid", 1, 1), rtol=2e-3, atol=1e-6)
    assert visit.violations() == []


def test_implicit_weights_are_drawn_about_zero_with_statistics_of_their_shares(visit):
    page = visit.open(f"#/overview?source=model:hybrid&text={TEXT}&layer=0&head=1")
    page.get_by_role("heading", name="L0H1").wait_for()
    page.get_by_text("They may be negative, and do not sum to one. Their statistics are of the shares").wait_for()
    expected = weights_of(visit, "hybrid", 0, 1)
    assert expected.min() < 0
    np.testing.assert_allclose(numbers(page), expected, rtol=2e-3, atol=1e-6)
    fields = {"text": TEXT, "layers": [0], "statistics": ["entropy", "max_weight"], "normalize": "absolute"}
    (found,) = visit.http.post("/v1/models/hybrid/weights", json=fields).json()["layers"]
    row = page.locator("table.many tbody tr", has_text="L0H1").locator("td")
    shown = [float(row.nth(at).inner_text()) for at in (0, 2)]
    expected = [found["statistics"][name][1] for name in ("entropy", "max_weight")]
    np.testing.assert_allclose(shown, expected, atol=1e-3)
    page = visit.open(f"#/head?source=model:hybrid&text={TEXT}&layer=0&head=1")
    most = np.abs(weights_of(visit, "hybrid", 0, 1)).max()
    low, high = page.locator(".scale .ends").inner_text().split()
    assert (float(low.replace("−", "-")), float(high)) == pytest.approx((-most, most), rel=5e-3)
    assert page.get_by_label("Colour range").count() == 0
    assert visit.violations() == []


@pytest.mark.parametrize(
    ("view", "why"),
    [
        ("rollout", "Rollout follows the shares of attention through every layer. layers.0 has none"),
        ("edit", "has no softmax, so that no q and k say how its weights come about"),
        ("query", "Its weights are implicit"),
        ("compare", "The similarity of heads compares their shares of attention"),
    ],
)
def test_a_view_that_needs_a_softmax_says_why_not(visit, view, why):
    page = visit.open(f"#/{view}?source=model:hybrid&text={TEXT}&layer=0&head=1")
    page.locator("#main").get_by_text(why).wait_for()
    assert page.get_by_role("alert").count() == 0
    assert visit.violations() == []


def test_a_key_that_was_not_chosen_is_drawn_unlike_a_weight_of_zero(visit):
    page = visit.open(f"#/head?source=model:sparse&text={TEXT} and the dog sat on the rug&layer=0&head=1")
    page.get_by_text("not chosen: its query may not look at it").wait_for()
    assert page.evaluate(PIXELS, UNCHOSEN) > 1000
    visit.picture("chosen")
    canvas = page.locator(".stage canvas")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.locator("output.readout", has_text="not chosen").wait_for()
    assert visit.violations() == []
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG", exact=True).click()
    assert "not chosen" in download.value.path().read_text("utf-8")
    page = visit.open(f"#/head?source=model:hybrid&text={TEXT}&layer=1&head=1")
    page.locator(".stage canvas").wait_for()
    assert page.get_by_text("not chosen").count() == 0
    assert page.evaluate(PIXELS, UNCHOSEN) == 0


@PHONE
def test_signed_and_chosen_maps_fit_a_phone(visit):
    visit.http.post("/v1/models", json={"checkpoint": "hybrid"}, timeout=120).raise_for_status()
    for model in ("hybrid", "sparse"):
        for view in ("overview", "head", "query"):
            page = visit.open(f"#/{view}?source=model:{model}&text={TEXT}&layer=0")
            page.locator("#main").locator("table, canvas").first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, (model, view)
    assert visit.violations() == []


def test_a_reader_who_waits_sees_who_is_answered_and_who_waits(visit):
    info = httpx.get(f"{visit.url}/v1/models/hybrid").json() | {"state": "resident", "running": 3, "waiting": 2}
    visit.page.route("**/v1/models/hybrid", lambda route: route.fulfill(json=info))
    visit.page.route("**/v1/models/hybrid/weights", lambda route: None)
    visit.page.goto(f"{visit.url}/#/overview?source=model:hybrid&text={TEXT}")
    visit.page.get_by_text("Opening… hybrid has 3 running, 2 waiting.").wait_for()
