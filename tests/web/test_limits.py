"""The limits and counts that the page tells are those that hold, and its statistics say what they mean."""

import re

import pytest

from tests.conftest import live_server

tiny_models = pytest.importorskip("tests.client.tiny_models")
MOST = 2048


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with a GPT-2 of 12 layers with 12 heads each, random."""
    from transformers import GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("models")
    config = tiny_models.CONFIGS["gpt2"]()
    config.n_layer, config.n_head, config.n_embd, config.n_positions = 12, 12, 48, MOST
    GPT2LMHeadModel(config).save_pretrained(folder / "large")
    tiny_models.tokenizer().save_pretrained(folder / "large")
    with live_server(folder) as url:
        yield url


def rollout(visit, tokens, **fields):
    more = "".join(f"&{name}={value}" for name, value in fields.items())
    return visit.open(f"#/rollout?source=model:large&text={' '.join(['the'] * tokens)}{more}")


def test_the_limit_of_a_rollout_is_that_of_the_model(visit):
    page = rollout(visit, 166)
    page.get_by_text("166 of at most 166 tokens in this view").wait_for()
    page.locator(".stage canvas").first.wait_for()
    page = rollout(visit, 167)
    page.get_by_text("167 of at most 166 tokens in this view").wait_for()
    page.get_by_text("layers for at most 166 tokens").wait_for()
    page = rollout(visit, 167, upto=11)
    page.locator(".stage canvas").first.wait_for()


def test_a_text_that_is_typed_is_counted_by_the_tokenizer(visit):
    page = visit.open("#/overview?source=model:large&text=the")
    page.get_by_text(f"1 of at most {MOST} tokens").wait_for()
    page.get_by_label("Type a sentence").fill("the cat sat on the mat")
    page.get_by_text(re.compile(f"^6 of at most {MOST} tokens$")).wait_for()


def test_each_statistic_is_explained_and_equal_ones_are_shown_once(visit):
    page = visit.open("#/overview")
    page.get_by_text("What the statistics count").click()
    explained = page.locator(".counted dl > div")
    heads = page.locator("table.many thead th")
    assert explained.locator("dt").all_inner_texts() == heads.all_inner_texts()[1:]
    assert all(re.search(r"\b(0|1)\b", each) for each in explained.locator("dd").all_inner_texts())
    assert "sinks: first key" not in heads.all_inner_texts()
    assert "1 if each token looks at the one before it" in heads.filter(has_text="previous token").get_attribute(
        "title"
    )
    page.get_by_label("Sinks: first keys").fill("2")
    page.get_by_label("Sinks: first keys").press("Enter")
    heads.filter(has_text="sinks: first 2 keys").wait_for()
    assert visit.violations() == []
