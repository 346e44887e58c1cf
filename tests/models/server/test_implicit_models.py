"""Implicit weights of a whole model over real HTTP: listed with kind, asked for, edited, refused and drawn."""

import numpy as np
import pytest
from tests.client.tiny_models import tokenizer
from tests.conftest import live_server
from tools.models_walk.model_types import built

from attention_client import Client, InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
TOKENS = [5, 3, 7, 8, 6, 4, 9]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    built("qwen3_5").save_pretrained(root / "hybrid")
    tokenizer().save_pretrained(root / "hybrid")
    with live_server(root) as address, Client(address, timeout=120) as client:
        client.models.load("hybrid", dtype="float64")
        yield client.models


def test_layers_say_their_kind(models):
    assert [(layer.layer, layer.kind) for layer in models.get("hybrid").layers] == [(0, "linear"), (1, "attention")]


def test_the_weights_times_the_values_are_the_context(models):
    weights = models.weights("hybrid", tokens=TOKENS, layers=[0]).layers[0]
    taps = models.forward("hybrid", tokens=TOKENS, layers=[0], return_=["v", "context"]).layers[0]
    assert weights.implicit is True
    assert weights.weights.min() < 0
    np.testing.assert_allclose(weights.weights @ taps.v, taps.context, atol=1e-10, rtol=0)


def test_statistics_need_shares(models):
    with pytest.raises(InvalidRequest, match="entropy needs a distribution"):
        models.weights("hybrid", tokens=TOKENS, layers=[0], statistics=["entropy"])
    reply = models.weights("hybrid", tokens=TOKENS, layers=[0, 1], statistics=["entropy"], normalize="absolute")
    assert all((layer.statistics.entropy >= 0).all() for layer in reply.layers)


def test_edits_and_gradients(models):
    edits = {"0": [{"tap": "weights", "heads": [0, 1], "scale": 0.0}]}
    reply = models.forward("hybrid", tokens=TOKENS, edits=edits, compare="unedited")
    assert reply.predictions[0].divergence > 0
    slopes = models.gradients("hybrid", tokens=TOKENS, layers=[0], wrt=["weights"]).layers[0]
    assert slopes.gradients["weights"].shape == (4, 7, 7)


def test_costs_and_pictures_know_them(models):
    plain, weights = (models.complexity("hybrid", length=512, weights=each).prefill for each in (False, True))
    assert weights.flops > plain.flops
    drawn = models.weights("hybrid", tokens=TOKENS, layers=[0]).plot()
    assert "implicit weights" in drawn.data.decode()
