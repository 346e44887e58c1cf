"""The weights of experts over real HTTP: listed, returned, edited, refused, and the feature of a probe that watches."""

import numpy as np
import pytest
from tests.client.tiny_models import tokenizer
from tests.conftest import live_server
from tools.models_walk.model_types import built

from attention_client import Client, InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
TOKENS = [5, 3, 7, 8, 6, 4, 9]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    built("mixtral").save_pretrained(root / "experts")
    tokenizer().save_pretrained(root / "experts")
    with live_server(root) as address, Client(address, timeout=120) as client:
        yield client


def test_the_weights_of_experts_are_returned_edited_and_refused(client):
    models = client.models
    (layer,) = models.forward("experts", tokens=TOKENS, layers=[1], return_=["router"]).layers
    weights = np.asarray(layer.router)
    assert weights.shape == (7, 4)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert ((weights > 0).sum(-1) == 2).all()
    edits = {"1": [{"tap": "router", "experts": [int(weights[-1].argmax())], "set": 0}]}
    reply = models.forward("experts", tokens=TOKENS, edits=edits, compare="unedited", positions=[-1])
    assert reply.predictions[0].divergence > 0
    assert "router" in models.get("experts").layers[1].edits
    with pytest.raises(InvalidRequest, match="no router") as refused:
        models.forward("tiny", "the cat", layers=[1], return_=["router"])
    assert refused.value.param == "return.0"
    with pytest.raises(InvalidRequest, match="there are 4 experts"):
        models.forward("experts", tokens=TOKENS, edits={"1": [{"tap": "router", "experts": [4], "scale": 2}]})


def test_the_gradient_by_the_weights_of_experts_is_returned_and_refused(client):
    fields = {"tokens": TOKENS, "layers": [0], "wrt": ["router"]}
    reply = client.models.gradients("experts", **fields)
    (layer,) = client.models.forward("experts", tokens=TOKENS, layers=[0], return_=["router"]).layers
    found = np.asarray(reply.layers[0].gradients["router"])
    assert (found.shape, np.abs(found).max() > 0) == ((7, 4), True)
    assert not found[np.asarray(layer.router) == 0].any()
    assert "router" in client.models.get("experts").layers[1].gradients
    with pytest.raises(InvalidRequest, match="no router") as refused:
        client.models.gradients("tiny", "the cat", layers=[1], wrt=["router"])
    assert refused.value.param == "wrt.0"


def test_a_probe_of_the_router_watches(client):
    numbers = np.array([1.0, -2.0, 3.0, 0.5])
    of = {"point": "router", "layer": 1}
    probe = client.models.fit_probe("experts", of, weights=numbers, bias=0.25).id
    reply = client.models.forward("experts", tokens=TOKENS, layers=[1], return_=["router"], watch=[{"probe": probe}])
    expected = np.asarray(reply.layers[0].router, np.float64) @ numbers + 0.25
    np.testing.assert_allclose(reply.watched[0].scores, expected, atol=1e-6)
    client.models.delete_probe(probe)
