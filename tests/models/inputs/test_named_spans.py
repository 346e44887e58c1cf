"""Named spans: their share of each head's weights is the sum of the weights of their tokens, found by hand."""

import json

import httpx
import numpy as np
import pytest
from tests.conftest import live_server

from attention_client import Client, InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
CHAT = [
    {"role": "user", "content": "Anna has a red ball."},
    {"role": "assistant", "content": "The ball is red."},
    {"role": "user", "content": "Where is the ball?"},
]
BY_MESSAGE = [{"name": "facts", "messages": [0]}, {"name": "rest", "messages": [1, 2]}]
STATISTICS = {"statistics": ["classes"], "return_weights": True}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("models")) as url:
        yield url


@pytest.fixture(scope="module")
def models(url):
    with Client(url, timeout=120) as client:
        yield client.models


def written(models, messages=CHAT):
    """The conversation, and the characters of each of its tokens."""
    labels = models.forward("tiny", messages=messages, top_k=0).labels
    return labels.spans, "".join(labels.tokens)


def within(spans, begin, end):
    return np.array([span is not None and begin < span[1] <= end for span in spans])


def contents(models):
    """The tokens of each message's content, by the search for it in the text that the tokens are of."""
    labels = models.forward("tiny", messages=CHAT, top_k=0).labels
    found = []
    for message in CHAT:
        ids = models.tokenize("tiny", f" {message['content']}", add_special_tokens=False).tokens
        for begin in range(len(labels.ids) - len(ids) + 2):
            if labels.ids[begin + 1 : begin + len(ids)] == ids[1:] and not any(begin in each for each in found):
                found.append(range(begin, begin + len(ids)))
                break
    assert len(found) == len(CHAT)
    return [np.isin(np.arange(len(labels.ids)), [*each]) for each in found]


def test_messages_characters_and_tokens_are_the_sums_of_their_weights(models):
    reply = models.weights("tiny", messages=CHAT, statistic_options={"spans": BY_MESSAGE}, **STATISTICS)
    first, second, third = contents(models)
    for layer in reply.layers:
        for name, tokens in {"facts": first, "rest": second | third}.items():
            share = layer.weights[..., tokens].sum(-1).mean(-1)
            np.testing.assert_allclose(layer.statistics.classes[name], share, atol=1e-5)
    texts = ["one, two. one, two.", "the cat sat on the mat. the cat sat."]
    spans = [{"name": "begin", "characters": [0, 7]}, {"name": "third", "tokens": [2, 3]}]
    reply = models.weights("tiny", texts, statistic_options={"spans": spans}, **STATISTICS)
    for row, text in enumerate(texts):
        alone = models.weights("tiny", text, return_weights=True)
        begin = within(alone.labels.spans, 0, 7)
        for layer, own in zip(reply.layers, alone.layers, strict=True):
            shares = {"begin": own.weights[..., begin].sum(-1).mean(-1), "third": own.weights[..., 2].mean(-1)}
            for name, share in shares.items():
                np.testing.assert_allclose(layer.statistics.classes[name][row], share, atol=1e-5)


def test_generated_tokens_tell_the_shares_of_messages_also_in_a_stream(url, models):
    attention = {"statistics": ["classes"], "statistic_options": {"spans": BY_MESSAGE}, "weights": True}
    reply = models.chat("tiny", CHAT, max_tokens=4, temperature=0, attention=attention)
    first, second, third = contents(models)
    assert len(reply.choices[0].attention) > 1
    for token in reply.choices[0].attention:
        for layer in token.layers:
            for name, tokens in {"facts": first, "rest": second | third}.items():
                share = layer.weights[:, : len(tokens)][:, tokens].sum(-1)
                np.testing.assert_allclose(layer.statistics.classes[name], share, atol=1e-5)
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 4, "temperature": 0, "stream": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body | {"attention": attention}, timeout=60)
    pieces = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith('data: {"')]
    streamed = [token for piece in pieces for choice in piece["choices"] for token in choice.get("attention") or ()]
    for token, own in zip(streamed, reply.choices[0].attention, strict=True):
        facts = token["layers"][1]["statistics"]["classes"]["facts"]
        np.testing.assert_allclose(facts, own.layers[1].statistics.classes["facts"], atol=1e-5)


def test_texts_that_share_passes_keep_their_own_spans(models):
    prompts = ["The cat sat on the", "one, two. one, two. one"]
    spans = [{"name": "begin", "characters": [0, 5]}, {"name": "two", "tokens": [1, 3]}]
    attention = {"statistics": ["classes"], "statistic_options": {"spans": spans}, "weights": True}
    reply = models.generate("tiny", prompts, max_tokens=3, temperature=0, attention=attention)
    for prompt, choice in zip(prompts, reply.choices, strict=True):
        begin = within(models.forward("tiny", prompt, top_k=0).labels.spans, 0, 5)
        for layer in (layer for token in choice.attention for layer in token.layers):
            classes = layer.statistics.classes
            np.testing.assert_allclose(classes["begin"], layer.weights[:, : len(begin)][:, begin].sum(-1), atol=1e-5)
            np.testing.assert_allclose(classes["two"], layer.weights[:, 1:3].sum(-1), atol=1e-5)


@pytest.mark.parametrize(
    ("span", "at"),
    [
        ({"messages": [3]}, "spans.0.messages"),
        ({"characters": [0, 10_000]}, "spans.0.characters"),
        ({"tokens": [0, 10_000]}, "spans.0.tokens"),
        ({"tokens": [2, 2]}, "spans.0.tokens"),
        ({"tokens": [0, 1], "characters": [0, 1]}, "spans.0.tokens"),
        ({}, "spans.0.messages"),
    ],
)
def test_a_span_that_is_none_is_refused_by_its_field(models, span, at):
    options = {"statistic_options": {"spans": [{"name": "a", **span}]}, "statistics": ["classes"]}
    with pytest.raises(InvalidRequest) as fault:
        models.weights("tiny", messages=CHAT, **options)
    assert fault.value.param == f"statistic_options.{at}"
    with pytest.raises(InvalidRequest) as fault:
        models.chat("tiny", CHAT, max_tokens=1, attention=options)
    assert fault.value.param == f"attention.statistic_options.{at}"


def test_spans_need_their_statistic_names_of_their_own_and_text(models):
    span = {"name": "a", "tokens": [0, 1]}
    for ask, param in (
        (lambda: models.weights("tiny", "a", statistic_options={"spans": [span]}), "statistics"),
        (lambda: models.weights("tiny", "a", statistics=["classes"], statistic_options={"spans": [span] * 2}),
         "statistic_options.spans"),
        (lambda: models.weights("tiny", tokens=[3, 4], statistics=["classes"],
                                statistic_options={"spans": [{"name": "a", "characters": [0, 1]}]}),
         "statistic_options"),
        (lambda: models.generate("tiny", [3, 4], max_tokens=1, attention={
            "statistics": ["classes"], "statistic_options": {"spans": [{"name": "a", "characters": [0, 1]}]}}),
         "attention.statistic_options.spans.0.characters"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as fault:
            ask()
        assert fault.value.param == param
    reply = models.weights("tiny", tokens=[3, 4, 5], statistic_options={"spans": [span]}, **STATISTICS)
    np.testing.assert_allclose(
        reply.layers[0].statistics.classes["a"], reply.layers[0].weights[..., 0].mean(-1), atol=1e-5
    )
