"""States of texts, of a model whose layers add nothing: each state is the embedding of its token."""

import numpy as np
import pytest
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.vectors import StatesRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.probes.text_states import plan_states, states_reply
from attention_service.models.loaded.loaded_model import LoadedModel


@pytest.fixture(scope="module")
def model():
    made = built("llama").requires_grad_(False)
    for layer in made.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return LoadedModel("llama", made, tokenizer(), device())


@pytest.fixture(scope="module")
def embeddings(model):
    return model.model.get_input_embeddings().weight.numpy()


def ids(model, text):
    return model.reader.tokens(text, "text").ids


def test_states_are_those_of_the_last_token_and_the_mean_over_all(model, embeddings):
    text = "the cat sat"
    own = embeddings[ids(model, text)]
    for position, expected in (("last", own[-1]), ("mean", own.mean(0))):
        reply = states_reply(model, plan_states(model, StatesRequest(text=text, position=position)))
        assert list(reply.states) == [str(layer) for layer in range(len(model.places))]
        for state in reply.states.values():
            np.testing.assert_allclose(state, expected, atol=1e-6)


def test_states_of_an_answer_are_the_mean_over_its_tokens(model, embeddings):
    request = StatesRequest(text="the cat", answer=" sat on", position="answer", layers=[1])
    plan = plan_states(model, request)
    own = ids(model, "the cat")
    assert plan.tokens[0] == len(own)
    expected = embeddings[plan.checked.inputs.text.host_ids[0, len(own) :]].mean(0)
    np.testing.assert_allclose(states_reply(model, plan).states["1"], expected, atol=1e-6)


def test_the_difference_of_two_tokens_turns_one_into_the_other(model, embeddings):
    """By construction: the state of token a plus E[b] − E[a] is that of b, and so are its logits."""
    a, b = 5, 11
    added = {"0": [{"tap": "hidden", "add": embeddings[b] - embeddings[a]}]}
    steered = forward_reply(model, ModelForwardRequest(tokens=[a], edits=added, return_=["logits"]))
    plain = forward_reply(model, ModelForwardRequest(tokens=[b], return_=["logits"]))
    np.testing.assert_allclose(steered.logits, plain.logits, atol=1e-5)


def test_layers_that_there_are_not_are_refused(model):
    with pytest.raises(InvalidRequest) as caught:
        plan_states(model, StatesRequest(text="the cat", layers=[9]))
    assert caught.value.param == "layers.0"
