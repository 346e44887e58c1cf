"""Long texts: their tokens and characters are found by few calls, so that a thread that reads one holds nobody up."""

import sys

import pytest
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device
from tests.passed_functions import PassedFunctions
from tokenizers.processors import TemplateProcessing
from tools.models_walk.model_types import built

from attention_contract.schemas.openai_api.tokenization import TokenizeRequest
from attention_contract.wire import JSON
from attention_service.models.answers.tokenized_inputs import tokenize
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.reply_writing import written

WORDS = "the cat sat on the mat\nand the dog "


@pytest.fixture(scope="module")
def loaded():
    words = tokenizer()
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", pair="<eos> $A <eos> $B", special_tokens=[("<eos>", words.convert_tokens_to_ids("<eos>"))]
    )
    return LoadedModel("llama", built("llama").requires_grad_(False), words, device())


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer calls functions of its own")
def test_the_calls_that_tokenize_a_text_do_not_grow_with_its_tokens(loaded):
    def calls(words):
        passed, request = PassedFunctions(), TokenizeRequest(model="llama", prompt=words, return_token_strs=True)
        tokenize(loaded, request)
        sys.setprofile(passed.see)
        written(tokenize(loaded, request), JSON, "list")
        sys.setprofile(None)
        return passed.fresh().total()

    assert calls(WORDS * 1000) < 2 * calls(WORDS * 10)


@pytest.mark.parametrize("pair", [None, "the dog sat"])
@pytest.mark.parametrize("special", [True, False])
def test_the_characters_of_tokens_are_those_that_the_tokenizer_lists(loaded, pair, special):
    text = f"<eos>{WORDS} é <eos>"
    listed = loaded.reader.tokenizer(text, pair, add_special_tokens=special, return_offsets_mapping=True)
    expected = [(begin, end) if begin < end else None for begin, end in listed["offset_mapping"]]
    tokens = loaded.reader.tokens(text, "text", pair=pair, special=special)
    assert tokens.spans == expected
    assert len(tokens.spans) == len(tokens.ids)
    if pair is None and special:
        assert loaded.reader.tokens(text, "text", limit=4).spans == expected[:4]
