"""Steering on the page: a vector fitted there, and a text continued without and with it, as the API answers."""

import json
import re

import httpx
import numpy as np
import pytest

from tests.conftest import live_server
from tests.web.conftest import DARK, PHONE

pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tests.client.tiny_models")
model_types = pytest.importorskip("tools.models_walk.model_types")
TEXT = "Kate went to the"
SIDES = {"positive": ["the park", "the garden"], "negative": ["the house", "the school"], "position": "mean"}
LINK = f"#/steer?source=model:tiny&text={TEXT}&length=6"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with `tiny`; a masked BERT, and a Qwen3.5 whose layer 0 is linear, are to be loaded."""
    from transformers import BertForMaskedLM

    folder = tmp_path_factory.mktemp("models")
    BertForMaskedLM(tiny_models.CONFIGS["bert"]()).save_pretrained(folder / "masked")
    model_types.built("qwen3_5").save_pretrained(folder / "hybrid")
    for name in ("masked", "hybrid"):
        tiny_models.tokenizer().save_pretrained(folder / name)
    with live_server(folder) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny"}, timeout=120).raise_for_status()
        yield url


@pytest.fixture
def vector(visit):
    """The id of a vector of `tiny`, removed when the test ends."""
    made = visit.http.post("/v1/models/tiny/vectors", json=SIDES).json()["id"]
    yield made
    visit.http.delete(f"/v1/vectors/{made}")


def shown(token: str) -> str:
    return f"·{token[1:]}" if token.startswith(" ") else token


def continued(visit, **attention):
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 6, "temperature": 0, "logprobs": 5}
    reply = visit.http.post("/v1/completions", json=body | ({"attention": attention} if attention else {})).json()
    return reply["choices"][0]["logprobs"]


def table(page):
    """The cells of the table of both continuations: the tokens and their log p, without and with the vector."""
    rows = page.locator("table", has_text="Token by token").locator("tbody tr")
    page.get_by_role("heading", name="With the vector").wait_for()
    cells = [row.locator("td").all_inner_texts() for row in rows.all()]
    return [list(column) for column in zip(*cells, strict=True)]


def agrees(columns, expected):
    tokens, numbers = columns
    assert [each.strip() for each in tokens] == [shown(token) for token in expected["tokens"]]
    found = [float(each.replace("−", "-")) for each in numbers]
    np.testing.assert_allclose(found, expected["token_logprobs"], rtol=5e-3, atol=1e-3)


def test_a_vector_is_fitted_and_the_text_continued_without_and_with_it(visit):
    page = visit.open(LINK)
    page.get_by_text("Choose or fit a steering vector").wait_for()
    page.get_by_role("button", name="Fit a vector").click()
    page.wait_for_url("**vector=**")
    columns = table(page)
    (made,) = visit.http.get("/v1/models/tiny/vectors").json()["vectors"]
    assert (made["positive"], made["position"]) == (2, "mean")
    visit.drawn()
    agrees(columns[:2], continued(visit))
    steer = {"vector": made["id"], "scale": 4, "layers": [0, 1, 2, 3]}
    agrees(columns[2:], continued(visit, statistics=[], steer=[steer]))
    page.get_by_role("group", name="The continuation with").get_by_role("button").first.hover()
    first = continued(visit, statistics=[], steer=[steer])
    page.locator(".read .readout").nth(1).filter(has_text=f"log p −{abs(first['token_logprobs'][0]):.3g}").wait_for()
    assert visit.violations() == []
    page.get_by_text("Steering vectors: 1").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Really").click()
    page.get_by_text("Deleted the vector.").first.wait_for(state="attached")
    page.wait_for_url(lambda url: "vector=" not in url)
    assert visit.http.get("/v1/models/tiny/vectors").json()["vectors"] == []


def test_a_link_has_the_scale_the_layers_and_the_beginning(visit, vector):
    page = visit.open(LINK)
    page.get_by_role("combobox", name="Steering vector").select_option(vector)
    page.get_by_label("or a number").fill("-3.5")
    page.get_by_label("or a number").blur()
    for layer in (0, 3):
        page.get_by_role("button", name=f"Layer {layer}").click()
    page.get_by_label("Steered from").select_option("answer")
    page.wait_for_url("**begin=answer**")
    visit.drawn()
    steer = {"vector": vector, "scale": -3.5, "layers": [1, 2]}
    expected = continued(visit, statistics=[], steer=[steer], **{"from": "answer"})
    visit.until(lambda: table(page)[2] == [shown(each) for each in expected["tokens"]])
    address = page.url
    visit.open(address[address.index("#") :])
    agrees(table(page)[2:], expected)
    page.get_by_label(re.compile("^Scale")).focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**scale=-3&**")
    button = page.get_by_role("group", name="The continuation without").get_by_role("button").first
    button.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".generated button.at").count() == 2  # the same place in both
    for _ in range(4):
        page.get_by_role("button", name="Layer 2").click()  # the last layer stays
        page.get_by_role("button", name="Layer 1").click()
    visit.drawn()


def test_a_link_to_a_vector_that_is_not_there_fits_it_again(visit, vector):
    visit.http.delete(f"/v1/vectors/{vector}")
    page = visit.open(f"{LINK}&vector={vector}")
    page.get_by_text("Choose another, or fit one").wait_for()
    visit.open(
        f"{LINK}&vector={vector}&positive=the%20park%0Athe%20garden&negative=the%20house%0Athe%20school&position=mean"
    )
    page.get_by_role("button", name="Fit it to the texts of the link").click()
    table(page)
    assert visit.http.get("/v1/models/tiny/vectors").json()["vectors"][0]["id"] == vector


def test_texts_that_cannot_be_fitted_are_told(visit):
    page = visit.open(LINK)
    page.get_by_label("Texts to lead away from").fill("the park\nthe garden")
    page.get_by_role("button", name="Fit a vector").click()
    page.get_by_role("alert").filter(has_text="the states of both sides are the same").wait_for()
    assert page.get_by_label("Texts to lead away from").get_attribute("aria-invalid") == "true"
    visit.refused(1)
    page.get_by_label("Method").select_option("pca")
    page.get_by_label("Texts to lead away from").fill("the house")
    page.get_by_text("there are 2 and 1").wait_for()
    assert page.get_by_role("button", name="Fit a vector").is_disabled()
    page.get_by_label("States of").select_option("answer")
    page.get_by_text("Write a text, | and its answer").wait_for()


def test_a_chat_is_steered_by_its_answer(visit, vector):
    turns = [{"role": "user", "content": TEXT}]
    page = visit.open(f"{LINK}&vector={vector}&messages={json.dumps(turns)}")
    page.get_by_text("A chat of 1 turn").wait_for()
    steer = {"steer": [{"vector": vector, "scale": 4, "layers": [0, 1, 2, 3]}], "statistics": []}
    body = {"model": "tiny", "messages": turns, "max_tokens": 6, "temperature": 0, "logprobs": True, "attention": steer}
    choice = visit.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    tokens = [each["token"] for each in choice["logprobs"]["content"]]
    assert [each.strip() for each in table(page)[2]] == [shown(token) for token in tokens]


def test_what_cannot_be_steered_says_why(visit):
    page = visit.open("#/steer?source=model:masked")
    page.get_by_text("masked does not continue a text: it predicts the token in each place").wait_for()
    texts = {"positive": ["the cat", "cat"], "negative": ["the dog", "dog"]}
    made = visit.http.post("/v1/models/hybrid/vectors", json=texts).json()["id"]
    visit.open(f"#/steer?source=model:hybrid&text=the cat sat&length=3&vector={made}")
    page.get_by_text("Not behind layer 0: it mixes tokens by a running state").wait_for()
    table(page)


@PHONE
def test_steering_fits_a_phone(visit, vector):
    page = visit.open(f"{LINK}&vector={vector}")
    table(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.violations() == []


@DARK
def test_steering_is_read_in_the_dark(visit, vector):
    page = visit.open(f"{LINK}&vector={vector}")
    table(page)
    assert visit.violations() == []
