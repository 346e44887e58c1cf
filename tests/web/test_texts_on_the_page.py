"""Two texts compared on the page, with the share of each word; and the sources of an answer's sentences."""

import re

import httpx
import numpy as np
import pytest

from tests.conftest import live_server
from tests.web.conftest import PHONE, facts

pytest.importorskip("transformers")
PAIR = ["Kate met Tamiro in the park.", "Tamiro saw Kate near the river."]
PROMPT = "Kate met Tamiro in the park. Tom has a red kite. The cat sat on the mat. Then Tam"
ANSWER = "iro met Kate. The cat sat."


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server at which `tiny` is loaded."""
    with live_server(tmp_path_factory.mktemp("models")) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny"}, timeout=120).raise_for_status()
        yield url


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def cells(page, caption: str) -> np.ndarray:
    """The last columns of a table, which are numbers."""
    rows = page.locator("table", has_text=caption).locator("tbody tr").all()
    return np.array([[number(each) for each in row.locator("td.number").all_inner_texts()] for row in rows])


def test_the_words_of_two_texts_are_coloured_by_their_share_in_the_similarity(visit):
    page = visit.open("#/similarity?source=model:tiny")
    lines = page.locator(".dependence")
    lines.nth(1).wait_for()
    reply = visit.http.post("/v1/models/tiny/similarity", json={"pairs": [PAIR]}).json()
    assert number(facts(page)["similarity: the cosine of both"]) == pytest.approx(reply["similarity"][0], rel=1e-3)
    for side in range(2):
        shown = [number(each.get_attribute("title")) for each in lines.nth(side).locator("span").all()]
        np.testing.assert_allclose(shown, np.trim_zeros(reply["tokens"][0][side]), rtol=2e-3, atol=1e-6)
    assert visit.violations() == []
    visit.picture("similarity-texts")
    page.get_by_label("The second text").fill("The cat sat.")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.wait_for_url("**pair=The+cat+sat.**")
    lines.nth(1).locator("span", has_text="·cat").wait_for()
    page.get_by_label("Pooling").select_option("max")
    fields = {"pairs": [[PAIR[0], "The cat sat."]], "pooling": "max"}
    other = visit.http.post("/v1/models/tiny/similarity", json=fields).json()["similarity"][0]
    visit.until(lambda: number(facts(page)["similarity: the cosine of both"]) == pytest.approx(other, rel=1e-3))


def test_the_sources_of_a_sentence_are_highlighted(visit):
    page = visit.open(f"#/context?source=model:tiny&answer={ANSWER}")
    marks = page.locator(".highlights mark")
    marks.first.wait_for()
    fields = {"text": PROMPT, "answer": ANSWER, "return": ["attention", "gradient", "hidden", "removed"], "heads": 0}
    reply = visit.http.post("/v1/models/tiny/context", json=fields).json()
    assert marks.all_inner_texts() == [each["text"] for each in reply["sources"]]
    losses = {name: -np.array(values) for name, values in reply["ablation"].items()}
    measures = [losses["hidden"], losses["removed"], np.array(reply["attention"]), np.array(reply["gradient"])]
    for part, sentence in enumerate(reply["answer"]):
        page.get_by_role("button", name=sentence["text"].strip()).click()
        page.get_by_role("button", name=sentence["text"].strip(), pressed=True).wait_for()
        expected = np.array([each[:, part] for each in measures]).T
        np.testing.assert_allclose(cells(page, "The sources of"), expected, rtol=2e-3, atol=1e-5)
    page.get_by_label("Highlight by").select_option("attention")
    page.wait_for_url("**measure=attention**")
    shown = [number(each.get_attribute("title").split(": ")[1]) for each in marks.all()]
    np.testing.assert_allclose(shown, np.array(reply["attention"])[:, 1], rtol=2e-3)
    assert visit.violations() == []
    visit.picture("context")


def test_an_answer_that_is_not_given_is_written_by_the_model(visit):
    page = visit.open("#/context?source=model:tiny")
    page.get_by_role("group", name="The answer that the model wrote").wait_for()
    page.get_by_label("Prompt").fill("The cat sat. The dog")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.wait_for_url("**prompt=The+cat+sat.**")
    page.locator(".highlights mark", has_text=re.compile(r"^The cat sat\.\s*$")).wait_for()
    visit.until(lambda: page.locator(".highlights mark").count() == 2)


@PHONE
@pytest.mark.parametrize("view", ["similarity", "context"])
def test_both_fit_a_phone(visit, view):
    page = visit.open(f"#/{view}?source=model:tiny")
    page.locator("table tbody tr").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.violations() == []
