"""Probes on the page: fitted there to labelled texts, and the scores of tokens as the API answers."""

import re

import httpx
import numpy as np
import pytest

from tests.conftest import live_server
from tests.web.conftest import DARK, PHONE

pytest.importorskip("transformers")
families = pytest.importorskip("tests.client.transformers.families")
tiny_models = pytest.importorskip("tests.client.tiny_models")
TEXT = "Kate went to the house. The"
PLACES = {"kitchen": 1, "house": 1, "school": 1, "garden": 0, "park": 0, "street": 0}
LABELLED = [
    (label, f"Kate went to the {place}. The {animal} slept.")
    for place, label in PLACES.items()
    for animal in ("cat", "dog", "horse", "fox", "bird")
]
SMALL = {"texts": ["the cat sat", "the dog sat", "cat", "dog"], "labels": [0, 1, 0, 1], "folds": 2}
LINK = f"#/probe?source=model:tiny&text={TEXT}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with `tiny`; a masked BERT and a T5, both random, are to be loaded."""
    from transformers import BertForMaskedLM

    folder = tmp_path_factory.mktemp("models")
    for name, model in (("masked", BertForMaskedLM(tiny_models.CONFIGS["bert"]())), ("t5", families.tiny("t5"))):
        model.save_pretrained(folder / name)
        tiny_models.tokenizer().save_pretrained(folder / name)
    with live_server(folder) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny"}, timeout=120).raise_for_status()
        yield url


@pytest.fixture(scope="module")
def probe(site):
    """A probe of all layers of `tiny`."""
    labels, texts = zip(*LABELLED, strict=True)
    body = {"of": {"point": "hidden", "layer": "all"}, "texts": texts, "labels": labels}
    body |= {"positions": "all", "method": "ridge"}
    return httpx.post(f"{site}/v1/models/tiny/probes", json=body, timeout=60).json()


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def column(page, caption, at):
    rows = page.locator("table", has_text=caption).locator("tbody tr")
    rows.first.wait_for()
    return [row.locator("td").nth(at).inner_text() for row in rows.all()]


def watched(visit, probe, text=TEXT):
    body = {"text": text, "top_k": 0, "watch": [{"probe": probe["id"]}]}
    return visit.http.post("/v1/models/tiny/forward", json=body).json()["watched"][0]["scores"]


def test_a_probe_is_fitted_to_labelled_texts_and_removed(visit):
    page = visit.open(LINK)
    page.get_by_label("Labelled texts").fill("\n".join(f"{label} {text}" for label, text in LABELLED))
    page.get_by_label("Folds").fill("6")
    page.get_by_role("button", name="Fit a probe").click()
    page.wait_for_url("**probe=**")
    made = visit.http.get("/v1/models/tiny/probes").json()["probes"][0]
    layers = made["layers"]
    np.testing.assert_allclose(
        [number(each) for each in column(page, "By layer", 0)], [each["auc"] for each in layers], rtol=5e-3
    )
    assert column(page, "By layer", 1)[0].split(" to ") == [
        f"{layers[0][each]:.3f}" for each in ("auc_low", "auc_high")
    ]
    np.testing.assert_allclose(
        [number(each) for each in column(page, "By layer", 2)], [each["threshold"] for each in layers], rtol=5e-3
    )
    assert page.locator("svg.drawing circle").count() == len(layers)
    assert page.locator("tbody th", has_text="←").inner_text() == f"{made['layer']} ←"
    np.testing.assert_allclose(
        [number(each) for each in column(page, "Scores of the tokens", 1)], watched(visit, made), rtol=5e-3
    )
    assert visit.violations() == []
    page.get_by_text(re.compile(r"^Probes: \d")).click()
    page.get_by_role("button", name=f"Delete {made['id'][:10]}").click()
    page.get_by_role("button", name="Really").click()
    page.wait_for_url(lambda url: "probe=" not in url.partition("?")[2])
    assert visit.http.get(f"/v1/probes/{made['id']}").status_code == 404


def test_a_link_shows_the_scores_of_a_text_that_the_probe_ends(visit, probe):
    page = visit.open(f"{LINK}&probe={probe['id']}&length=8")
    own = watched(visit, probe)
    page.get_by_role("group", name="The tokens of the text").get_by_role("button").nth(5).hover()
    page.locator(".read .readout", has_text="·house").filter(has_text="above the threshold").wait_for()
    page.get_by_label("Score what follows too").check()
    page.get_by_role("group", name="The tokens that follow").wait_for()
    page.get_by_label("End the text by the score").check()
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 8, "temperature": 0}
    body["attention"] = {"statistics": [], "watch": [{"probe": probe["id"]}]}
    (choice,) = visit.http.post("/v1/completions", json=body).json()["choices"]
    above = round(max(each["scores"][probe["id"]] for each in choice["attention"][2:]) - 0.02, 2)
    for label, value in (("Above", above), ("After", 1)):
        page.get_by_role("spinbutton", name=label).fill(str(value))
        page.get_by_role("spinbutton", name=label).blur()
    page.wait_for_url(f"**above={above}**after=1**")
    page.get_by_text("The probe ended the text: its score was").wait_for()
    body["attention"]["watch"][0]["stop"] = {"above": above, "after": 1}
    (choice,) = visit.http.post("/v1/completions", json=body).json()["choices"]
    address = page.url
    visit.open(address[address.index("#") :])
    reason = choice["stop_reason"]
    page.get_by_text(re.compile(f"its score was .* for .*, token {reason['token'] + 1}\\.")).wait_for()
    scores = [number(each) for each in column(page, "Scores of the tokens", 1)]
    expected = own + [each["scores"][probe["id"]] for each in choice["attention"]]
    np.testing.assert_allclose(scores, expected, rtol=5e-3)
    assert scores[len(own)] == scores[len(own) - 1]  # the state of the last token chose the first new one
    assert column(page, "Scores of the tokens", 2) == ["yes" if each > threshold(probe) else "no" for each in expected]
    assert visit.violations() == []


def threshold(probe):
    return next(each["threshold"] for each in probe["layers"] if each["layer"] == probe["layer"])


def test_texts_that_cannot_be_fitted_are_told(visit):
    page = visit.open(LINK)
    area = page.get_by_label("Labelled texts")
    area.fill("1 the cat\nthe dog")
    page.get_by_text("Line 2 does not begin with 0 or 1").wait_for()
    area.fill("1 the cat\n1 a cat\n0 the dog")
    page.get_by_label("Folds").fill("2")
    page.get_by_text("Label 0 needs at least 2 texts").wait_for()
    assert page.get_by_role("button", name="Fit a probe").is_disabled()
    area.fill(f"1 the cat\n1 a cat\n0 the dog\n0 {'mat ' * 600}")
    page.get_by_role("button", name="Fit a probe").click()
    page.get_by_role("alert").filter(has_text="texts.3").wait_for()
    assert area.get_attribute("aria-invalid") == "true"
    visit.refused(1)


def test_what_a_model_or_a_probe_cannot_is_told(visit, probe):
    of = {"of": {"point": "hidden", "layer": "all"}}
    masked, read = (
        visit.http.post(f"/v1/models/{each}/probes", json=of | SMALL).json()["id"] for each in ("masked", "t5")
    )
    page = visit.open(f"#/probe?source=model:masked&text=the cat sat&probe={masked}&follow=yes")
    page.get_by_text("masked does not continue a text.").wait_for()
    assert len(column(page, "Scores of the tokens", 1)) == 3
    visit.open(f"#/probe?source=model:t5&text=the cat sat&probe={read}")
    page.get_by_text("reads the text, and not the tokens that are generated").wait_for()
    assert column(page, "Scores of the tokens", 0) == ["the", "cat", "sat"]
    statistics = visit.http.post("/v1/models/tiny/probes", json={"of": {"statistics": ["entropy"]}} | SMALL).json()[
        "id"
    ]
    visit.open(f"{LINK}&probe={statistics}")
    page.get_by_text("This is a probe of statistics: entropy.").wait_for()
    visit.open(f"{LINK}&probe={'0' * 32}")
    page.get_by_text("You have no probe 0000000000 of tiny").wait_for()


@PHONE
def test_probes_fit_a_phone(visit, probe):
    page = visit.open(f"{LINK}&probe={probe['id']}&follow=yes&length=4")
    page.get_by_role("group", name="The tokens that follow").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.violations() == []


@DARK
def test_scores_are_read_in_the_dark(visit, probe):
    visit.open(f"{LINK}&probe={probe['id']}")
    assert visit.violations() == []
