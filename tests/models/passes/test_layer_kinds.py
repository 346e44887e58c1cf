"""Layers that are alike are described once."""

import pytest
from tests.models.small_models import FAMILIES, IDS, loaded

from attention_contract.schemas.model_requests import ModelWeightsRequest
from attention_service.models.answers import model_weights
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.loaded.checked_request import check_request
from attention_service.runtime.planning import blank_requests


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kind_has_the_layers_of_one_description(family):
    model = loaded(family)
    request = check_request(model, ModelWeightsRequest(tokens=IDS))
    described = [(place.widths, place.spec, place.queries, place.keys, place.dtype) for place in request.places]
    unlike = [each for index, each in enumerate(described) if each not in described[:index]]
    assert len(request.kinds) == len(unlike)
    assert sum(count for _, count in request.kinds) == len(request.places)


def test_alike_layers_of_texts_of_one_length_are_described_once(monkeypatch):
    model, made, bound = loaded("llama"), [], []
    new_request, bind_statistics = blank_requests.new_request, model_weights.bind_statistics
    monkeypatch.setattr(blank_requests, "new_request", lambda *some: made.append(some) or new_request(*some))
    monkeypatch.setattr(
        model_weights, "bind_statistics", lambda *some, **more: bound.append(some) or bind_statistics(*some, **more)
    )
    blank_requests._raw_request.cache_clear()
    assert len(model.places) > 1
    replies = [weights_reply(model, ModelWeightsRequest(tokens=ids)) for ids in (IDS, IDS[::-1])]
    assert len(bound) == len(replies)
    assert len(made) <= 3  # of a layer, of the layers as one batch, and for the choice of the kernel
