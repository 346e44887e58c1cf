"""Wide screens have a picture at the left and its facts at the right; no screen is wider than itself."""

import re

import httpx
import pytest

from tests.conftest import live_server

pytest.importorskip("transformers")
EDITS = '[{"tap":"context","heads":[0],"set":0}]'
VIEWS = {
    "head": ("#/head?source=model:tiny&layer=1", ".stage canvas", ".facts"),
    "effects": ("#/effects?source=model:tiny", ".stage canvas", ".facts"),
    "lens": ("#/lens?source=model:tiny", ".lens table", ".told table"),
    "edit": (f"#/edit?source=model:tiny&layer=1&edits={EDITS}", ".stage canvas", ".facts"),
    "find": ("#/find?source=model:tiny&texts=own", ".scatter svg", ".found .facts"),
}
"""The address of a view, its picture and its facts."""
TEXTS = "Kate met Tamiro in the park. Then Tamiro went home.\nThe cat sat on the mat. The dog sat on the rug."


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server at which `tiny` is loaded."""
    with live_server(tmp_path_factory.mktemp("models")) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny"}, timeout=120).raise_for_status()
        yield url


def sized(width, height):
    return {"viewport": {"width": width, "height": height}}


@pytest.mark.parametrize("visit", [sized(1600, 950), sized(1920, 1080)], indirect=True)
@pytest.mark.parametrize("view", VIEWS)
def test_a_wide_screen_has_the_facts_beside_the_picture(visit, view):
    address, picture, told = VIEWS[view]
    page = visit.open(address)
    if view == "find":
        page.get_by_role("textbox", name="Texts").fill(TEXTS)
        page.get_by_role("textbox", name="Texts").blur()
        page.get_by_role("button", name="Go through 2 texts").click()
    page.locator(told).first.wait_for()
    visit.drawn()
    left, right = (page.locator(each).first.bounding_box() for each in (picture, told))
    assert right["x"] >= left["x"] + left["width"]
    assert right["y"] < left["y"] + left["height"]  # beside, not below
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert visit.violations() == []


@pytest.mark.parametrize("visit", [sized(1280, 900)], indirect=True)
def test_a_usual_screen_has_the_facts_below_the_picture(visit):
    page = visit.open(VIEWS["head"][0])
    picture, told = (page.locator(each).first.bounding_box() for each in VIEWS["head"][1:])
    assert told["y"] >= picture["y"] + picture["height"]


@pytest.mark.parametrize(
    ("view", "focused"),
    [("overview", "A"), ("head", "CANVAS"), ("lens", "BUTTON"), ("similarity", "MAIN"), ("text", "MAIN")],
)
def test_the_first_tab_leads_past_everything_to_the_map(visit, view, focused):
    page = visit.open(f"#/{view}?source=model:tiny")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the map"
    assert page.get_by_role("link", name="Skip to the map").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.tagName") == focused
    assert page.evaluate("document.activeElement.closest('main') !== null")


@pytest.mark.parametrize("visit", [sized(390, 844), sized(1280, 900)], indirect=True)
def test_the_tour_is_one_link_away_on_every_screen(visit):
    page = visit.open("#/overview?source=model:tiny")
    link = page.locator("header").get_by_role("link", name=re.compile("Tour( of five findings)?$"))
    assert link.is_visible()
    assert "underline" in link.evaluate("link => getComputedStyle(link).textDecorationLine")
    link.click()
    page.wait_for_url("**#/tour?**")


@pytest.mark.parametrize("visit", [sized(390, 844), sized(1280, 900)], indirect=True)
def test_a_query_s_numbers_are_not_cut(visit):
    page = visit.open("#/query?source=model:tiny&layer=1")
    table = page.locator("table", has_text="weight").first
    table.wait_for()
    scroll = table.locator("xpath=..")
    assert scroll.evaluate("each => each.scrollWidth <= each.clientWidth")
    assert page.get_by_text("This token may look at all 14 keys.").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
