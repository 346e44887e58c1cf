"""Models that compute their attention themselves, over real HTTP."""

import httpx
import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.conftest import live_server
from tools.models_walk.differences import error
from tools.models_walk.model_types import built
from tools.models_walk.own_windows import dense

from attention_client import Client, InvalidCheckpoint, InvalidRequest

TEXT = "the cat sat on the mat"
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A client of a server with models of types that compute their attention, and one without weights."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("bloom", "deberta-v2", "longformer", "fnet"):
        built(kind).save_pretrained(root / kind)
        tokenizer().save_pretrained(root / kind)
    with live_server(root) as url, Client(url, timeout=120) as client:
        client.models.url = url
        yield client.models


def eager(kind, **options):
    with torch.no_grad():
        return built(kind)(torch.tensor([tokenizer()(TEXT)["input_ids"]]), **options)


@pytest.mark.parametrize("kind", ["bloom", pytest.param("deberta-v2", marks=pytest.mark.slow)])
def test_weights_are_those_that_the_model_returns(models, kind):
    expected = eager(kind, output_attentions=True)
    reply = models.weights(kind, TEXT, top_k=1)
    for layer, own in zip(reply.layers, expected.attentions, strict=True):
        np.testing.assert_allclose(layer.weights, own[0], atol=1e-6)
    logits = models.forward(kind, TEXT, return_=["logits"]).logits
    np.testing.assert_allclose(logits[0], expected.logits[0, -1], atol=1e-5)
    assert models.get(kind).attention == "observed"
    listed = httpx.get(f"{models.url}/v1/models").json()["data"]
    assert [each.get("attention") for each in listed if each["id"] == kind] == ["observed"]


def test_windows_of_texts_of_unlike_lengths_are_weights_over_pairs(models):
    texts = [f"{TEXT} {TEXT} {TEXT}", "the cat"]
    reply = models.forward("longformer", texts, return_=["weights", "logits"])
    side = built("longformer").config.attention_window[0] // 2
    for row, text in enumerate(texts):
        with torch.no_grad():
            ids = tokenizer()(text)["input_ids"]
            expected = built("longformer")(torch.tensor([ids]), output_attentions=True)
        assert (len(ids) > 2 * side) == (row == 0)
        assert error(reply.logits[row][0], expected.logits[0, -1]) <= 1e-6
        for layer, own in zip(reply.layers, expected.attentions, strict=True):
            found = layer.weights[row][:, : len(ids), : len(ids)]
            np.testing.assert_allclose(found, dense(own, side)[0], atol=1e-6)


def test_an_edit_of_weights_changes_the_prediction_and_a_tap_that_is_not_seen_is_named(models):
    edits = {"1": [{"tap": "weights", "heads": [0, 1, 2, 3], "set": 0}]}
    reply = models.forward("bloom", TEXT, edits=edits, return_=["output", "context"], layers=[1])
    assert not np.asarray(reply.layers[0].context).any()
    with pytest.raises(InvalidRequest, match="scores is not seen") as refusal:
        models.forward("bloom", TEXT, return_=["scores"])
    assert refusal.value.param == "return.0"


@pytest.mark.slow
def test_a_model_without_weights_over_pairs_is_refused_with_the_reason(models):
    with pytest.raises(InvalidCheckpoint, match="none has a softmax over pairs of tokens"):
        models.forward("fnet", TEXT)
