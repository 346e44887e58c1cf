"""What a notebook shows of each answer of a whole model, which a server gives: maps within 300 kB, 12 lines of text."""

import json
import re
from base64 import b64decode

import numpy as np
import pytest
from tests.conftest import live_server

from attention_client import Client
from attention_contract.short_repr import MAX_LINES

TEXT = "the cat sat on the mat"
ANSWERS = {
    "weights": lambda models, text: models.weights("tiny", text),
    "weights_of_some": lambda models, text: models.weights(
        "tiny", text, layers=[1], select={"heads": [2], "queries": [3, 5]}
    ),
    "pooled": lambda models, text: models.weights("tiny", text, layers=[1], pool=2, return_weights=False),
    "statistics": lambda models, text: models.weights("tiny", text, return_weights=False),
    "texts": lambda models, text: models.weights("tiny", [text, text + " and the"]),
    "forward": lambda models, text: models.forward("tiny", text, return_=["weights", "scores", "hidden"]),
    "averaged": lambda models, text: models.forward("tiny", text, return_=["weights"], average_heads=True),
    "answer": lambda models, text: models.forward("tiny", text, answer=" and the dog"),
    "gradients": lambda models, text: models.gradients("tiny", text, wrt=["tokens", "weights", "hidden"]),
    "effects": lambda models, text: models.effects(
        "tiny", text, sweep={"tap": "context", "over": ["layers", "heads"], "set": 0}
    ),
    "effects_of_heads": lambda models, text: models.effects(
        "tiny", text, sweep={"tap": "context", "over": ["heads"], "set": 0}
    ),
    "paths": lambda models, text: models.effects("tiny", text, from_={"parts": ["heads"], "set": "mean"}),
    "lens": lambda models, text: models.lens("tiny", text),
    "context": lambda models, text: models.context("tiny", text + ". A dog ran.", answer=" the cat sat"),
    "complexity": lambda models, text: models.complexity("tiny", length=40, new_tokens=4),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("models")) as url, Client(url, timeout=120) as client:
        yield client.models


def maps_of(shown):
    """The data of each map of a page."""
    return [json.loads(each) for each in re.findall(r'<script type="application/json">(.*?)</script>', shown, re.S)]


@pytest.mark.parametrize("name", ANSWERS)
def test_each_answer_is_a_page_and_a_few_lines(models, name):
    reply = ANSWERS[name](models, TEXT)
    assert len(repr(reply).splitlines()) <= MAX_LINES
    shown = reply._repr_html_()
    assert len(shown) <= 300_000
    assert "http://" not in shown.replace("http://www.w3.org", "")
    assert type(reply).__name__ not in shown, "it has a view, and no table of its fields"


def test_the_map_of_a_head_has_its_numbers_and_its_tokens(models):
    reply = models.weights("tiny", TEXT, layers=[1], select={"heads": [2], "queries": [3, 5]})
    (data,) = maps_of(reply._repr_html_())
    tokens = reply.labels.tokens
    assert (data["names"], data["columns"], data["rows"]) == (["L1H2"], tokens, [tokens[3], tokens[5]])
    values = np.frombuffer(b64decode(data["values"]), "<f4").reshape(data["shape"])
    np.testing.assert_array_equal(values[0], reply.layers[0].weights[0])


def test_a_long_text_is_pooled_into_the_same_room(models):
    long = " ".join(["the cat sat on the mat and"] * 70)
    for ask in (ANSWERS["weights"], ANSWERS["forward"], ANSWERS["gradients"], ANSWERS["lens"]):
        reply = ask(models, long)
        assert len(reply.labels.tokens) > 400
        assert len(reply._repr_html_()) <= 300_000
        assert len(repr(reply).splitlines()) <= MAX_LINES


def test_the_sign_of_a_gradient_is_its_colour(models):
    reply = models.gradients("tiny", TEXT)
    colours = re.findall(r"<span style='background:rgba\((\d+,\d+,\d+),[\d.]+\)' title='([^']+)'", reply._repr_html_())
    assert len(colours) == len(reply.labels.tokens)
    assert all((colour == "225,95,0") == (float(number) >= 0) for colour, number in colours)


def test_generated_tokens_have_their_attention(models):
    client = models
    reply = client.chat("tiny", [{"role": "user", "content": TEXT}], max_tokens=4, logprobs=True,
                        attention={"weights": True})  # fmt: skip
    data = maps_of(reply._repr_html_())
    assert [len(each["rows"]) for each in data] == [4, 4]
    assert len(repr(reply).splitlines()) <= MAX_LINES
