"""Heads are found on the page by what they do in many texts: as the client finds them, by pointer and by keys."""

import json
import re

import httpx
import numpy as np
import pytest

from attention_client import Client
from attention_client.survey import shipped_texts
from tests.conftest import live_server
from tests.web.conftest import numbers

tiny_models = pytest.importorskip("tests.client.tiny_models")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with `tiny` resident, and a GPT-2 with random parameters to load."""
    from transformers import GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("models")
    config = tiny_models.CONFIGS["gpt2"]()
    config.n_positions = 512
    GPT2LMHeadModel(config).save_pretrained(folder / "small")
    tiny_models.tokenizer().save_pretrained(folder / "small")
    with live_server(folder) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny"}, timeout=120).raise_for_status()
        yield url


@pytest.fixture(scope="module")
def survey(site):
    with Client(site, timeout=120) as client:
        return client.models.survey("tiny")


def open_found(visit, more=""):
    page = visit.open(f"#/find?source=model:tiny&survey=yes{more}")
    page.locator(".scatter").wait_for(timeout=60_000)
    page.locator(".linked canvas").wait_for()
    return page


def test_heads_stand_where_the_client_finds_them_and_the_strongest_comes_first(visit, survey):
    page = visit.open("#/find?source=model:tiny")
    page.get_by_role("button", name=f"Go through {len(shipped_texts())} texts").click()
    page.locator(".scatter").wait_for(timeout=60_000)
    heads = page.locator(".scatter [role=button]")
    numbers = [re.findall(r"[\d.e−-]+(?=,|$)", each.get_attribute("aria-label")) for each in heads.all()]
    expected = np.stack([survey.means("previous_token"), survey.means("induction")], 1)
    np.testing.assert_allclose(np.array(numbers, float), expected, rtol=6e-3)
    page.get_by_role("heading", name="L1H0").wait_for()
    assert page.locator(".passages button").all_inner_texts() == [
        f"{survey.of('induction')[text, 4]:.3g} {survey.texts[text]}" for text in survey.strongest(1, 0, "induction")
    ]
    page.locator(".linked canvas").wait_for()
    assert visit.violations() == []
    visit.picture("find")
    page.reload()  # a link shows what was found
    page.get_by_role("heading", name="L1H0").wait_for(timeout=60_000)


def test_a_passage_has_the_lines_and_the_weights_of_the_head(visit, survey):
    page = open_found(visit, "&layer=0&head=0&by=previous_token")
    text = survey.strongest(0, 0, "previous_token", 2)[1]
    page.locator(".passages button").nth(1).click()
    page.wait_for_url(f"**passage={text}**")
    visit.drawn()
    fields = {"text": survey.texts[text], "layers": [0], "select": {"heads": [0]}}
    weights = np.array(visit.http.post("/v1/models/tiny/weights", json=fields).json()["layers"][0]["weights"][0])
    page.wait_for_function(
        f"document.querySelectorAll('.linked svg path').length === {int((weights >= 0.15).sum())}"
    )  # fmt: skip
    np.testing.assert_allclose(numbers(page, 1), weights, atol=6e-4)
    page.get_by_role("button", name="Open in Head").click()
    page.wait_for_url("**#/head?**")
    assert page.get_by_label("Type a sentence").input_value() == survey.texts[text]


def test_any_two_statistics_and_any_head_are_chosen_by_pointer_and_keys(visit, survey):
    page = open_found(visit)
    page.get_by_role("combobox", name="Up").select_option("entropy")
    page.wait_for_url("**y=entropy**")
    entropies = survey.means("entropy")
    order = np.argsort(entropies)
    strongest = survey.heads[order[-1]]
    name = f"L{strongest.layer}H{strongest.head}"
    page.get_by_role("heading", name=name).wait_for()
    chosen = page.locator(".scatter [tabindex='0']")
    assert chosen.count() == 1
    chosen.focus()
    page.keyboard.press("ArrowDown")
    below = survey.heads[order[-2]]
    page.locator(".scatter .readout", has_text=f"L{below.layer}H{below.head}").wait_for()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=f"L{below.layer}H{below.head}").wait_for()
    page.get_by_role("button", name=re.compile("^L0H0: previous token")).hover()
    page.locator(".scatter .readout", has_text="L0H0").wait_for()
    page.get_by_role("button", name=re.compile("^L0H0: previous token")).click()
    page.wait_for_url("**head=0&layer=0**")
    page.get_by_role("combobox", name="Strongest by").select_option("previous_token")
    best = survey.strongest(0, 0, "previous_token", 1)[0]
    page.locator(".passages button").first.filter(has_text=survey.texts[best]).wait_for()
    page.get_by_role("combobox", name="What is saved").select_option(label="all heads")
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON").click()
    saved = json.loads(download.value.path().read_text())
    spread = survey.distribution(0, 0, "previous_token")
    found = saved["heads"][0]["statistics"]["previous_token"]
    np.testing.assert_allclose([found["mean"], *found["quantiles"]], [spread.mean, *spread.quantiles], rtol=1e-5)
    assert found["counts"] == spread.counts


def test_texts_of_ones_own_are_read_and_a_line_that_cannot_be_is_named(visit, tmp_path):
    page = visit.open("#/find?source=model:tiny&texts=own")
    page.locator("textarea").fill("one, two. one, two.\n\n" + "mat " * 600)
    page.locator("textarea").blur()
    page.get_by_role("button", name="Go through 2 texts").click()
    page.get_by_role("alert").filter(has_text="Line 2 cannot be read").wait_for()
    visit.refused(1)
    file = tmp_path / "texts.txt"
    file.write_text("one, two. one, two.\nthe cat sat\nthe dog\n")
    page.get_by_label("or a file").set_input_files(str(file))
    page.get_by_role("button", name="Go through 3 texts").click()
    page.locator(".passages button").nth(2).wait_for()
    assert page.locator(".passages button").first.inner_text().endswith("one, two. one, two.")
    page.locator("textarea").fill("the cat")
    page.locator("textarea").blur()
    page.get_by_text("The result below is for the 3 texts that went through before").wait_for()
    assert page.locator(".passages button").first.inner_text().endswith("one, two. one, two.")
    page.get_by_role("button", name="Go through 1 text").click()
    page.get_by_text("that went through before").wait_for(state="detached")
    assert page.locator(".passages button").count() == 1


def test_another_model_is_used_only_when_that_is_wanted(visit, started_as_served):
    page = open_found(visit)
    page.get_by_role("combobox", name="Heads of").select_option("small")
    page.get_by_role("button", name=f"Go through {len(shipped_texts())} texts").wait_for()
    assert "survey" not in page.url
    assert visit.http.get("/v1/models/small").json()["state"] == "idle"
    page.get_by_role("button", name="Go through").click()
    page.get_by_role("progressbar", name="Loading small").wait_for(timeout=20_000)
    page.locator(".scatter [role=button]").nth(7).wait_for(timeout=120_000)
    page.get_by_role("combobox", name="Heads of").select_option("tiny")
    page.get_by_role("button", name=f"Go through {len(shipped_texts())} texts").wait_for()


def test_a_survey_can_be_cancelled(visit):
    page = visit.open("#/find?source=model:tiny")
    page.route("**/v1/models/tiny/weights", lambda route: None)
    page.get_by_role("button", name="Go through").click()
    page.get_by_role("progressbar", name="Texts that went through the model").wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Go through").wait_for()
    assert page.get_by_role("alert").count() == 0


@pytest.mark.parametrize(
    "visit", [{"viewport": {"width": 390, "height": 844}, "has_touch": True}], indirect=True, ids=["phone"]
)
def test_the_scatter_fits_on_a_phone(visit):
    page = open_found(visit)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_needle_adds_the_retrieval_score(visit, started_as_served):
    needle = "Vubupe, Soduri, Napi."
    texts = [f"The cat sat. {needle} Vubupe,", f"{needle} Tom sat. Vu"]
    with Client(str(visit.http.base_url), timeout=120) as client:
        options = {"needle": needle}
        expected = client.models.survey("tiny", texts, statistics=["retrieval"], statistic_options=options)
    page = visit.open("#/find?source=model:tiny&texts=own")
    page.locator("textarea").fill("\n".join(texts))
    page.locator("textarea").blur()
    page.get_by_label("Needle").fill("nowhere")
    page.get_by_role("button", name="Go through 2 texts").click()
    page.get_by_role("alert").filter(has_text="Line 2 cannot be read").wait_for()
    visit.refused(1)
    page.get_by_label("Needle").fill(needle)
    page.get_by_role("button", name="Go through 2 texts").click()
    first = expected.ranked("retrieval")[0]
    page.get_by_role("heading", name=f"L{first.layer}H{first.head}").wait_for()
    assert page.get_by_role("combobox", name="Up").input_value() == "retrieval"
    best = expected.strongest(*first, "retrieval", 1)[0]
    page.locator(".passages button").first.filter(has_text=texts[best]).wait_for()
    visit.drawn()
