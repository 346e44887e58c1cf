"""The map of effects over layers × heads: the change of a model's prediction without each head, in one request."""

import httpx
import numpy as np
import pytest

from tests.conftest import live_server
from tests.web.conftest import PHONE, facts, numbers

pytest.importorskip("transformers")
TEXT = "Kate met Tamiro in the park. Then Tam"
SWEEP = {"sweep": {"tap": "context", "set": 0, "over": ["layers", "heads"]}}


def lost(reply):
    """What the prediction loses, as the page shows it: above 0 where a head helps."""
    return -np.array(reply["effects"]["value"], np.float64)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server at which `tiny` is loaded."""
    with live_server(tmp_path_factory.mktemp("models")) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny"}, timeout=120).raise_for_status()
        yield url


def test_the_effects_of_a_model_open_with_the_map_of_its_heads(visit):
    requests = []
    visit.page.on("request", lambda each: each.url.endswith("/effects") and requests.append(each.url))
    page = visit.open("#/effects?source=model:tiny&layer=1")
    reply = visit.http.post("/v1/models/tiny/effects", json={"text": TEXT} | SWEEP).json()
    np.testing.assert_allclose(numbers(page), lost(reply), rtol=2e-3, atol=2e-6)
    assert len(requests) == 1
    most = divmod(int(np.argmax(np.abs(reply["effects"]["value"]))), 4)
    assert facts(page)["matters most"] == f"L{most[0]}H{most[1]}"
    rows = page.locator("table", has_text="The heads of L1").locator("tbody tr").all()
    without = [float(each.locator("td").first.inner_text().replace("−", "-")) for each in rows]
    np.testing.assert_allclose(without, reply["baseline"] + np.array(reply["effects"]["value"][1]), atol=6e-4)
    assert visit.violations() == []
    visit.picture("effects-map")
    canvas = page.locator("main canvas").first
    canvas.focus()
    for key in ("ArrowDown", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**#/edit?**layer=1**")
    page.get_by_role("button", name="Knock out L1H0", pressed=True).wait_for()
    page.get_by_role("link", name="Effects").click()
    page.get_by_text("On top of the edits of layers.1").wait_for()
    edited = {"text": TEXT, "edits": {"1": [{"tap": "context", "heads": [0], "set": 0}]}}
    on_top = visit.http.post("/v1/models/tiny/effects", json=edited | SWEEP).json()
    visit.drawn()
    np.testing.assert_allclose(numbers(page), lost(on_top), rtol=2e-3, atol=2e-6)
    page.get_by_label("Knock out in turn").select_option("heads")
    page.locator("main").get_by_text("On top of the edits context of L1H0").wait_for()


@PHONE
def test_the_map_of_effects_fits_a_phone(visit):
    page = visit.open("#/effects?source=model:tiny&layer=1")
    page.locator("table", has_text="The heads of L1").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.violations() == []


def test_paths_from_the_heads_of_a_layer_to_those_of_a_later_one(visit):
    page = visit.open("#/effects?source=model:tiny&layer=0&over=paths")
    paths = {"from": {"layer": 0}, "to": {"parts": ["k"], "layer": 1}}
    reply = visit.http.post("/v1/models/tiny/effects", json={"text": TEXT} | paths).json()
    np.testing.assert_allclose(numbers(page), lost(reply), rtol=2e-3, atol=2e-6)
    row, column = divmod(int(np.argmax(np.abs(reply["effects"]["value"]))), len(reply["swept"]["to"]))
    assert facts(page)["matters most"] == f"L0H{row} → L1H{column} k"
    assert visit.violations() == []
    page.get_by_label("Ends of the paths").select_option("others")
    page.wait_for_url("**ends=others**")
    visit.drawn()
    page = visit.open("#/effects?source=model:tiny&layer=0&over=paths&ends=others")
    others = paths | {"to": {"parts": ["mlps", "logits"]}}
    reply = visit.http.post("/v1/models/tiny/effects", json={"text": TEXT} | others).json()
    np.testing.assert_allclose(numbers(page), lost(reply), rtol=2e-3, atol=2e-6)


@PHONE
def test_the_map_of_paths_fits_a_phone(visit):
    page = visit.open("#/effects?source=model:tiny&layer=3&over=paths")
    page.get_by_text("paths in one request").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.violations() == []
