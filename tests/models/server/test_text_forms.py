"""Classifiers, pairs of texts, given answers and conversations over real HTTP, beside transformers."""

import httpx
import numpy as np
import pytest
import torch
from tests.conftest import live_server
from tests.models.answers.small_classifiers import eager, sharp, words

from attention_client import Client, InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
TEXT, PAIR = "the cat sat", "the dog sat on the mat"
SCORES = (("num_labels", 1), ("id2label", None), ("label2id", None))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a server with small models of texts."""
    root = tmp_path_factory.mktemp("models")
    for name, model in {
        "moods": sharp("bert", "ForSequenceClassification"),
        "ranks": sharp("bert", "ForSequenceClassification", **dict(SCORES)),
        "names": sharp("bert", "ForTokenClassification"),
    }.items():
        model.save_pretrained(root / name)
        words().save_pretrained(root / name)
    with live_server(root) as address:
        yield address


@pytest.fixture(scope="module")
def models(url):
    with Client(url, timeout=120) as client:
        yield client.models


def test_the_list_tells_the_classes_before_a_model_is_loaded(url):
    told = {each["id"]: each for each in httpx.get(f"{url}/v1/models").json()["data"]}
    assert told["moods"]["state"] == "idle"
    assert (told["moods"]["predicts"], told["moods"]["classes"]) == ("class", ["bad", "so so", "good"])
    assert told["ranks"]["classes"] == ["LABEL_0"]
    assert told["moods"]["takes"] == ["text", "text_pair"]
    assert (told["tiny"]["predicts"], told["tiny"]["classes"]) == ("next", [])


def test_a_classifier_answers_with_its_classes_and_their_gradients(models):
    expected = eager("bert", "ForSequenceClassification")(**words()(TEXT, return_tensors="pt")).logits[0]
    reply = models.forward("moods", TEXT)
    assert [each.token for each in reply.predictions[0].top] == [
        ("bad", "so so", "good")[each] for each in expected.argsort(descending=True)
    ]
    told = models.get("moods")
    assert (told.predicts, told.classes, told.left_out) == ("class", ["bad", "so so", "good"], [])
    assert told.takes == ["text", "text_pair"]
    saliency = models.gradients("moods", TEXT, of={"token": "good"})
    assert saliency.token_names == ["good"]
    assert float(saliency.value) == pytest.approx(float(expected.log_softmax(-1)[2]), abs=1e-5)
    assert len(saliency.tokens) == len(saliency.labels.tokens) == 5
    with pytest.raises(InvalidRequest) as caught:
        models.gradients("moods", TEXT, of={"token": "ugly"})
    assert caught.value.param == "of.token"
    entities = models.forward("names", TEXT, top_k=1).predictions
    assert [each.position for each in entities] == [*range(5)]


def test_a_reranker_scores_a_question_with_each_of_several_texts(models):
    sent = words()([TEXT] * 2, [PAIR, "a mat"], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = eager("bert", "ForSequenceClassification", SCORES)(**sent).logits[:, 0]
    reply = models.forward("ranks", TEXT, text_pair=[PAIR, "a mat"])
    scores = [each.top[0].logit for each in reply.predictions]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert reply.labels[0].parts[1:4] == ["text"] * 3
    found = models.gradients("ranks", TEXT, text_pair=PAIR)
    assert float(found.value) == pytest.approx(scores[0], abs=1e-4)
