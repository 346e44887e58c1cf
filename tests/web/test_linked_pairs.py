"""Heads that link given pairs of tokens, on the page as the API ranks them; pairs by clicks and by numbers."""

import httpx
import numpy as np
import pytest

from tests.conftest import live_server
from tests.web.conftest import PHONE

pytest.importorskip("transformers")
families = pytest.importorskip("tests.client.transformers.families")
tiny_models = pytest.importorskip("tests.client.tiny_models")
TEXT = "Kate met Tamiro in the park. Then Tam"
LINK = f"#/find?source=model:tiny&find=pairs&text={TEXT}"
NAMES = ("share", "first", "swapped_share", "swapped_first", "both_share", "both_first")


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


def links(visit, model, text, pairs, **more):
    """The numbers of each head at the pairs, computed from the weights: by name, in the order of ``NAMES``."""
    layers = visit.http.post(f"/v1/models/{model}/weights", json={"text": text, **more}).json()["layers"]
    numbers = {}
    for layer in layers:
        for head, weights in enumerate(map(np.array, layer["weights"])):
            name = f"L{layer['layer']}H{head}" if isinstance(layer["layer"], int) else f"{layer['layer']} H{head}"
            found = []
            swapped = [(key, query) for query, key in pairs]
            for w, ends in ((weights, pairs), (weights, swapped), (weights + weights.T, pairs)):
                found.append(np.mean([w[query, key] for query, key in ends]))
                found.append(np.mean([w[query, key] > 0 and w[query].argmax() == key for query, key in ends]))
            numbers[name] = found
    return numbers


def shown(page):
    """The same from the table of the page, in its order."""
    rows = page.get_by_role("region", name="Heads by").locator("tbody tr")
    rows.first.wait_for()
    return {
        row.locator("th").inner_text(): [float(each.replace("−", "-")) for each in row.locator("td").all_inner_texts()]
        for row in rows.all()
    }


def test_heads_are_ranked_by_their_weight_at_clicked_pairs(visit):
    page = visit.open(LINK)
    tokens = page.get_by_role("group", name="The tokens of the text").get_by_role("button")
    for query, key in ((13, 5), (12, 4)):
        tokens.nth(query).click()
        page.get_by_text(f"The query is {query}").wait_for()
        tokens.nth(key).click()
    page.wait_for_url("**pairs=13-5**12-4**")
    expected = links(visit, "tiny", TEXT, [(13, 5), (12, 4)])
    visit.drawn()
    ranked = shown(page)
    assert next(iter(ranked)) == max(expected, key=lambda name: expected[name][0])
    for name, numbers in ranked.items():
        np.testing.assert_allclose(numbers, expected[name], rtol=6e-3, atol=1e-6)
    page.get_by_role("heading", name=next(iter(ranked))).wait_for()
    page.get_by_label("Rank by").select_option("first")
    page.wait_for_url("**rank=first**")
    firsts = [numbers[1] for numbers in shown(page).values()]
    assert firsts == sorted(firsts, reverse=True)
    assert visit.violations() == []
    page.get_by_role("button", name="13 am → 5 ir").click()
    page.wait_for_url(lambda url: "13-5" not in url)
    page.get_by_role("button", name="L1H0", exact=True).click()
    page.get_by_role("heading", name="L1H0").wait_for()
    visit.drawn()
    page.get_by_role("button", name="Open in Head").click()
    page.wait_for_url("**#/head?**head=0**layer=1**query=12**")


def test_typed_pairs_are_in_the_link_and_their_faults_are_told(visit):
    page = visit.open(LINK)
    field = page.get_by_role("textbox", name="Pairs")
    field.fill("13-99")
    field.blur()
    page.get_by_text("There is no token 99: the last one is 13.").wait_for()
    field.fill("x, 13-5")
    field.blur()
    page.get_by_text("“x” is no pair").wait_for()
    assert next(iter(shown(page).values()))[0] > 0
    page.get_by_role("group", name="The tokens of the text").get_by_role("button").first.focus()
    for press in (*["ArrowRight"] * 3, "Enter", "Home", "Enter"):
        page.keyboard.press(press)
    page.wait_for_url("**13-5**3-0**")
    page.reload()
    page.get_by_role("button", name="3 ·T → 0 <|begin|>").wait_for()
    assert visit.violations() == []


def test_both_directions_count_where_tokens_see_what_follows(visit):
    text, pairs = "the cat sat on the mat", [(1, 4), (5, 0)]
    for model, more in (("masked", {}), ("t5", {"layers": ["encoder.0", "encoder.1"]})):
        page = visit.open(f"#/find?source=model:{model}&find=pairs&text={text}&pairs=1-4,5-0&rank=swapped_share")
        ranked = shown(page)
        expected = links(visit, model, text, pairs, **more)
        assert set(ranked) == set(expected)
        for name, numbers in ranked.items():
            np.testing.assert_allclose(numbers, expected[name], rtol=6e-3, atol=1e-6)


@PHONE
def test_pairs_fit_a_phone(visit):
    page = visit.open(f"{LINK}&pairs=13-5")
    shown(page)
    visit.drawn()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.violations() == []
