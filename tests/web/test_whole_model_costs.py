"""Cost and circuits of the model that ships, in a browser: no dead end, and numbers that are the API's."""

import re

import httpx
import pytest

from tests.conftest import live_server
from tests.web.conftest import PHONE

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server without modules and checkpoints of its own, at which the model is loaded."""
    with live_server(tmp_path_factory.mktemp("models")) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny"}, timeout=120).raise_for_status()
        yield url


def test_the_cost_of_a_whole_model_is_the_api_s(visit):
    page = visit.open("#/cost?source=model:tiny&length=448&new_tokens=64&batch=2")
    page.locator("table caption", has_text="Cost of tiny").wait_for()
    costs = visit.http.post("/v1/models/tiny/complexity", json={"length": 448, "new_tokens": 64, "batch": 2}).json()
    sentence = re.sub(r"(?<=\d)\s(?=\d)", "", page.locator(".answer p").first.inner_text())
    assert f"There is memory for {costs['max_batch']} texts of 448 tokens, each with 64 new tokens, at once" in sentence
    assert f"Each of 2 texts may have at most {costs['max_length']} tokens" in sentence
    assert "215 k parameters" in sentence
    assert page.locator("svg.drawing").count() == 3
    rows = page.locator("tbody tr").all_inner_texts()
    assert [int(row.split()[0]) for row in rows] == [4, 7, 14, 28, 56, 112, 224, 448]
    assert "with 64 new tokens" in page.locator("svg.drawing").last.text_content()
    page.get_by_label("New tokens").fill("0")
    page.get_by_label("New tokens").press("Tab")
    page.wait_for_url("**new_tokens=0**")
    page.get_by_text(re.compile(r"texts of 448 tokens at once")).wait_for()
    assert visit.violations() == []
    page.locator("main form select, main .fields select").first.select_option("-")
    page.get_by_label("Heads h").wait_for()  # of raw attention
    page.locator("main form select, main .fields select").first.select_option("model:tiny")
    page.get_by_label("New tokens").wait_for()


def test_a_length_beyond_the_model_s_positions_is_cut(visit):
    page = visit.open("#/cost?source=model:tiny&length=9999&new_tokens=100")
    page.locator("table caption", has_text="Cost of tiny").wait_for()
    assert page.get_by_label("Tokens of the text").input_value() == "412"


@PHONE
def test_the_cost_of_a_whole_model_fits_a_phone(visit):
    page = visit.open("#/cost?source=model:tiny")
    page.locator("table caption", has_text="Cost of tiny").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_one_click_leads_from_a_whole_model_to_its_circuits(visit):
    page = visit.open("#/circuits?source=model:tiny&layer=2")
    page.get_by_role("button", name="Import all 4 layers of tiny").click()
    page.locator("table caption", has_text="Circuits by head").wait_for()
    assert page.locator("main .fields select").first.input_value() == "tiny.0"
    assert [each["name"] for each in visit.http.get("/v1/modules").json()["modules"]] == [f"tiny.{i}" for i in range(4)]
    reply = visit.http.post("/v1/modules/tiny.2/circuits", json={"parts": ["qk"]}).json()
    page = visit.open("#/circuits?source=model:tiny&layer=2")  # the module of that layer, now that there is one
    page.locator("table caption", has_text="Circuits by head").wait_for()
    assert page.locator("main .fields select").first.input_value() == "tiny.2"
    cells = page.locator("table", has_text="Circuits by head").locator("tbody tr").first.locator("td")
    assert float(cells.first.inner_text()) == pytest.approx(reply["qk"]["norm"][0], rel=1e-3)
    assert visit.violations() == []
