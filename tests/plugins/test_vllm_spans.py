"""Parts of a prompt that are named by messages or characters, beside those that attention-service finds."""

import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.openai import AttentionOfTokens
from attention_vllm.asks import prompt_digest
from attention_vllm.door.named_prompts import named_tokens
from attention_vllm.door.openai_replies import AttentionRoute

WORDS = ["[UNK]", "the", "cat", "sat", "on", "mat", "user", ":"]
MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "user", "content": "sat on the mat"}]
PARTS, RESERVED = [{"type": "text", "text": "a"}], {"tokenize": True}
AT = "attention.statistic_options.spans"


@pytest.fixture(scope="module")
def tokenizer():
    split = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=split, chat_template=template, unk_token="[UNK]")


def wanted(*spans):
    return AttentionOfTokens.model_validate({"statistics": ["classes"], "statistic_options": {"spans": list(spans)}})


def test_messages_and_characters_are_the_tokens_that_end_in_them(tokenizer):
    # user : the cat user : sat on the mat
    spans = [
        {"name": "second", "messages": [1]}, {"name": "both", "messages": [0, 1]},
        {"name": "begin", "characters": [0, 9]}, {"name": "first", "tokens": [0, 1]},
    ]  # fmt: skip
    named = named_tokens({"messages": MESSAGES}, wanted(*spans), tokenizer)
    assert named.tokens == [[6, 7, 8, 9], [2, 3, 6, 7, 8, 9], [0, 1, 2], [0]]
    assert named.prompt == prompt_digest([6, 7, 1, 2, 6, 7, 3, 4, 1, 5])


def test_characters_of_a_prompt_of_text(tokenizer):
    named = named_tokens({"prompt": "the cat sat"}, wanted({"name": "a", "characters": [4, 11]}), tokenizer)
    assert named.tokens == [[1, 2]]
    assert named.prompt == prompt_digest([1, 2, 3])


def test_the_ask_carries_the_tokens_of_spans(tokenizer):
    given = {"messages": MESSAGES, "attention": wanted({"name": "a", "messages": [0]}).model_dump(exclude_unset=True)}
    awaited = SimpleNamespace(id="a", take=None)
    request, _ = AttentionRoute().prepare(given, awaited, "0" * 32, tokenizer, "")
    assert json.loads(request["vllm_xargs"]["attention"])["spans"]["tokens"] == [[2, 3]]
    assert named_tokens(given, wanted({"name": "a", "tokens": [0, 2]}), None) is None


@pytest.mark.parametrize(
    ("given", "span", "param"),
    [
        ({"prompt": [1, 2]}, {"characters": [0, 1]}, f"{AT}.0.characters"),
        ({"prompt": "the cat"}, {"characters": [0, 50]}, f"{AT}.0.characters"),
        ({"prompt": "the cat"}, {"messages": [0]}, f"{AT}.0.messages"),
        ({"messages": MESSAGES}, {"messages": [7]}, f"{AT}.0.messages"),
        ({"messages": [{"role": "user", "content": PARTS}]}, {"messages": [0]}, "messages.0.content"),
        ({"messages": MESSAGES, "chat_template_kwargs": RESERVED}, {"messages": [0]}, "chat_template_kwargs.tokenize"),
    ],
)  # fmt: skip
def test_parts_that_are_not_found_are_refused_by_their_field(tokenizer, given, span, param):
    with pytest.raises(InvalidRequest) as caught:
        named_tokens(given, wanted({"name": "a"} | span), tokenizer)
    assert caught.value.param == param


def test_a_tokenizer_that_tells_no_characters_is_refused():
    with pytest.raises(InvalidRequest) as caught:
        named_tokens({"prompt": "the cat"}, wanted({"name": "a", "characters": [0, 1]}), None)
    assert caught.value.param == f"{AT}.0.characters"
