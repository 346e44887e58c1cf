"""Similarities and vectors of texts by models whose states, arguments or parts are unlike those of most."""

import pytest
from tools.models_walk.questions import PAIRS, QUESTIONS

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.model_requests import ModelGradientsRequest
from attention_contract.schemas.openai import EmbeddingRequest
from attention_contract.schemas.text_similarity import TextSimilarityRequest
from attention_service.models.answers.embeddings.text_embeddings import embed, plan_embedding
from attention_service.models.answers.embeddings.vector_similarity import plan_similarity, similarity_reply
from attention_service.models.answers.model_gradients import ModelGradients

KINDS = {
    "xlnet": "states that are time first",
    "fsmt": "an encoder without a table of its own",
    "diffllama": "attention over values side by side, which a past would double",
    "rwkv": "a state that is changed in place",
    "llama4_text": "a part without head that transformers does not name",
    "mllama": "the same, of a model that also attends to images",
    "trocr": "a decoder in a wrapper without embeddings",
    "qwen2_5_omni_thinker": "positions that are made of the mask",
    "t5": "an encoder",
    "albert": "layers that share a module",
    "longformer": "texts that it fills up itself",
    "mamba2": "no attention",
    "whisper": "texts that padding changes",
    "mobilebert": "the same of an encoder",
}
"""Types by what is unlike most."""


@pytest.mark.sampled(kind=4)
@pytest.mark.parametrize("question", ["similarity", "embeddings"])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_a_batch_are_the_pooled_states_of_transformers(small, kind, question):
    assert QUESTIONS[question](*small(kind)) < 1e-5


def test_a_model_that_transformers_cannot_differentiate_is_told(small):
    _, loaded = small("reformer")
    with pytest.raises(InvalidRequest, match=r"cannot be differentiated.*send gradients: false") as fault:
        plan_similarity(loaded, TextSimilarityRequest(pairs=PAIRS[:1]))
    assert fault.value.param == "gradients"
    with pytest.raises(InvalidRequest, match="cannot be differentiated"):
        ModelGradients(loaded, ModelGradientsRequest(tokens=[3, 4, 5], of={"token": 3}))
    plain = TextSimilarityRequest(pairs=PAIRS[:1], gradients=False)
    assert len(similarity_reply(loaded, plain, plan_similarity(loaded, plain)).similarity) == 1


def test_vectors_are_as_long_as_the_states(small):
    _, loaded = small("reformer")  # whose states are two, side by side
    request = EmbeddingRequest(model="m", input=["the cat"], dimensions=64)
    assert len(embed(loaded, request, plan_embedding(loaded, request)).data[0].embedding) == 64
    with pytest.raises(InvalidRequest, match="the vectors have 64"):
        plan_embedding(loaded, EmbeddingRequest(model="m", input=["the cat"], dimensions=65))


def test_a_model_that_runs_over_no_padded_texts_is_told(small):
    _, loaded = small("qwen2_5_omni_thinker")
    del loaded.model.config.vision_start_token_id
    with pytest.raises(InvalidCheckpoint, match=r"does not run over texts of different lengths.*vision_start_token_id"):
        plan_embedding(loaded, EmbeddingRequest(model="m", input=["the cat"]))
