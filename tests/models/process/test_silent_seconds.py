"""The time for which a process may be silent: that of each long pass is estimated before, whatever asks for it."""

from functools import cache

import pytest
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device
from tools.models_walk.model_types import built

from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.openai import CompletionRequest, EmbeddingRequest
from attention_contract.schemas.text_similarity import TextSimilarityRequest
from attention_contract.validation import validate
from attention_contract.wire import JSON, to_body
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.model_operations import prepare
from attention_service.models.process.priced_questions import AskedModel

WORD = "the cat "
FACTS = {"free_bytes": 2**40, "reader": ""}


@cache
def asked():
    words = tokenizer()
    words.model_max_length = 2048
    model = built("llama", max_position_embeddings=2048).requires_grad_(False)
    loaded = LoadedModel("llama", model, words, device())
    return AskedModel(loaded, Decoder(loaded))


def requests(count):
    """A request of each operation whose texts have twice as many tokens in all."""
    texts = [WORD * 10] * (count // 10)
    return {
        "forward": validate(ModelForwardRequest, {"text": WORD * count}),
        "complete": validate(CompletionRequest, {"model": "llama", "prompt": WORD * count, "max_tokens": 4}),
        "embed": validate(EmbeddingRequest, {"model": "llama", "input": texts}),
        "similarity": validate(TextSimilarityRequest, {"pairs": [[text, text] for text in texts], "gradients": False}),
    }


@pytest.mark.parametrize("operation", requests(10))
def test_long_passes_are_announced_and_short_ones_are_not(operation):
    def seconds(count):
        body = to_body(requests(count)[operation], JSON, "request", "base64")
        return prepare(asked(), operation, memoryview(b"".join(body)), FACTS, lambda _: None).seconds

    assert seconds(10) == 0
    assert seconds(400) > 0
