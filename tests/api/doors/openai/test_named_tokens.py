"""Log-probabilities of named tokens in chats and completions, and prompts without the tokenizer's special tokens."""

import json

import pytest
import torch

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.openai import ChatCompletionRequest, CompletionRequest
from attention_contract.validation import validate
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device
from tests.api.doors.openai.conftest import letters, talker
from tests.models.answers.small_classifiers import sharp, words

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
PROMPT = "Hi you"
NAMED = ["x", 7, "Z"]
IDS = [letters()(each)["input_ids"][0] if isinstance(each, str) else each for each in NAMED]
NAMES = ["x", "(", "Z"]
"""The texts of these tokens."""


def expected(ids):
    """The rows of log p ``[L, V]`` of the model that talks."""
    with torch.no_grad():
        return talker()(torch.tensor([ids])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_the_named_tokens_behind_the_likeliest(http, stream):
    sent = {"model": "talker", "prompt": PROMPT, "temperature": 0, "max_tokens": 3, "logprobs": 2, "stream": stream}
    reply = http.post("/v1/completions", json=sent | {"logprob_tokens": NAMED})
    assert reply.status_code == 200, reply.text
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")] if stream else [reply.text]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    ids = letters()(PROMPT)["input_ids"]
    tops = [top for choice in choices for top in choice["logprobs"]["top_logprobs"]]
    texts = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert len(tops) == 3
    for top, text in zip(tops, texts, strict=True):
        logs = expected(ids)[-1]
        assert list(top)[2:5] == NAMES
        assert [top[name] for name in NAMES] == pytest.approx(logs[IDS].tolist(), abs=1e-4)
        assert sorted(top.values(), reverse=True)[:2] == pytest.approx(logs.topk(2).values.tolist(), abs=1e-4)
        ids += letters()(text)["input_ids"]


def test_a_prompt_that_is_echoed_has_them_too(http):
    sent = {"model": "talker", "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0}
    found = http.post("/v1/completions", json=sent | {"logprob_token_ids": IDS}).json()["choices"][0]["logprobs"]
    logs = expected(letters()(PROMPT)["input_ids"])
    assert found["top_logprobs"][0] is None
    for at, top in enumerate(found["top_logprobs"][1:]):
        assert [top[name] for name in NAMES] == pytest.approx(logs[at][IDS].tolist(), abs=1e-4)


def test_a_chat_has_them_behind_the_likeliest(http):
    sent = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 2}
    likeliest, named = (
        http.post("/v1/chat/completions", json=sent | {"logprobs": True, "top_logprobs": 1} | more).json()
        for more in ({}, {"logprob_tokens": NAMED})
    )
    ids = letters()("<user>Hi<assistant>")["input_ids"]
    pairs = zip(*(each["choices"][0]["logprobs"]["content"] for each in (likeliest, named)), strict=True)
    for before, after in pairs:
        further = after["top_logprobs"][1:]
        assert before["top_logprobs"] == after["top_logprobs"][:1]
        assert [each["token"] for each in further] == NAMES
        assert [bytes(each["bytes"]).decode() for each in further] == NAMES
        assert [each["logprob"] for each in further] == pytest.approx(expected(ids)[-1][IDS].tolist(), abs=1e-4)
        ids += letters()(after["token"])["input_ids"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_tokens": [5]}, "logprob_tokens"),
        ({"logprobs": 1, "logprob_tokens": [5, "xy"]}, "logprob_tokens.1"),
        ({"logprobs": 1, "logprob_token_ids": [5, 96]}, "logprob_token_ids.1"),
        ({"logprobs": 1, "logprob_tokens": []}, "logprob_tokens"),
        ({"logprobs": 1, "logprob_tokens": [5], "logprob_token_ids": [5]}, "logprob_tokens"),
        ({"prompt": [1, 2], "add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_named_tokens_at_fault_are_refused_by_name(http, fields, param):
    reply = http.post("/v1/completions", json={"model": "talker", "prompt": "Hi"} | fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_special_tokens_are_left_out_of_a_prompt_and_added_to_a_conversation():
    tokenizer = words()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    model = LoadedModel("llama", sharp("llama", "ForCausalLM"), tokenizer, Device.open("cpu"))

    def rows(request, **fields):
        return plan_generation(model, validate(request, {"model": "m", "max_tokens": 1} | fields)).rows

    bare = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    whole = tokenizer("the cat")["input_ids"]
    assert bare != whole
    for value, expected_ids in ((None, whole), (True, whole), (False, bare)):
        assert rows(CompletionRequest, prompt="the cat", add_special_tokens=value) == [expected_ids]
    assert rows(CompletionRequest, prompt=bare, add_special_tokens=False) == [bare]
    messages = [{"role": "user", "content": "the cat"}]
    for value, expected_ids in ((None, bare), (False, bare), (True, whole)):
        assert rows(ChatCompletionRequest, messages=messages, add_special_tokens=value) == [expected_ids]
    with pytest.raises(InvalidRequest, match="no tokens"):
        rows(CompletionRequest, prompt=" ", add_special_tokens=False)
