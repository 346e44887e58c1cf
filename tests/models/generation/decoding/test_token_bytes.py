"""Entries of log-probabilities at every door: their bytes, joined, are the text of the answer."""

import re
from functools import cache

import orjson
import pytest
import torch
from tests.models.inputs.tokenizers_by_kind import END, UNKNOWN, kinds
from tests.models.small_models import device
from transformers import LlamaConfig, LlamaForCausalLM

from attention_contract.schemas.openai import ChatCompletionRequest, CompletionRequest
from attention_contract.schemas.openai_api.responses import ResponseRequest
from attention_contract.validation import validate
from attention_service.models.generation.generation import Generated
from attention_service.models.generation.generation_turns import generate
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.generation.plans.response_plan import chat_of, plan_response
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.reply_writing import lines_of

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
DRAWS = {"temperature": 1.3, "seed": 4}
NAMES = pytest.mark.parametrize("name", kinds())


@cache
def loaded(name):
    """Return a small model with random parameters whose tokens are those of a kind."""
    kind = kinds()[name]
    kind.tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(kind.names), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return LoadedModel(name, model, kind.tokenizer, device())


def objects(name, kind, **fields):
    """Return every object of an answer as it is sent."""
    model, given = loaded(name), []
    request = validate(kind, {"model": name, **DRAWS, **fields})
    plan = plan_response(model, chat_of(request)) if kind is ResponseRequest else plan_generation(model, request)
    done = generate(model, request, plan, given.extend)
    assert isinstance(done, Generated)
    return [orjson.loads(line) for line in lines_of([*given, *done.last]).split(b"\n") if line]


def joined(entries):
    """Return the text of entries with bytes."""
    return b"".join(bytes(each["bytes"]) for each in entries).decode(errors="replace")


def spelled(token):
    r"""Return the bytes of a token of completions, in which ``bytes:\xe2`` is a part of a character."""
    if token in {END, UNKNOWN}:
        return b""
    if not token.startswith("bytes:"):
        return token.encode()
    return re.sub(rb"\\x([0-9a-f]{2})", lambda byte: bytes.fromhex(byte[1].decode()), token[6:].encode())


@pytest.mark.sampled
@NAMES
@pytest.mark.parametrize("seed", range(3))
def test_the_bytes_of_a_chat_are_its_text(name, seed):
    fields = {
        "messages": [{"role": "user", "content": "the"}], "max_tokens": 12, "logprobs": True, "top_logprobs": 3,
        "seed": seed,
    }  # fmt: skip
    (whole,) = objects(name, ChatCompletionRequest, **fields)
    (choice,) = whole["choices"]
    entries = choice["logprobs"]["content"]
    assert 0 < len(entries) <= 12
    assert joined(entries) == choice["message"]["content"]
    pieces = [each["choices"][0] for each in objects(name, ChatCompletionRequest, stream=True, **fields)]
    streamed = [each for piece in pieces if piece["logprobs"] for each in piece["logprobs"]["content"]]
    assert streamed == entries
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == choice["message"]["content"]


@NAMES
def test_the_bytes_of_a_response_are_its_text(name):
    include = ["message.output_text.logprobs"]
    (whole,) = objects(name, ResponseRequest, input="the", max_output_tokens=12, include=include, top_logprobs=2)
    part = whole["output"][0]["content"][0]
    assert joined(part["logprobs"]) == part["text"]


@pytest.mark.sampled
@NAMES
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["the", "the cat on é", [2, 3, 6, 4], [3]], ids=str)
def test_the_tokens_of_a_completion_are_its_text(name, echo, prompt):
    fields = {"prompt": prompt, "max_tokens": 10, "logprobs": 4, "echo": echo, "n": 2}
    (whole,) = objects(name, CompletionRequest, **fields)
    for choice in whole["choices"]:
        text, logprobs = choice["text"], choice["logprobs"]
        parts = [*map(spelled, logprobs["tokens"])]
        if kinds()[name].tokenizer.is_fast:
            assert b"".join(parts).decode(errors="replace") == text
            if echo and isinstance(prompt, str):
                assert text.startswith(prompt)
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        for at, token, top in zip(logprobs["text_offset"], logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            whole_token = token not in {END, UNKNOWN} and not token.startswith("bytes:")
            assert not whole_token or text[at:].startswith(token)
            assert top is None or (4 <= len(top) <= 5 and token in top)


def test_tokens_that_differ_by_a_space_alone_have_entries_of_their_own():
    name = "Llama 2"
    count = 20
    (whole,) = objects(name, CompletionRequest, prompt=[2], max_tokens=1, logprobs=count, logit_bias={"4": 50})
    top = whole["choices"][0]["logprobs"]["top_logprobs"][0]
    assert len(top) in {count, count + 1}
    names = kinds()[name].names
    found = {}
    for seed in range(2):
        (chat,) = objects(
            name, ChatCompletionRequest, messages=[{"role": "user", "content": "the"}], max_tokens=2, logprobs=True,
            top_logprobs=20, seed=seed, logit_bias={str(names.index("▁the")): 100 - seed * 200},
        )  # fmt: skip
        for entry in chat["choices"][0]["logprobs"]["content"]:
            found |= {each["token"]: each["bytes"] for each in [entry, *entry["top_logprobs"]]}
    assert found[" the"] == [32, 116, 104, 101]


def test_tokens_of_one_text_are_named_as_the_vocabulary_has_them():
    """At the beginning of a text "▁the" and "the" have the same text."""
    count = len(kinds()["T5"].names)
    for chosen in ("the", "!", "▁the"):
        bias = {str(kinds()["T5"].names.index(chosen)): 100}
        fields = {"prompt": [1], "max_tokens": 1, "logprobs": count, "logit_bias": bias}
        (whole,) = objects("T5", CompletionRequest, **fields)
        logprobs = whole["choices"][0]["logprobs"]
        (top,) = logprobs["top_logprobs"]
        assert len(top) == count
        assert logprobs["tokens"] == [chosen.strip("▁")]
        other = kinds()["T5"].names.index("the")
        assert {"the", "▁the" if chosen != "▁the" else f"token_id:{other}"} <= top.keys()
