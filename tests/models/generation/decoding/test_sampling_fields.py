"""The sampling fields that vLLM adds to OpenAI's API beside transformers' ``generate``, and prompts that are echoed."""

import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.generation.test_generation import completion, generated_objects, ids
from tests.models.small_models import eager, loaded

from attention_contract.errors import InvalidRequest

PROMPT = [5, 3, 7, 8, 6]
NEW = 8
SEEN = {"temperature": 0, "attention": {"statistics": ["entropy"]}}


def generated(family, fields, **settings):
    """The tokens of ``generate`` behind the prompt, and those of this server."""
    prompt = torch.tensor([PROMPT])
    torch.manual_seed(3)
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "num_beams": 1} | settings
    found = eager(family).generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0].tolist()
    (choice,) = completion(family, prompt=PROMPT, max_tokens=NEW, **SEEN | {"seed": 3} | fields).choices
    return found[1:] if family in {"t5", "bart"} else found[len(PROMPT) :], ids(choice)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"min_tokens": 6}, {"min_new_tokens": 6}),
        ({"temperature": 0.9, "top_k": 3}, {"do_sample": True, "temperature": 0.9, "top_k": 3}),
        ({"temperature": 0.9, "min_p": 0.2}, {"do_sample": True, "temperature": 0.9, "min_p": 0.2, "top_k": 0}),
        ({"temperature": 0.9, "top_k": -1}, {"do_sample": True, "temperature": 0.9, "top_k": 0}),
    ],
    ids=",".join,
)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_the_fields_of_vllm_choose_the_tokens_of_transformers(family, fields, settings):
    theirs, ours = generated(family, fields, **settings)
    assert ours == theirs


def test_the_token_of_a_language_comes_first():
    theirs, ours = generated("bart", {"forced_bos_token_id": 9}, forced_bos_token_id=9)
    assert ours == theirs
    assert ours[0] == 9
    assert generated("bart", {"forced_bos_token_id": tokenizer().decode([9])})[1] == ours
    with pytest.raises(InvalidRequest, match="this model continues its prompt"):
        completion("llama", prompt=PROMPT, forced_bos_token_id=9)


def test_tokens_end_a_choice_or_do_not():
    plain = ids(completion("llama", prompt=PROMPT, max_tokens=NEW, **SEEN).choices[0])
    (stopped,) = completion("llama", prompt=PROMPT, max_tokens=NEW, stop_token_ids=[plain[3]], **SEEN).choices
    assert (ids(stopped), stopped.finish_reason) == (plain[: plain.index(plain[3]) + 1], "stop")
    with pytest.raises(InvalidRequest) as caught:
        completion("llama", prompt=PROMPT, stop_token_ids=[5, 4096])
    assert caught.value.param == "stop_token_ids.1"


def test_the_end_of_a_text_may_be_ignored(monkeypatch):
    plain = ids(completion("llama", prompt=PROMPT, max_tokens=NEW, **SEEN).choices[0])
    monkeypatch.setattr(loaded("llama").model.generation_config, "eos_token_id", plain[2])
    ended = completion("llama", prompt=PROMPT, max_tokens=NEW, **SEEN).choices[0]
    assert ids(ended) == plain[: plain.index(plain[2]) + 1]
    (on,) = completion("llama", prompt=PROMPT, max_tokens=NEW, ignore_eos=True, **SEEN).choices
    assert (ids(on), on.finish_reason) == (plain, "length")


def test_a_text_that_stops_does_not_before_the_least_tokens():
    cats = {"prompt": PROMPT, "max_tokens": NEW, "logit_bias": {"4": 100}, "stop": "cat", **SEEN}
    early, late = (completion("llama", **cats, min_tokens=least).choices[0] for least in (0, 4))
    assert [len(ids(each)) for each in (early, late)] == [1, 5]
    assert (early.text.strip(), late.text.strip()) == ("", "cat cat cat cat")
    with pytest.raises(InvalidRequest) as caught:
        completion("llama", prompt=PROMPT, max_tokens=2, min_tokens=3)
    assert caught.value.param == "min_tokens"


def logs_of(family, row):
    """ln p of each token after those before it, by transformers."""
    with torch.no_grad():
        logits = eager(family)(torch.tensor([row])).logits[0].log_softmax(-1)
    return logits[range(len(row) - 1), row[1:]].tolist(), logits


@pytest.mark.parametrize("family", ["llama", "gpt2", "lfm2"])
@pytest.mark.parametrize("tokens", [0, 1])
def test_a_prompt_is_echoed_with_its_log_probabilities(family, tokens):
    prompts = [PROMPT, [8, 3]]
    found = completion(family, prompt=prompts, max_tokens=tokens, temperature=0, logprobs=2, echo=True)
    assert found.usage.completion_tokens == 2 * tokens
    for row, choice in zip(prompts, found.choices, strict=True):
        theirs, logits = logs_of(family, row)
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == len(row) + tokens
        assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
        assert logprobs.token_logprobs[1 : len(row)] == pytest.approx(theirs, abs=1e-4)
        for each, logs in zip(logprobs.top_logprobs[1:], logits, strict=False):
            assert max(each.values()) == pytest.approx(float(logs.max()), abs=1e-4)
        assert choice.text.startswith(tokenizer().decode(row))
        assert choice.finish_reason == "length"
    plain = completion(family, prompt=prompts, max_tokens=1, temperature=0)
    if tokens:
        assert [each.text for each in found.choices] == [
            tokenizer().decode(row) + each.text for row, each in zip(prompts, plain.choices, strict=True)
        ]
        assert [each.logprobs.text_offset[-1] for each in found.choices] == [
            len(tokenizer().decode(row)) for row in prompts
        ]


def test_a_prompt_that_came_as_text_is_echoed_as_it_is():
    text = "the cat  sat"
    (choice,) = completion("llama", prompt=text, max_tokens=1, temperature=0, logprobs=0, echo=True).choices
    assert choice.text.startswith(text)
    assert choice.logprobs.text_offset[:3] == [0, 3, 7]
    assert choice.logprobs.tokens[:3] == ["the", " cat", "  sat"]
    given, last = generated_objects("llama", prompt=text, max_tokens=1, temperature=0, echo=True, stream=True, n=2)
    first = {each["choices"][0]["index"]: each["choices"][0]["text"] for each in reversed(given)}
    assert first == {0: text, 1: text}
    assert last == []


def test_edits_change_the_log_probabilities_of_a_prompt():
    edit = {"0": [{"tap": "context", "set": 0}]}
    options = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    plain, edited = completion("llama", **options), completion("llama", **options, attention={"edits": edit})
    assert plain.choices[0].logprobs.token_logprobs[1:] != edited.choices[0].logprobs.token_logprobs[1:]
    with pytest.raises(InvalidRequest, match="go without echo"):
        completion("llama", **options, attention={"edits": {"0": [{"tap": "weights", "keys": [0], "set": 0}]}})
    with pytest.raises(InvalidRequest, match="leave echo out"):
        completion("t5", **options)
