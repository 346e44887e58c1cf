"""The retrieval score of heads over HTTP, against a plain loop beside transformers' own generation in float64."""

import numpy as np
import pytest
import torch
from tests.conftest import live_server
from training.train_tiny_model import FOLDER
from transformers import AutoModelForCausalLM, AutoTokenizer

from attention_client import Client, InvalidRequest

HAYSTACK = "Anna gave the lamp to Nimu. The dog sat on the mat. {} Tom went to the river. {}"
NEEDLES = ["Vubupe, Soduri, Napi, Kunu, Rodovu.", "Lamo, Tirega, Besu, Vona, Kalu."]
TEXTS = [HAYSTACK.format(needle, needle[: needle.index(" ")]) for needle in NEEDLES]
STEPS = 16


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("models")) as url, Client(url, timeout=120) as client:
        client.models.load("tiny", name="exact", dtype="float64")
        yield client.models


def by_loops(text, needle):
    """The score ``[layers, heads]`` of each head while transformers generates, and the tokens of the answer."""
    words = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        FOLDER, local_files_only=True, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    read = words(text, return_offsets_mapping=True)
    ids, begin = list(read.input_ids), text.index(needle)
    inside = {
        at for at, (_, end) in enumerate(read.offset_mapping) if begin < end <= begin + len(needle)
    }  # fmt: skip
    copied = {}
    for _ in range(STEPS):
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_attentions=True)
        token = int(out.logits[0, -1].argmax())
        for layer, attention in enumerate(out.attentions):
            for head, row in enumerate(attention[0, :, -1].tolist()):
                key = max(range(len(row)), key=row.__getitem__)
                if key in inside and ids[key] == token:
                    copied.setdefault((layer, head), set()).add(key)
        ids.append(token)
    score = np.zeros((model.config.num_hidden_layers, model.config.num_attention_heads))
    for head, keys in copied.items():
        score[head] = len(keys) / len(inside)
    return score, words.decode(ids[-STEPS:])


@pytest.fixture(scope="module")
def expected():
    return [by_loops(text, needle) for text, needle in zip(TEXTS, NEEDLES, strict=True)]


def scores(reply):
    return np.stack([layer.statistics.retrieval for layer in reply.layers], -2)


def test_the_score_is_that_of_a_loop_beside_the_generation(models, expected):
    found = []
    for text, needle, (score, answer) in zip(TEXTS, NEEDLES, expected, strict=True):
        reply = models.weights(
            "exact", text, answer=answer, statistics=["retrieval"], statistic_options={"needle": needle},
            return_weights=False,
        )  # fmt: skip
        found.append(scores(reply))
        np.testing.assert_allclose(found[-1], score, rtol=1e-12)
    mean = np.mean(found, 0)
    assert divmod(int(mean.argmax()), 4) == (1, 0), "the induction head copies most"
    assert mean.max() > 0.2
    options = {"needle": NEEDLES}
    together = models.weights(
        "exact", TEXTS, answer=[answer for _, answer in expected], statistics=["retrieval"], statistic_options=options
    )  # fmt: skip
    np.testing.assert_allclose(scores(together), found, rtol=1e-12)


def test_passages_are_classes_of_keys(models):
    words = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    text, needle = TEXTS[0], NEEDLES[0]
    options = {
        "passages": {"names": needle, "start": "Anna gave"},
        "token_classes": {"commas": words(",", add_special_tokens=False).input_ids},
    }
    reply = models.weights("exact", text, statistics=["classes"], statistic_options=options)
    spans, begin = reply.labels.spans, text.index(needle)
    names = [span is not None and begin < span[1] <= begin + len(needle) for span in spans]
    start = [span is not None and span[1] <= len("Anna gave") for span in spans]
    commas = [token == "," for token in reply.labels.tokens]
    for layer in reply.layers:
        for name, keys in {"names": names, "start": start, "commas": commas}.items():
            share = layer.weights[..., keys].sum(-1).mean(-1)
            np.testing.assert_allclose(layer.statistics.classes[name], share, atol=1e-12)


RETRIEVAL = {"statistics": ["retrieval"], "answer": "mat"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (RETRIEVAL, "statistic_options.needle"),
        ({**RETRIEVAL, "answer": None, "statistic_options": {"needle": "the"}}, "answer"),
        ({**RETRIEVAL, "statistic_options": {"needle": "mat"}}, "statistic_options.needle"),
        ({**RETRIEVAL, "statistic_options": {"needle": ["the", "cat"]}}, "statistic_options.needle"),
        ({"statistic_options": {"passages": {"a": "dog"}}}, "statistic_options.passages.a"),
        ({"statistic_options": {"passages": {"a": "the"}, "token_classes": {"a": [1]}}, "statistics": ["classes"]},
         "statistic_options.token_classes"),
    ],
)  # fmt: skip
def test_a_part_that_the_text_has_not_is_refused(models, fields, param):
    with pytest.raises(InvalidRequest) as fault:
        models.weights("exact", "the cat sat on", **fields)
    assert fault.value.param == param
    with pytest.raises(InvalidRequest) as fault:
        models.weights("exact", tokens=[3, 4], statistic_options={"needle": "a"})
    assert fault.value.param == "statistic_options"


def test_a_survey_continues_the_texts_and_scores_their_needles(models, expected):
    survey = models.survey(
        "exact", TEXTS, statistics=["retrieval", "classes"], batch=1, answer_tokens=STEPS,
        statistic_options={"needle": NEEDLES, "passages": {"names": NEEDLES}},
    )  # fmt: skip
    score = np.array([each.ravel() for each, _ in expected])
    np.testing.assert_allclose(survey.of("retrieval"), score, rtol=1e-12)
    assert survey.ranked("retrieval")[0] == (1, 0)
    assert survey.values["classes.names"].shape == score.shape
    passage, *_ = models.passages(survey, 1, 0, by="retrieval")
    assert "answer" in passage.reply.labels.parts
    assert passage.value == survey.of("retrieval")[:, 4].max()
    given = models.survey(
        "exact", TEXTS, statistics=["retrieval"], statistic_options={"needle": NEEDLES},
        answer=[answer for _, answer in expected],
    )  # fmt: skip
    np.testing.assert_allclose(given.of("retrieval"), score, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"needle": ["Lamo", "Lamo"]}, "statistic_options.needle.0"),
        ({"needle": ["Lamo"]}, "statistic_options.needle"),
        ({"needle": "the mat", "passages": {"a": ["Anna", "Bert"]}}, "statistic_options.passages.a.1"),
        ({}, "statistic_options.needle"),
    ],
)
def test_a_survey_names_the_needle_that_is_in_no_text(models, options, param):
    with pytest.raises(InvalidRequest) as fault:
        models.survey("exact", TEXTS, statistics=["retrieval"], answer="a", batch=1, statistic_options=options)
    assert fault.value.param == param
