"""Requests to one model over HTTP share passes, and each reply is that of its request alone."""

import numpy as np
import pytest

from attention_client.survey.head_survey import SURVEYED

MODEL = "tiny"
TEXT = "Tamiro. Tamiro. Tam"


@pytest.mark.slow
def test_the_requests_of_a_sweep_share_passes(client):
    """A sweep is a request for each head, with one edit, by ``Client.map``."""
    client.models.forward(MODEL, TEXT)  # loads it
    layers = [(layer.layer, layer.heads) for layer in client.models.get(MODEL).layers]
    heads = [(layer, head) for layer, count in layers for head in range(count)]
    sweep = [
        {
            "model": MODEL, "text": TEXT, "compare": "unedited",
            "edits": {str(layer): [{"tap": "weights", "heads": [head], "set": 0}]},
        }
        for layer, head in heads * 3
    ]  # fmt: skip
    replies = client.map(client.models.forward, sweep, concurrency=16)
    assert max(reply.ran.joined for reply in replies) > 1
    alone = client.map(client.models.forward, [{**each, "alone": True} for each in sweep[: len(heads)]])
    for reply, other in zip(replies, alone * 3, strict=True):
        (found,), (expected,) = reply.predictions, other.predictions
        assert found.divergence == pytest.approx(expected.divergence, abs=1e-4)
        assert [each.id for each in found.top] == [each.id for each in expected.top]


def test_the_requests_of_surveys_share_passes(client):
    """Several surveys at once: batches of texts, of which only statistics are returned."""
    batches = [[f"{name}. {TEXT}" for name in names] for names in (("Vubupe", "Napi", "Kunu"), ("Soduri", "Rodovu"))]
    requests = [
        {"model": MODEL, "text": texts, "statistics": list(SURVEYED), "return_weights": False} for texts in batches * 16
    ]
    replies = client.map(client.models.weights, requests, concurrency=16)
    assert max(reply.ran.joined for reply in replies) > 1
    alone = client.map(client.models.weights, [{**each, "alone": True} for each in requests[:2]])
    for reply, other in zip(replies, alone * 16, strict=True):
        assert reply.labels == other.labels
        for layer, expected in zip(reply.layers, other.layers, strict=True):
            for name in SURVEYED:
                found = getattr(layer.statistics, name)
                np.testing.assert_allclose(found, getattr(expected.statistics, name), atol=1e-5)
