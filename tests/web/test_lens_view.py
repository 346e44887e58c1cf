"""The lens on the page: layers down, tokens across, the likeliest token in each cell, and the heads after a click."""

import httpx
import numpy as np
import pytest

from tests.conftest import live_server
from tests.web.conftest import PHONE

pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tests.client.tiny_models")
TEXT = "Kate met Tamiro in the park. Then Tam"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server at which `tiny` is loaded, with a masked BERT and one of embeddings to load, both random."""
    from transformers import BertForMaskedLM, BertModel

    folder = tmp_path_factory.mktemp("models")
    for name, kind in (("masked", BertForMaskedLM), ("embedder", BertModel)):
        kind(tiny_models.CONFIGS["bert"]()).save_pretrained(folder / name)
        tiny_models.tokenizer().save_pretrained(folder / name)
    with live_server(folder) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny"}, timeout=120).raise_for_status()
        yield url


def shown(token: str) -> str:
    return f"·{token[1:]}" if token.startswith(" ") else token


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def test_each_cell_is_the_likeliest_token_and_a_click_reads_its_heads(visit):
    page = visit.open("#/lens?source=model:tiny")
    grid = page.locator(".lens tbody tr")
    grid.first.wait_for()
    reply = visit.http.post("/v1/models/tiny/lens", json={"text": TEXT, "top_k": 5}).json()
    name = {int(token): shown(text) for token, text in reply["names"].items()}
    for row, layer in zip(grid.all(), reply["layers"], strict=True):
        expected = [name[each[0]] for each in layer["hidden"]["top"]["ids"]]
        assert [each.strip() for each in row.locator("button").all_inner_texts()] == expected
    assert visit.violations() == []
    grid.nth(1).locator("button").last.click()
    page.wait_for_url("**layer=1**")
    top = reply["layers"][1]["hidden"]["top"]
    read_after = page.locator("table", has_text="Read after L1, at 13 am").locator("tbody tr")
    read_after.first.wait_for()
    assert read_after.locator("th").all_inner_texts() == [name[each] for each in top["ids"][13]]
    logits = [number(row.locator("td").first.inner_text()) for row in read_after.all()]
    np.testing.assert_allclose(logits, top["logits"][13], rtol=2e-3)
    final = reply["layers"][-1]["hidden"]["top"]["ids"][13][0]
    fields = {"text": TEXT, "of": ["heads"], "layers": [1], "positions": [13], "targets": [final]}
    heads = visit.http.post("/v1/models/tiny/lens", json=fields).json()["layers"][0]["heads"]
    rows = page.locator("table", has_text="What each head adds").locator("tbody tr")
    rows.filter(has_text="L1H0").wait_for()
    added = [number(row.locator("td").first.inner_text()) for row in rows.all()]
    np.testing.assert_allclose(added, np.array(heads["targets"])[:, 0, 0], rtol=1e-2, atol=1e-6)
    visit.picture("lens")
    page.get_by_role("button", name="Open L1H0").click()
    page.wait_for_url("**#/head?**head=0**layer=1**query=13**")


@PHONE
def test_the_lens_fits_a_phone(visit):
    page = visit.open("#/lens?source=model:tiny")
    page.locator("table", has_text="What each head adds").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.violations() == []


def test_what_has_no_lens_says_so(visit):
    page = visit.open("#/lens?source=builtin:cat")
    page.get_by_text("A lens reads a whole model").wait_for()
    visit.open("#/lens?source=model:embedder")
    page.get_by_text("embedder predicts no tokens of a text").wait_for()


def test_a_masked_model_is_read_at_each_token_s_own_place(visit):
    text = "the cat sat on the mat"
    page = visit.open(f"#/lens?source=model:masked&text={text}")
    grid = page.locator(".lens tbody tr")
    grid.first.wait_for()
    reply = visit.http.post("/v1/models/masked/lens", json={"text": text, "top_k": 5}).json()
    name = {int(token): shown(written) for token, written in reply["names"].items()}
    for row, layer in zip(grid.all(), reply["layers"], strict=True):
        expected = [name[each[0]] or "∅" for each in layer["hidden"]["top"]["ids"]]
        assert [each.strip() for each in row.locator("button").all_inner_texts()] == expected
    page.get_by_text("the likeliest token in that place").wait_for()
    page.locator("table", has_text="in the place of").wait_for()
    assert page.get_by_text("Fitted lenses").count() == 0  # they are of models that predict the next token
    assert visit.violations() == []
    page.get_by_role("button", name="What each head adds").click()  # its head is no matrix, which the server says
    page.get_by_role("alert").filter(has_text="ask of hidden alone").wait_for()
    visit.refused(1)


TEXTS = "Kate met Tamiro in the park. Then Tamiro went home.\nThe cat sat on the mat. The dog sat on the rug."


def test_a_lens_is_fitted_at_its_price_read_by_and_deleted(visit):
    page = visit.open("#/lens?source=model:tiny")
    page.locator("summary", has_text="Fitted lenses").click()
    fit = page.get_by_role("button", name="Fit a lens")
    assert fit.is_disabled()
    page.get_by_role("textbox", name="Texts one a line").fill(TEXTS)
    page.get_by_label("First tokens left out").fill("4")
    page.get_by_text("2 texts: about").wait_for()
    fit.click()
    page.locator("#main").get_by_text("Fitted a lens over 2 texts").wait_for()
    (lens,) = visit.http.get("/v1/models/tiny/lenses").json()["lenses"]
    page.wait_for_url(f"**lens={lens['id']}**")
    assert page.get_by_role("combobox", name="Read by").input_value() == lens["id"]
    fields = {"text": TEXT, "top_k": 5, "kind": "jacobian", "lens": lens["id"]}
    reply = visit.http.post("/v1/models/tiny/lens", json=fields).json()
    expected = shown(reply["names"][str(reply["layers"][0]["hidden"]["top"]["ids"][13][0])])
    page.get_by_role("button", name="L0 at 13 am: ").filter(has_text=expected).wait_for()
    page.locator("table", has_text="What each head adds").wait_for()
    assert visit.violations() == []
    page.get_by_role("button", name=f"Delete {lens['id'][:10]}").click()
    page.get_by_role("button", name=f"Really delete {lens['id'][:10]}?").click()
    page.locator("#main").get_by_text("Deleted the lens.").wait_for()
    page.wait_for_url(lambda url: "lens=" not in url)
    assert visit.http.get("/v1/models/tiny/lenses").json()["lenses"] == []


def test_a_fit_is_stopped_and_a_fault_names_its_field(visit):
    page = visit.open("#/lens?source=model:tiny")
    page.locator("summary", has_text="Fitted lenses").click()
    page.get_by_role("textbox", name="Texts one a line").fill("\n".join(f"{TEXT} {at}. {TEXT}" for at in range(400)))
    page.get_by_label("First tokens left out").fill("4")
    page.get_by_text("400 texts: about").wait_for()
    page.get_by_role("button", name="Fit a lens").click()
    page.get_by_role("button", name="Stop the fit of").click()
    page.locator("#main").get_by_text("Stopped the fit.").wait_for()
    visit.refused(1)
    assert visit.http.get("/v1/models/tiny/lenses").json()["lenses"] == []
    page.get_by_role("textbox", name="Texts one a line").fill("too short")
    page.get_by_label("First tokens left out").fill("16")
    page.get_by_text("1 text: about").wait_for()
    page.get_by_role("button", name="Fit a lens").click()
    page.get_by_role("alert").get_by_text("texts.0").first.wait_for()
    visit.refused(1)


@PHONE
def test_fitted_lenses_fit_a_phone(visit):
    page = visit.open("#/lens?source=model:tiny")
    page.locator("summary", has_text="Fitted lenses").click()
    page.locator("table", has_text="What each head adds").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.violations() == []
