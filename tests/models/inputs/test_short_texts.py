"""The fewest tokens over which a model runs are found by trial, and shorter texts are refused by name."""

import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.small_models import IDS, device, loaded, near
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.loaded.loaded_model import LoadedModel


def test_a_text_too_short_for_merging_layers_is_refused_with_the_least_number_and_one_of_it_is_answered():
    plain = built("funnel")
    model = LoadedModel("funnel", built("funnel"), tokenizer(), device())
    least = model.reader.min_length
    with torch.no_grad():
        for length in range(1, least):
            with pytest.raises((RuntimeError, IndexError)):
                plain(torch.tensor([IDS[:length]]))
            with pytest.raises(InvalidRequest, match=f"at least {least} tokens") as refused:
                forward_reply(model, ModelForwardRequest(tokens=IDS[:length]))
            assert refused.value.param == "tokens"
            assert refused.value.facts["limit"] == least
        reply = forward_reply(model, ModelForwardRequest(tokens=IDS[:least], return_=["logits"], positions=[1]))
        near(reply.logits[0], plain(torch.tensor([IDS[:least]])).logits[0, 1])
    with pytest.raises(InvalidRequest) as refused:
        forward_reply(model, ModelForwardRequest(tokens=[IDS, IDS[:2]]))
    assert refused.value.param == "tokens.1"
    assert least > 1


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_other_models_read_a_single_token(family):
    model = loaded(family)
    assert model.reader.min_length == 1
    assert forward_reply(model, ModelForwardRequest(tokens=IDS[:1])).labels.ids == IDS[:1]
