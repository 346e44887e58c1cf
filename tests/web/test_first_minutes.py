"""The first minutes on the page: pictures at any length and on any screen, views that open with a finding, the tour."""

import re
from io import BytesIO

import httpx
import numpy as np
import pytest
from PIL import Image

from attention_client import Client
from attention_contract.schemas.recordings import EXAMPLE_RECORDING, RecordingFile
from tests.conftest import live_server

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
ENLARGED = {"viewport": {"width": 853, "height": 533}}  # a laptop's 1280 × 800 at 150 %
WIDE = {"viewport": {"width": 1920, "height": 1080}}
LOOKS = ("overview", "head", "query", "learn", "edit", "effects", "rollout", "compare", "decode")
SEEN = 90
"""Pixels of a picture that must stand on the first screen."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with `tiny` resident."""
    pytest.importorskip("transformers")
    with live_server(tmp_path_factory.mktemp("models")) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny"}, timeout=120).raise_for_status()
        yield url


def looked_at(visit, view: str, **more: str):
    parameters = "".join(f"&{name}={value}" for name, value in more.items())
    page = visit.open(f"#/{view}?source=model:tiny{parameters}")
    page.locator("main canvas, main svg.drawing").first.wait_for()
    visit.drawn()
    return page


@pytest.mark.parametrize("visit", [PHONE, ENLARGED], indirect=True, ids=["phone", "150 %"])
def test_a_picture_stands_on_the_first_screen_below_controls_of_one_line(visit):
    for view in LOOKS:
        page = looked_at(visit, view)
        box = page.locator("main canvas:visible, main svg.drawing:visible").first.bounding_box()
        screen = page.viewport_size
        assert screen["height"] - box["y"] >= min(SEEN, box["height"]), (view, box)
        assert box["width"] <= screen["width"]
        folded = page.locator("details.controls")
        assert folded.count() >= 1, view
        assert all(each.bounding_box()["height"] < 40 for each in folded.all()), view
    page.locator("details.controls summary").first.click()
    page.get_by_label("Decode with").or_(page.get_by_label("Temperature")).first.wait_for()


def test_maps_grow_with_the_screen(visit):
    sides = []
    for width, height in ((1100, 760), (1920, 1080)):
        visit.page.set_viewport_size({"width": width, "height": height})
        page = looked_at(visit, "overview")
        small, large = page.locator(".multiples canvas").first, page.locator(".large canvas").last
        sides.append((small.bounding_box()["width"], large.bounding_box()["width"]))
    (small, large), (wide_small, wide_large) = sides
    assert wide_small > 1.15 * small
    assert wide_large > 1.3 * large


def test_a_map_follows_the_height_of_the_window(visit):
    page = visit.page
    page.set_viewport_size({"width": 1100, "height": 760})
    looked_at(visit, "edit")
    before = page.locator(".stage canvas").first.bounding_box()["height"]
    page.set_viewport_size({"width": 1100, "height": 980})
    grown = "(before) => document.querySelector('.stage canvas').getBoundingClientRect().height > 1.1 * before"
    page.wait_for_function(grown, arg=before)


@pytest.mark.parametrize("visit", [WIDE], indirect=True)
@pytest.mark.parametrize("tokens", [811, 4000])
def test_a_long_text_is_no_blank_square_and_its_large_head_is_large(visit, tokens):
    """A causal head that looks at everything alike: weights of 1 / i, but for the first query's 1."""
    even = np.tril(np.ones((tokens, tokens), np.float32)) / np.arange(1, tokens + 1, dtype=np.float32)[:, None]
    recording = RecordingFile.model_validate(EXAMPLE_RECORDING | {
        "tokens": {"layers": [f"t{at}" for at in range(tokens)]},
        "attentions": [{"name": "layers.0", "heads": ["L0H0"]}], "layers": {"0.weights": even[None]},
    })  # fmt: skip
    with Client(visit.url) as client:
        id = client.recordings.create(recording).id  # noqa: A001
    page = visit.open(f"#/overview?source=stored:{id}")
    visit.screenshot()  # the cells are painted a moment after their maps are laid out
    for canvas, least in ((page.locator(".multiples canvas"), 80), (page.locator(".large canvas").last, 500)):
        box = canvas.bounding_box()
        assert box["width"] >= least
        shown = np.asarray(Image.open(BytesIO(canvas.screenshot())).convert("RGB"), int)
        side = min(shown.shape[:2])
        below = shown[int(0.6 * side) : int(0.95 * side), int(0.1 * side) : int(0.5 * side)]
        assert (np.abs(below - shown[int(0.1 * side), int(0.8 * side)]).max(-1) > 24).mean() > 0.95
    assert page.get_by_label("Colour range").input_value() == "log"
    with Client(visit.url) as client:
        client.recordings.delete(id)


@pytest.mark.parametrize("view", ["query", "learn", "rollout"])
def test_a_view_of_one_query_opens_at_the_last_token(visit, view):
    page = looked_at(visit, view)
    assert page.get_by_role("combobox", name="Query").input_value() == "13"
    if view == "learn":
        shares = page.locator("table").first.locator("td:nth-child(3)")
        before = shares.all_inner_texts()
        page.get_by_label("Temperature").fill("2")
        page.wait_for_url("**tau=4**")
        assert shares.all_inner_texts() != before


def test_the_tour_leads_from_finding_to_finding_and_rings_their_cells(visit):
    page = visit.open("#/tour")
    page.get_by_role("button", name="Begin").click()
    strip = page.get_by_role("region", name="Tour")
    titles = []
    for stop in range(1, 6):
        strip.get_by_text(f"{stop} of 5").wait_for()
        visit.drawn()
        titles.append(strip.locator("b").inner_text())
        if stop == 1:
            canvas = page.locator(".stage canvas").last
            canvas.wait_for()
            shown = np.asarray(Image.open(BytesIO(canvas.screenshot())).convert("RGB"), int)
            ring = np.abs(shown - (168, 74, 22)).max(-1) < 40  # the ink of marks
            assert ring.sum() > 13 * 40  # 13 cells, each with a ring
        if stop < 5:
            strip.get_by_role("link", name="Next").click()
    assert len(set(titles)) == 5
    bars = page.locator("svg.drawing")
    bars.get_by_text("ir", exact=True).wait_for()  # the token that is lost, though others are likelier
    assert bars.locator("rect[stroke]").count() == 1
    page.get_by_role("link", name="Gradient").or_(page.get_by_role("link", name="Explain")).first.click()
    strip.get_by_role("button", name="Show it again").click()
    page.wait_for_url("**#/decode?**")
    strip.get_by_role("button", name="Look for yourself").click()
    strip.wait_for(state="detached")


def test_the_memory_bar_counts_whole_models(visit):
    page = visit.open("#/model")
    memory = visit.http.get("/v1").json()["memory"]
    assert memory["models_bytes"] > 0
    text = page.locator(".legend .models b").inner_text()
    assert text != "0 B"
    assert page.locator(".bar .models").bounding_box()["width"] >= 2


def test_bars_of_probabilities_have_the_length_that_they_say(visit):
    widths = {}
    for knocked in ("", "1.0"):
        page = looked_at(visit, "decode", knocked=knocked)
        drawing = page.locator("svg.drawing").last
        first = drawing.locator("rect").first
        texts = drawing.locator("text").all_text_contents()
        number = next(float(each) for each in texts if re.fullmatch(r"0\.\d+", each))
        widths[number] = float(first.get_attribute("width"))
    (low, short), (high, long) = sorted(widths.items())
    assert high > 2 * low
    assert short / long == pytest.approx(low / high, rel=1e-2)


@pytest.mark.parametrize("visit", [{"viewport": {"width": 1280, "height": 800}}], indirect=True)
def test_no_statistic_hides_behind_a_scroll_bar(visit):
    page = looked_at(visit, "overview")
    table = page.get_by_role("region", name=re.compile("Statistics of"))
    assert table.locator("th", has_text="induction").is_visible()
    assert table.evaluate("(each) => each.scrollWidth <= each.clientWidth")


def test_a_gradient_names_its_number_and_the_positions_of_repeated_tokens(visit):
    page = looked_at(visit, "gradient")
    assert "log-probability of ir after 13 am" in page.locator("main").inner_text()
    assert "the likeliest: ir" in page.locator("label", has_text=re.compile("^Token")).inner_text()
    rows = page.locator("table").first.locator("tbody th").all_inner_texts()
    assert {"4 am", "13 am", "3 ·T", "12 ·T", "Kate"} <= set(rows)
    page.get_by_label("L is").select_option("sum")
    page.get_by_text("L is the sum of this attention's output.").wait_for()
    page = visit.open("#/gradient?source=builtin:cat")
    page.get_by_text("L is the sum of this attention's output at token 12 [SEP]").wait_for()


def test_a_saved_overview_has_a_row_for_each_layer_and_a_saved_head_tells_masked_from_tiny(visit):
    page = looked_at(visit, "overview")
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG", exact=True).click()
    drawn = download.value.path().read_text("utf-8")
    places = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>(L\dH\d)<', drawn)
    assert len(places) == 16
    assert len({y for _, y, _ in places}) == len({x for x, _, _ in places}) == 4
    page = looked_at(visit, "head", layer="1")
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG", exact=True).click()
    drawn = download.value.path().read_text("utf-8")
    assert ">.00<" not in drawn
    assert ">~0<" in drawn
    assert ">exactly 0<" in drawn
    assert drawn.count("<path") >= 14 * 13 / 2  # a stroke through each masked cell
