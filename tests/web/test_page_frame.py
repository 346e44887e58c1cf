"""What the page has around its views: sessions, costs, saving, groups, the address, undo, and access for everyone."""

import json
import re

import numpy as np
import pytest

from attention_client import Client
from attention_contract.schemas.recordings import EXAMPLE_RECORDING, RecordingFile
from tests.web.conftest import DARK, NEEDS_AXE, PHONE, facts

VIEWS = (
    "model", "text", "overview", "head", "query", "compare", "edit", "effects", "gradient", "rollout", "circuits",
    "decode", "cost", "learn", "tour", "find", "steer", "probe",
)  # fmt: skip


def test_a_session_is_stepped_and_ended(visit):
    config = {"d_model": 8, "num_heads": 2, "spec": {"masks": [{"name": "causal"}]}}
    assert visit.http.post("/v1/modules", json={"name": "page-steps", "config": config}).is_success
    # The first session of a process compiles its loops: six seconds and more without a cache on the disk.
    opened = visit.http.post("/v1/modules/page-steps/sessions", json={"capacity": 8}).json()
    visit.http.delete(f"/v1/sessions/{opened['session']}")
    page = visit.open("#/decode?decode=page-steps")
    page.get_by_role("button", name="Open a session").click()
    page.get_by_role("button", name="10 steps").click()
    page.locator("dd", has_text=re.compile("^10$")).first.wait_for()
    page.get_by_role("button", name="Step", exact=True).click()
    page.locator("dd", has_text=re.compile("^11$")).first.wait_for()
    page.reload()  # the tab keeps the weights of the steps
    page.locator("dd", has_text=re.compile("^11$")).first.wait_for()
    visit.picture("decode")
    page.get_by_text("As a table").click()
    page.locator("tbody tr").nth(10).wait_for()
    last = page.locator("tbody tr").nth(10).locator("td").all_inner_texts()
    assert sum(map(float, last)) == pytest.approx(1, abs=1e-2)
    page.get_by_role("button", name="Forget the last token").click()
    page.locator("dd", has_text=re.compile("^10$")).first.wait_for()
    page.get_by_role("button", name="End the session").click()
    page.get_by_role("button", name="Open a session").wait_for()
    assert visit.http.get("/v1/sessions").json()["sessions"] == []
    visit.http.delete("/v1/modules/page-steps")


def test_formulas_come_with_the_numbers_at_hand(visit):
    page = visit.open("#/learn?layer=1&head=3&query=8")
    rows = [row.locator("td").all_inner_texts() for row in page.locator("table").first.locator("tbody tr").all()]
    assert len(rows) == 13
    assert all(abs(float(share) - float(weight)) < 1e-4 for _, share, weight in rows)
    page.get_by_label("Temperature").fill("-3")
    page.wait_for_url("**tau=0.125**")
    shares = [float(text) for text in page.locator("table").first.locator("td:nth-child(3)").all_inner_texts()]
    assert max(shares) > 0.5
    assert "Vaswani" in page.locator("table").last.inner_text()
    visit.picture("learn")


def test_formulas_are_those_of_the_module(visit):
    spec = {"score": {"name": "additive"}, "normalizer": {"name": "softmax", "sinks": True}}
    config = {"d_model": 8, "num_heads": 2, "spec": spec}
    assert visit.http.post("/v1/modules", json={"name": "page-sinks", "config": config}).is_success
    page = visit.open("#/learn?source=module:page-sinks&tau=-1")
    steps = page.locator("ol.steps li").all_inner_texts()
    formulas = {
        (each["kind"], each["name"]): each["formula"] for each in visit.http.get("/v1/variants").json()["variants"]
    }
    assert formulas["score", "additive"] in steps[0]
    assert formulas["normalizer", "softmax"] in steps[2]
    assert page.get_by_label("Temperature").count() == 0  # its weights are no softmax of the scores alone
    visit.http.delete("/v1/modules/page-sinks")


def test_a_server_that_refuses_for_now_is_not_shown_without_modules(visit):
    refusal = {"title": "Busy", "status": 429, "code": "overloaded", "detail": "Later."}
    headers = {"Retry-After": "1", "Content-Type": "application/problem+json"}
    visit.page.route(
        "**/v1/modules", lambda route: route.fulfill(status=429, headers=headers, body=json.dumps(refusal))
    )
    visit.page.goto(f"{visit.url}/#/circuits")
    visit.page.locator(".health", has_text="overloaded").wait_for()
    visit.page.get_by_text("Asking the server for its modules…").wait_for()
    visit.refused(1)


def test_costs_follow_the_sliders(visit):
    page = visit.open("#/cost?against=window&cost_causal=1")
    page.wait_for_selector("table >> text=flops")
    assert page.locator("svg.drawing").count() == 3
    costs = page.locator("table", has_text="Cost by length")
    before = costs.inner_text()
    page.get_by_label("Heads h").fill("4")
    page.wait_for_url("**num_heads=16**")
    visit.until(lambda: costs.inner_text() != before)
    visit.picture("cost")


def test_what_is_shown_can_be_saved(visit, tmp_path):
    page = visit.open("#/head?layer=1&head=3")
    saved = {}
    for kind in ("SVG", "PNG", "CSV", "JSON", "HTML"):
        with page.expect_download() as download:
            page.get_by_role("button", name=kind, exact=True).click()

        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        saved[kind] = path.read_bytes()
    assert saved["SVG"].startswith(b"<svg")
    assert saved["PNG"].startswith(b"\x89PNG")
    assert len(saved["CSV"].splitlines()) == 14
    weights = np.array(json.loads(saved["JSON"])["weights"])
    assert np.abs(weights.sum(-1) - 1).max() < 2e-3
    assert b"<script" not in saved["HTML"]
    assert saved["HTML"].count(b"<tr>") == 14


def test_a_view_has_one_row_to_save_what_it_shows(visit):
    page = visit.open("#/gradient?layer=1&head=3")
    row = page.get_by_role("group", name="Save")
    assert row.count() == 1
    for chosen, name in (("∂L/∂weights", "gradient"), ("gradient × attention", "gradient_attention")):
        option = row.locator("option", has_text=chosen).get_attribute("value")
        row.get_by_label("What is saved").select_option(option)
        with page.expect_download() as download:
            row.get_by_role("button", name="CSV").click()
        assert download.value.suggested_filename == f"{name}.csv"
        assert download.value.path().read_text("utf-8").count("\n") == 14


def test_a_view_says_what_it_waits_for(visit):
    page = visit.open("#/overview?layer=1")
    page.route("**/v1/attention/gradients", lambda route: None)
    page.get_by_role("link", name="Explain").click()
    page.get_by_text("Asking the server for the gradients of L1H0…").wait_for()


def test_views_are_five_groups_for_pointer_and_keys(visit):
    page = visit.open("#/overview")
    views = page.get_by_role("navigation", name="Views")
    groups = views.get_by_role("list").first.get_by_role("link")
    assert groups.all_inner_texts() == ["Look", "Change", "Explain", "Cost", "Server"]
    groups.nth(1).click()
    page.wait_for_url("**#/edit?**")
    views.get_by_role("link", name="Effects").click()
    page.wait_for_url("**#/effects?**")
    assert views.get_by_role("list", name="Change").get_by_role("link").all_inner_texts() == [
        "Edit",
        "Effects",
        "Decode",
        "Steer",
    ]
    groups.first.click()
    groups.nth(1).click()
    page.wait_for_url("**#/effects?**")  # a group opens where it was left
    groups.nth(1).focus()
    for key in ("ArrowRight", "Enter", "ArrowDown", *["ArrowRight"] * 5, "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**#/rollout?**")
    assert views.locator("[aria-current]").all_inner_texts() == ["Explain", "Rollout"]
    assert "at most 1\u202f024 tokens" in page.locator(".intro").inner_text()


def test_a_long_text_is_not_printed_in_full(visit):
    text = "word " * 4096
    weights = np.eye(2, dtype=np.float32)[None]
    recording = RecordingFile.model_validate(EXAMPLE_RECORDING | {
        "text": text, "tokens": {"layers": ["a", "b"]}, "attentions": [{"name": "layers.0", "heads": ["0"]}],
        "layers": {"0.weights": weights},
    })  # fmt: skip
    with Client(visit.url) as client:
        stored = client.recordings.create(recording)
    page = visit.open(f"#/overview?source=stored:{stored.id}")
    assert len(facts(page)["text"]) < 300
    page.get_by_role("button", name=re.compile("Show all 20.480 characters")).click()
    assert len(facts(page)["text"]) > len(text)
    with Client(visit.url) as client:
        client.recordings.delete(stored.id)


@NEEDS_AXE
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing(visit, view):
    visit.open(f"#/{view}")
    assert visit.violations() == []


@DARK
def test_axe_finds_nothing_in_the_dark(visit):
    visit.open("#/head?layer=1&head=3")
    visit.picture("head-dark")
    for view in ("overview", "query", "cost"):
        visit.open(f"#/{view}")
        assert visit.violations() == []


@PHONE
def test_nothing_is_wider_than_a_phone(visit):
    for view in VIEWS:
        page = visit.open(f"#/{view}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
    visit.open("#/head?layer=1&head=3")
    visit.picture("head-phone", page.locator(".readout"))


def test_a_view_whose_script_was_not_loaded_comes_once_the_server_is_back(visit):
    page = visit.open("#/overview")
    page.route("**/web/head.js", lambda route: route.abort())
    page.get_by_role("link", name="Head", exact=True).click()
    page.get_by_text("This view could not be loaded").wait_for()
    page.unroute("**/web/head.js")
    page.locator(".stage canvas").wait_for()
    assert page.get_by_role("alert").count() == 0
    assert all("ERR_FAILED" in line for line in visit.faults)
    visit.faults.clear()


def test_undo_takes_back_a_slider_and_redo_ends(visit):
    page = visit.open("#/head?layer=1&head=3&show=lines")
    undo, redo = (page.get_by_role("button", name=name) for name in ("Undo", "Redo"))
    assert redo.is_disabled()
    page.get_by_role("combobox", name="Head").select_option("4")
    slider = page.get_by_role("slider")
    for least in ("0.1", "0.2", "0.3"):
        slider.fill(least)
    page.get_by_role("combobox", name="Head").select_option("5")
    undo.click()
    page.wait_for_url(re.compile(r"head=4.*least=0\.3"))
    undo.click()
    page.wait_for_url(lambda url: "head=4" in url and "least" not in url)
    page.reload()
    assert redo.is_enabled()
    redo.click()
    page.wait_for_url(re.compile(r"head=4.*least=0\.3"))
    redo.click()
    page.wait_for_url("**head=5**")
    page.wait_for_function("[...document.querySelectorAll('button')].find((e) => e.textContent === 'Redo').disabled")


def test_keys_choose_among_the_heads_that_are_there_and_each_change_is_one_step(visit):
    page = visit.open("#/head?head=10&layer=4")
    undo = page.get_by_role("button", name="Undo")
    for key in ("]", "]", "]", "}", "}"):
        page.keyboard.press(key)
    page.wait_for_url("**head=11&layer=5**")
    page.keyboard.press("Control+z")
    page.wait_for_url("**head=11&layer=4**")
    page.keyboard.press("Control+z")
    page.wait_for_url("**head=10&layer=4**")
    assert undo.is_disabled()
    page.keyboard.press("Control+Shift+Z")
    page.wait_for_url("**head=11&layer=4**")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("#/nonsense", "#/overview?"),
        ("#/head?layer=99&head=99", "#/head?head=11&layer=5&"),
        ("#/query?layer=1&query=99", "#/query?layer=1&query=12&"),
        ("#/compare?b_layer=9", "#/compare?b_layer=5&"),
    ],
)
def test_the_address_says_what_is_shown(visit, address, shown):
    page = visit.open(address)
    page.wait_for_url(f"**/{shown}source=builtin%3Acat")
    assert page.get_by_role("button", name="Undo").is_disabled()
