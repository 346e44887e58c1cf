"""Generation: the tokens of transformers' own ``generate``, what chose them, and edits that hold for all of it."""

import time
from functools import cache

import numpy as np
import orjson
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import DECODERS as FAMILIES
from tests.client.transformers.families import tiny
from tests.models.small_models import DECODERS, PAIRS, device, eager, loaded
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from attention_contract.errors import InvalidCheckpoint, InvalidRequest, NotFinite
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelWeightsRequest
from attention_contract.schemas.openai import ChatCompletionRequest, Completion, CompletionRequest
from attention_contract.validation import validate
from attention_service.core.cancellation import Abandoned, Cancellation, cancellable
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.generation.decoding.generated_text import GeneratedText
from attention_service.models.generation.decoding.sampling import Sampling
from attention_service.models.generation.generation_turns import generate
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.inputs.token_texts import TokenDecoder
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.reply_writing import lines_of

PROMPTS = [[3, 4, 5], [8, 3, 7, 9, 10], [6]]
"""Token ids of three prompts of different lengths."""
NEW = 8


def generated(family, **fields):
    """Return the objects that a request gives out, and its end."""
    request = validate(CompletionRequest, {"model": family, "prompt": PROMPTS, "max_tokens": NEW, **fields})
    given = []
    model = loaded(family)
    return given, generate(model, request, plan_generation(model, request), given.extend)


def generated_objects(family, **fields):
    """Return the objects that a request gives out, and those that end it."""
    given, done = generated(family, **fields)
    return given, done.last


def completion(family, **fields):
    return recorded_completion(family, **fields)[0]


def recorded_completion(family, **fields):
    """Return a completion, and the recording of its run."""
    _, done = generated(family, **fields)
    (whole,) = done.last
    return on_wire(Completion, whole), done.recording


def on_wire(kind, reply):
    """Return an object as a client reads it."""
    return validate(kind, orjson.loads(lines_of([reply])))


def ids(choice):
    return [token.id for token in choice.attention]


@cache
def own(family, temperature=0.0, top_p=1.0, seed=0, n=1):
    """Return the tokens that transformers itself generates for each choice alone."""
    model = eager(family)
    implementation = model.config._attn_implementation
    if model._supports_sdpa and getattr(model.config, "attn_logit_softcapping", None) is None:
        model.set_attn_implementation("sdpa")
    options = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
    rows, end = [], model.generation_config.eos_token_id
    for choice in range(len(PROMPTS) * n):
        prompt = torch.tensor([PROMPTS[choice // n]])
        torch.manual_seed(seed + choice)
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, pad_token_id=0, num_beams=1,
            **({"do_sample": False} | options),
        )  # fmt: skip
        rows.append(found[0, 1 if family in PAIRS else prompt.shape[1] :].tolist())
    model.set_attn_implementation(implementation)
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


each_family = pytest.mark.parametrize(
    "family",
    [*DECODERS, *PAIRS, *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES if each not in DECODERS)],
)


@pytest.mark.sampled(family=3)
@each_family
def test_the_likeliest_tokens_are_those_of_transformers(family):
    found = completion(family, temperature=0, attention={"statistics": ["entropy"]})
    assert [ids(choice) for choice in found.choices] == own(family)
    assert found.usage.completion_tokens == sum(map(len, own(family)))
    plain = completion(family, temperature=0)
    assert [choice.text for choice in plain.choices] == [choice.text for choice in found.choices]


@pytest.mark.sampled(family=3)
@each_family
def test_drawn_tokens_are_those_of_transformers_after_the_same_seed(family):
    settings = {"temperature": 0.7, "top_p": 0.9, "seed": 5, "n": 2}
    found = completion(family, attention={"statistics": [], "top_k": 1}, **settings)
    assert [ids(choice) for choice in found.choices] == own(family, **settings)


@pytest.mark.slow
def test_stop_texts_of_the_checkpoint_hold_unless_the_request_has_some(monkeypatch):
    """Its kind of cache does not: the empty places of a static cache would be told as keys."""
    options = {"temperature": 0, "attention": {"weights": True}}
    plain = completion("llama", **options).choices[0]
    stop = plain.text[4:7]
    settings = loaded("llama").model.generation_config
    monkeypatch.setattr(settings, "stop_strings", [stop])
    monkeypatch.setattr(settings, "cache_implementation", "static")
    stopped = completion("llama", **options).choices[0]
    assert (stopped.text, stopped.finish_reason) == (plain.text[: plain.text.index(stop)], "stop")
    for ours, theirs in zip(stopped.attention, plain.attention, strict=False):
        np.testing.assert_allclose(ours.layers[0].weights, theirs.layers[0].weights, atol=1e-6)
    assert completion("llama", **options, stop=[]).choices[0].text == plain.text


NOT_TAKEN = {
    "max_time": 1e-9,
    "token_healing": True,
    "force_words_ids": [[5]],
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "prompt_lookup_num_tokens": 2,
    "assistant_early_exit": 1,
    "guidance_scale": 2.0,
}


@pytest.mark.sampled(family=1, setting=4)
@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("setting", NOT_TAKEN)
def test_settings_of_the_checkpoint_that_are_no_choice_of_one_token_from_one_pass_are_not_taken(
    setting, family, monkeypatch
):
    options = {"temperature": 0, "attention": {"weights": True}}
    plain = completion(family, **options)
    settings = loaded(family).model.generation_config
    monkeypatch.setattr(settings, "top_k", 4)  # without which penalty_alpha changes nothing
    monkeypatch.setattr(settings, setting, NOT_TAKEN[setting])
    for ours, theirs in zip(completion(family, **options).choices, plain.choices, strict=True):
        assert (ids(ours), ours.finish_reason) == (ids(theirs), theirs.finish_reason)
        last, other = (each.attention[-1].layers[0].weights for each in (ours, theirs))
        np.testing.assert_allclose(last, other, atol=1e-6)


PLACED = [{"tap": "weights", "keys": [1], "set": 0, "renormalize": True}, {"tap": "output", "queries": [3], "set": 0.1}]


@pytest.mark.parametrize(
    "settings",
    [
        {"use_cache": False},
        {"prefill_chunk_size": 2},
        {"return_dict_in_generate": True, "output_attentions": True, "output_scores": True},
    ],
)
def test_settings_of_the_checkpoint_move_no_edit_and_keep_the_recording(settings, monkeypatch):
    fields = {"prompt": PROMPTS[1], "temperature": 0, "attention": {"weights": True, "keep": True}}
    fields["attention"]["edits"] = {"0": PLACED}
    whole, kept = recorded_completion("llama", **fields)
    (plain,) = whole.choices
    for name, value in settings.items():
        monkeypatch.setattr(loaded("llama").model.generation_config, name, value)
    whole, recording = recorded_completion("llama", **fields)
    (found,) = whole.choices
    assert ids(found) == ids(plain)
    for ours, theirs in zip(found.attention, plain.attention, strict=True):
        np.testing.assert_allclose(ours.layers[0].weights, theirs.layers[0].weights, atol=1e-5)
    np.testing.assert_allclose(recording.layers["1.weights"], kept.layers["1.weights"], atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"repetition_penalty": 0}, "strictly positive float"),
        ({"do_sample": True, "temperature": "hot"}, "temperature"),
        ({"do_sample": True, "top_k": -5}, "top_k"),
    ],
)
def test_settings_of_the_checkpoint_that_transformers_refuses_are_its_fault(settings, says, family, monkeypatch):
    for name, value in settings.items():
        monkeypatch.setattr(loaded(family).model.generation_config, name, value)
    with pytest.raises(InvalidCheckpoint, match=f"model: its generation_config.json cannot be used: .*{says}") as fault:
        generated_objects(family)
    assert fault.value.param == "model"


def chat(model, content):
    fields = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    request = validate(ChatCompletionRequest, fields)
    return generate(model, request, plan_generation(model, request), lambda _: None)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_messages_of_tokens_that_the_model_has_no_embedding_of_are_refused_by_their_field(family):
    words = tokenizer()
    words.add_tokens([f"word{number}" for number in range(100)])
    words.chat_template = "{{ messages[0].content }}"
    model = LoadedModel("m", tiny(family).requires_grad_(False), words, device())
    with pytest.raises(InvalidRequest, match="out of range; the vocabulary has") as fault:
        chat(model, "the word99")
    assert fault.value.param == "messages"
    assert chat(model, "the cat").tokens > 0
    with pytest.raises(InvalidRequest, match="the model has positions for") as fault:
        chat(LoadedModel("m", tiny("gpt2").requires_grad_(False), words, device()), "the cat " * 500)
    assert fault.value.param == "messages"


def test_a_chosen_token_that_the_model_cannot_read_is_the_checkpoints_fault():
    model = LoadedModel("m", tiny("gpt2").requires_grad_(False), tokenizer(), device())
    model.reader.vocabulary = 2  # as if its head had more rows than its table
    request = validate(CompletionRequest, {"model": "m", "prompt": [1], "max_tokens": 4, "logit_bias": {"5": 100}})
    with pytest.raises(InvalidCheckpoint, match="chose token 5, and has embeddings for 2"):
        generate(model, request, plan_generation(model, request), lambda _: None)
    one = request.model_copy(update={"max_tokens": 1})
    assert generate(model, one, plan_generation(model, one), lambda _: None).tokens == 1  # nothing reads it


@pytest.mark.parametrize(
    "template",
    [
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 'a' * 10**18 }}",
        "{{ messages[0].content.nothing.at_all }}",
        "{{ raise_exception('no') }}",
    ],
    ids=["recursion", "depth", "memory", "attribute", "refusal"],
)
def test_a_chat_template_that_fails_is_a_fault_of_the_messages(template):
    words = tokenizer()
    words.chat_template = template
    with pytest.raises(InvalidRequest, match=r"the checkpoint.s chat template refuses them: .") as fault:
        chat(LoadedModel("m", tiny("llama").requires_grad_(False), words, device()), "the cat")
    assert fault.value.param == "messages"


def test_a_generation_ends_before_the_deadline_of_its_caller(monkeypatch):
    model, slowed = loaded("llama"), []

    def slow(_, scores):
        slowed.append(time.sleep(0.2))
        return scores.index_fill(1, torch.tensor([model.model.generation_config.eos_token_id]), -1e9)

    monkeypatch.setattr(Sampling, "processors", lambda _: [slow])
    request = validate(CompletionRequest, {"model": "m", "prompt": [[3], [4, 5]], "max_tokens": 60, "temperature": 0})
    plan = plan_generation(model, request)
    late = time.monotonic() + 1.0
    with cancellable(Cancellation(late)):
        (whole,) = generate(model, request, plan, lambda _: None).last
    assert time.monotonic() < late + 10  # before it on a machine that does nothing else
    assert len(slowed) > 1
    for choice in on_wire(Completion, whole).choices:
        assert choice.finish_reason == "length"
        assert choice.text
    with cancellable(Cancellation(time.monotonic() - 1)):  # the first token comes in any case
        assert generate(model, request, plan, lambda _: None).tokens == 2


def test_tokens_of_the_checkpoint_that_the_model_does_not_have_are_no_padding_and_no_end(monkeypatch):
    options = {"temperature": 0, "attention": {}}
    plain = completion("llama", **options)
    settings = loaded("llama").model.generation_config
    monkeypatch.setattr(settings, "pad_token_id", 9999)
    monkeypatch.setattr(settings, "eos_token_id", [2, "x", 9999])
    monkeypatch.setattr(settings, "stop_strings", ["", 5])
    assert [ids(choice) for choice in completion("llama", **options).choices] == [ids(each) for each in plain.choices]


@pytest.mark.parametrize("name", ["alignment", "retrieval"])
def test_statistics_of_several_queries_are_refused(name):
    with pytest.raises(InvalidRequest) as fault:
        completion("llama", attention={"statistics": ["entropy", name]})
    assert fault.value.param == "attention.statistics.1"


@pytest.mark.sampled(family=3)
@pytest.mark.parametrize("family", [*DECODERS, *PAIRS])
def test_each_token_arrives_with_the_weights_of_the_query_that_chose_it(family):
    names = ["entropy", "first_key", "own_position", "mean_distance", "duplicate_token", "classes", "received"]
    attention = {
        "statistics": names, "statistic_options": {"token_classes": {"nouns": [4, 8]}}, "top_k": 2, "weights": True,
    }  # fmt: skip
    found = completion(family, temperature=0, attention=attention)
    for prompt, choice in zip(PROMPTS, found.choices, strict=True):
        pair = family in PAIRS
        settings = eager(family).generation_config
        first = settings.bos_token_id if settings.decoder_start_token_id is None else settings.decoder_start_token_id
        start = [first] if pair else prompt
        tokens = [*start, *ids(choice)]
        for number, token in enumerate(choice.attention):
            assert token.position == len(start) + number
            seen = tokens[: token.position]
            given = {"tokens": prompt, "target_ids": seen} if pair else {"tokens": seen}
            expected = rows_of(family, **given)
            assert [layer.layer for layer in token.layers] == list(expected)
            for layer in token.layers:
                weights = expected[layer.layer]
                np.testing.assert_allclose(layer.weights, weights, atol=2e-5)
                order = np.sort(weights, -1)[:, ::-1][:, :2]
                np.testing.assert_allclose(layer.top_keys.weights[:, : order.shape[1]], order, atol=2e-5)
                named = np.take_along_axis(weights, np.maximum(layer.top_keys.keys, 0), -1)
                np.testing.assert_allclose(
                    named[layer.top_keys.keys >= 0], layer.top_keys.weights[layer.top_keys.keys >= 0], atol=2e-5
                )
                shares = weights / weights.sum(-1, keepdims=True)
                statistics = layer.statistics
                np.testing.assert_allclose(statistics.received, weights, atol=2e-5)  # of one query
                np.testing.assert_allclose(
                    statistics.entropy, -(shares * np.log(np.maximum(shares, 1e-30))).sum(-1), atol=2e-4
                )
                np.testing.assert_allclose(statistics.first_key, shares[:, 0], atol=2e-5)
                keys = np.arange(shares.shape[1])
                np.testing.assert_allclose(statistics.mean_distance, shares @ np.abs(keys - len(seen) + 1), atol=2e-3)
                if not str(layer.layer).startswith("cross"):
                    np.testing.assert_allclose(statistics.own_position, shares[:, -1], atol=2e-5)
                    before = np.array([other == seen[-1] for other in seen[:-1]] + [False])
                    np.testing.assert_allclose(statistics.duplicate_token, shares @ before, atol=2e-5)
                    nouns = np.array([other in {4, 8} for other in seen])
                    np.testing.assert_allclose(statistics.classes["nouns"], shares @ nouns, atol=2e-5)


def rows_of(family, tokens, target_ids=None):
    """Return the weights of the last query of each layer, by one pass of the model's eager self: ``[H, K]``."""
    model = eager(family)
    arguments = {"input_ids": torch.tensor([tokens])}
    if target_ids is not None:
        arguments["decoder_input_ids"] = torch.tensor([target_ids])
    with torch.no_grad():
        output = model(**arguments, output_attentions=True, use_cache=False)
    if target_ids is None:
        found = [each for each in output.attentions if each is not None]
        keys = [key for key, place in ((place.key, place) for place in loaded(family).places.values())]
        return {key: each[0, :, -1].numpy() for key, each in zip(keys, found, strict=True)}
    own, cross = output.decoder_attentions, output.cross_attentions
    rows = {f"decoder.{at}": each for at, each in enumerate(own)} | {
        f"cross.{at}": each for at, each in enumerate(cross)
    }
    keys = [place.key for place in loaded(family).places.values() if place.queries == "target"]
    return {key: rows[key][0, :, -1].numpy() for key in keys}


EDITS = [
    {"tap": "context", "heads": [0], "set": 0},
    {"tap": "weights", "keys": [1], "set": 0, "renormalize": True},
    {"tap": "v", "keys": [0, 4], "scale": 0.5},
    {"tap": "q", "queries": [2, 3], "scale": 3.0},
    {"tap": "output", "queries": [3], "set": 0.1},
    {"tap": "mlp", "set": 0},
    {"tap": "hidden", "queries": [2, 5], "scale": -1.5},
]


@pytest.mark.sampled(family=4, edit=3)
@pytest.mark.parametrize(
    ("family", "edit"),
    [("llama", each) for each in EDITS] + [*zip(["gpt2", "gemma2", "gpt_oss", "lfm2"], EDITS, strict=False)],
)
def test_edits_hold_for_the_whole_generation(family, edit):
    model = loaded(family)
    last = str([*model.places][-1])
    edits = {"attention": {"edits": {last: [edit]}, "weights": True}}
    found = completion(family, prompt=PROMPTS[1], temperature=0, logprobs=5, **edits)
    (choice,) = found.choices
    tokens = list(PROMPTS[1])
    for token, logprob in zip(choice.attention, choice.logprobs.token_logprobs, strict=True):
        longer = [*tokens, *[3] * (8 - len(tokens))]  # so that every token exists that an edit names
        request = {"tokens": longer, "edits": {last: [edit]}, "top_k": 12, "positions": [len(tokens) - 1]}
        expected = forward_reply(model, validate(ModelForwardRequest, request)).predictions[0]
        assert expected.top[0].id == token.id
        assert logprob == pytest.approx(np.log(expected.top[0].probability), abs=1e-4)
        rows = {"tokens": longer, "edits": {last: [edit]}, "select": {"queries": [len(tokens) - 1]}}
        weights = weights_reply(model, validate(ModelWeightsRequest, rows)).layers
        for mine, theirs in zip(token.layers, weights, strict=True):
            np.testing.assert_allclose(mine.weights, theirs.weights[:, 0, : len(tokens)], atol=2e-5)
        tokens.append(token.id)


@pytest.mark.sampled(family=3)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("family", "layer"),
    [("llama", "0"), ("gemma2", "0"), ("gpt_oss", "1"), ("t5", "encoder.0"), ("t5", "cross.0"), ("bart", "encoder.1")],
)
def test_an_edit_of_all_weights_does_not_give_padding_any(family, layer, renormalize):
    """A prompt in a batch has the numbers that it has alone, generated and in one pass."""
    edits = {layer: [{"tap": "weights", "heads": [0], "set": 0.1, "renormalize": renormalize}]}
    fields = {"temperature": 0, "logprobs": 0, "max_tokens": 3, "attention": {"edits": edits}}
    together = completion(family, **fields).choices
    request = {"tokens": PROMPTS, "edits": edits, "return": ["logits"], "positions": [-1]}
    passed = forward_reply(loaded(family), validate(ModelForwardRequest, request)).logits
    for index, prompt in enumerate(PROMPTS):
        (alone,) = completion(family, **fields | {"prompt": prompt}).choices
        assert together[index].logprobs.token_logprobs == pytest.approx(alone.logprobs.token_logprobs, abs=1e-4)
        own = forward_reply(loaded(family), validate(ModelForwardRequest, request | {"tokens": prompt})).logits
        np.testing.assert_allclose(passed[index], own, atol=1e-4)


@pytest.mark.parametrize("layer", ["0", "1"])
def test_rows_are_renormalized_also_when_the_cache_has_none_of_the_edited_keys(layer):
    """A sink has a share of each row. Key 1 is behind the window of layer 0, and key 6 is to come."""
    edits = {layer: [{"tap": "weights", "keys": [1, 6], "set": 0, "renormalize": True}]}
    prompt = PROMPTS[1]
    found = completion("gpt_oss", prompt=prompt, temperature=0, logprobs=0, attention={"edits": edits})
    (choice,) = found.choices
    whole = [*prompt, *ids(choice)[:-1]]
    request = {
        "tokens": whole,
        "edits": edits,
        "return": ["logits"],
        "positions": [*range(len(prompt) - 1, len(whole))],
    }
    logits = forward_reply(loaded("gpt_oss"), validate(ModelForwardRequest, request)).logits
    expected = torch.log_softmax(torch.tensor(logits), -1)[range(NEW), ids(choice)]
    np.testing.assert_allclose(choice.logprobs.token_logprobs, expected, atol=1e-4)


def test_a_query_that_looks_nowhere_has_no_statistics():
    edits = {"0": [{"tap": "weights", "set": 0}]}
    found = completion("llama", prompt=PROMPTS[0], temperature=0, attention={"edits": edits, "top_k": 1})
    for token in found.choices[0].attention:
        assert np.isnan(token.layers[0].statistics.entropy).all()
        assert (token.layers[0].top_keys.keys == -1).all()
        assert np.isfinite(token.layers[1].statistics.entropy).all()


def test_a_stream_has_the_same_tokens_piece_by_piece():
    settings = {"temperature": 0.9, "seed": 3, "n": 2, "logprobs": 2, "attention": {"top_k": 1}}
    whole = completion("llama", **settings)
    given, ended = generated_objects("llama", stream=True, stream_options={"include_usage": True}, **settings)
    pieces = [on_wire(Completion, each) for each in given]
    assert len({piece.id for piece in pieces}) == 1
    for choice in whole.choices:
        own = [piece.choices[0] for piece in pieces if piece.choices[0].index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert [token.id for piece in own for token in piece.attention] == ids(choice)
        assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert [logprob for piece in own for logprob in piece.logprobs.token_logprobs] == choice.logprobs.token_logprobs
    (last,) = ended
    assert on_wire(Completion, last).usage == whole.usage


def test_the_likeliest_tokens_may_be_requested_twice():
    found = completion("llama", temperature=0, n=2, attention={})
    assert [ids(choice) for choice in found.choices] == [row for row in own("llama") for _ in range(2)]


def test_a_stop_text_ends_a_choice_before_it():
    whole = completion("llama", prompt=PROMPTS[0], temperature=0, max_tokens=20).choices[0].text
    words = whole.split()
    stop = f"{words[2]} {words[3]}"
    at = whole.index(stop)
    found = completion("llama", prompt=PROMPTS[0], temperature=0, max_tokens=20, stop=["nothing like it", stop])
    assert found.choices[0].text == whole[:at]
    assert found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens < 20
    given, _ = generated_objects("llama", prompt=PROMPTS[0], temperature=0, max_tokens=20, stop=stop, stream=True)
    assert "".join(each["choices"][0]["text"] for each in given) == whole[:at]


def test_text_of_a_tokenizer_written_in_python_comes_in_whole_characters():
    written = "a naïve 🐈 sat\n"
    tokens = ByT5Tokenizer()(written, add_special_tokens=False)["input_ids"]
    text = GeneratedText(TokenDecoder(ByT5Tokenizer()), tokens[:1], ["zz"])
    pieces = [text.add(token) for token in tokens[1:]]
    assert "".join(pieces) + text.rest() == written[1:]
    assert [len(piece) for piece in pieces].count(0) == len(tokens) - len(written)
    cut = GeneratedText(TokenDecoder(ByT5Tokenizer()), [], ["na"])
    assert "".join(cut.add(token) for token in tokens if not cut.stopped) == "a "


def test_bytes_that_make_no_character_are_reported_whatever_the_tokenizer_makes_of_those_before():
    """In a run of bytes that is no UTF-8, sentencepiece's byte fallback makes no byte a character."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = Tokenizer(BPE({word: at for at, word in enumerate(["▁cat", *bytes_])}, []))
    words.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
    ])  # fmt: skip
    spoken = PreTrainedTokenizerFast(tokenizer_object=words)
    text = GeneratedText(TokenDecoder(spoken), [0], [])
    whole = [1 + byte for byte in b"K \xe2"] + [0]
    assert "".join(map(text.add, whole)) + text.rest() == "K � cat"
    begun = GeneratedText(TokenDecoder(spoken), [0, *(1 + byte for byte in "🐈".encode()[:2])], [])
    assert "".join(begun.add(1 + byte) for byte in "🐈".encode()[2:]) == "🐈"
    assert LoadedModel("bytes", tiny("bert"), spoken, device()).reader.readable([0, 76]) == [" cat", "K"]


@pytest.mark.slow
def test_a_model_with_such_a_tokenizer_generates():
    model = LoadedModel("t5", tiny("t5").requires_grad_(False), ByT5Tokenizer(), device())
    fields = {"model": "t5", "prompt": PROMPTS, "max_tokens": NEW, "temperature": 0, "attention": {}}
    request = validate(CompletionRequest, fields)
    (whole,) = generate(model, request, plan_generation(model, request), lambda _: None).last
    ends = model.model.generation_config.eos_token_id
    for choice, (*first, last) in zip(on_wire(Completion, whole).choices, own("t5"), strict=True):
        tokens = first if last == ends else [*first, last]
        assert choice.text == ByT5Tokenizer().decode(tokens, skip_special_tokens=True)


def test_log_probabilities_are_those_of_the_model_whatever_changes_the_draw():
    found = completion(
        "gpt2", prompt=PROMPTS[1], temperature=0.5, seed=1, logprobs=3, frequency_penalty=1.0, attention={}
    )
    (choice,) = found.choices
    with torch.no_grad():
        logits = eager("gpt2")(torch.tensor([[*PROMPTS[1], *ids(choice)]])).logits[0, len(PROMPTS[1]) - 1 : -1]
    expected = torch.log_softmax(logits, -1)
    chosen = expected.gather(1, torch.tensor(ids(choice))[:, None])[:, 0]
    np.testing.assert_allclose(choice.logprobs.token_logprobs, chosen.numpy(), atol=1e-4)
    for top, row, token in zip(choice.logprobs.top_logprobs, expected, ids(choice), strict=True):
        likeliest = {*row.topk(3).indices.tolist(), token}  # the chosen one too, as OpenAI has it
        own = sorted((float(row[each]) for each in likeliest), reverse=True)
        np.testing.assert_allclose(sorted(top.values(), reverse=True), own, atol=1e-4)


def test_penalties_and_biases_change_the_logits_as_openai_says():
    favoured = completion("llama", prompt=PROMPTS[0], temperature=0, logit_bias={"7": 100}, attention={})
    assert ids(favoured.choices[0]) == [7] * NEW
    both = {"logit_bias": {"7": 50, "8": 49.5}, "temperature": 0, "prompt": PROMPTS[0]}
    turns = ids(completion("llama", presence_penalty=2, attention={}, **both).choices[0])
    assert {7, 8} <= set(turns)
    counts = ids(completion("llama", frequency_penalty=2, attention={}, **both).choices[0])
    assert abs(counts.count(7) - counts.count(8)) <= 2


@pytest.fixture
def broken():
    """A model with NaN in the output projection of layer 1."""
    model = LoadedModel("broken", tiny("llama").requires_grad_(False), tokenizer(), device())
    model.model.model.layers[1].self_attn.o_proj.weight[0, 0] = torch.nan
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(broken, temperature):
    fields = {"model": "broken", "prompt": PROMPTS, "max_tokens": 2, "logprobs": 1, "temperature": temperature}
    request = validate(CompletionRequest, fields)
    with pytest.raises(NotFinite, match="logits of the next token") as fault:
        generate(broken, request, plan_generation(broken, request), lambda _: None)
    assert fault.value.param == "model"


def test_a_temperature_at_which_logits_overflow_is_refused():
    with pytest.raises(InvalidRequest, match="temperature: logits overflow"):
        generated_objects("llama", temperature=1e-39, seed=0)
    coldest = completion("llama", temperature=1e-30, seed=0, attention={})
    assert [ids(choice) for choice in coldest.choices] == own("llama")


def test_nobody_waits_longer_than_a_token_for_a_generation_that_is_given_up():
    cancellation, seen = Cancellation(), []

    def leave(objects):
        seen.append(objects)
        cancellation.cancel()

    # Greedy: a drawn token may be the end, after which there is nothing to give up.
    fields = {"model": "llama", "prompt": PROMPTS[0], "max_tokens": 20, "stream": True, "temperature": 0}
    request = validate(CompletionRequest, fields)
    model = loaded("llama")
    implementation = model.model.config._attn_implementation
    with pytest.raises(Abandoned), cancellable(cancellation):
        generate(model, request, plan_generation(model, request), leave)
    assert len(seen) == 1
    assert model.model.config._attn_implementation == implementation
    assert own("llama") == [ids(choice) for choice in completion("llama", temperature=0, attention={}).choices]


@pytest.mark.parametrize("family", PAIRS)
def test_a_kept_generation_of_a_decoder_has_the_prompt_before_its_encoder(family):
    edits = {"decoder.0": [{"tap": "context", "heads": [0], "queries": [2], "set": 0.0}]}
    attention = {"keep": True, "weights": True, "edits": edits}
    found, recording = recorded_completion(family, prompt=PROMPTS[1], temperature=0, attention=attention)
    (choice,) = found.choices
    assert recording.tokens["encoder"] == loaded(family).reader.readable(PROMPTS[1])
    assert recording.tokens["decoder"][1:] == [token.token for token in choice.attention]
    last = choice.attention[-1]
    for layer in last.layers:
        stack, _, number = str(layer.layer).partition(".")
        whole = recording.decoder[f"{number}.cross.weights" if stack == "cross" else f"{number}.weights"]
        np.testing.assert_allclose(layer.weights, whole[:, last.position - 1, : layer.weights.shape[1]], atol=2e-5)


def test_a_kept_generation_is_priced_with_its_recording():
    model = loaded("llama")
    plans = [
        plan_generation(model, validate(CompletionRequest, {"model": "m", "prompt": [3, 4], "max_tokens": 40, **more}))
        for more in ({}, {"attention": {"statistics": [], "keep": True}})
    ]
    plain, kept = (plan.needed_bytes(model) for plan in plans)
    assert kept - plain > 4 * sum(place.widths.heads for place in model.places.values()) * 42**2


def test_a_kept_run_is_a_recording_of_prompt_and_answer():
    found, recording = recorded_completion("llama", prompt=PROMPTS[1], temperature=0, attention={"keep": True})
    (choice,) = found.choices
    names = loaded("llama").reader.readable([*PROMPTS[1], *ids(choice)])
    assert recording.tokens["layers"] == names
    rows = completion("llama", prompt=PROMPTS[1], temperature=0, attention={"weights": True}).choices[0].attention
    for token in rows:
        for layer in token.layers:
            whole = recording.layers[f"{layer.layer}.weights"][:, token.position - 1, : token.position]
            np.testing.assert_allclose(layer.weights, whole, atol=2e-5)


REFUSED = {
    "max_tokens": {"max_tokens": 100_000},
    "prompt": {"prompt": [3] * 10_000},
    "prompt.1": {"prompt": [[3], [99]]},
    "logit_bias": {"logit_bias": {"99": 1}},
    "logit_bias.7": {"logit_bias": {"7": "NaN"}},
    "logit_bias.8": {"logit_bias": {"8": 101}},
    "attention.layers": {"attention": {"layers": [7]}},
    "attention.heads": {"attention": {"heads": [4]}},
    "attention.edits": {"attention": {"edits": {"9": []}}},
    "attention.edits.0.0.heads": {"attention": {"edits": {"0": [{"tap": "q", "heads": [4], "set": 0}]}}},
    "attention.edits.0.0.queries": {"attention": {"edits": {"0": [{"tap": "q", "queries": [40], "set": 0}]}}},
    "attention.keep": {"attention": {"keep": True}},
    "attention.statistic_options.token_classes": {"attention": {"statistics": ["classes"]}},
    "attention.statistics.0": {"attention": {"statistics": ["retrieval"]}},
    "model": {"family": "bert"},
}


@pytest.mark.parametrize("param", REFUSED)
def test_what_cannot_be_generated_is_refused_by_its_field(param):
    with pytest.raises(InvalidRequest) as refusal:
        generated_objects(**{"family": "llama"} | REFUSED[param])
    assert refusal.value.param == param


def test_edits_of_places_need_prompts_of_one_length():
    edits = {"0": [{"tap": "q", "queries": [1], "set": 0}]}
    with pytest.raises(InvalidRequest, match="one length"):
        generated_objects("llama", attention={"edits": edits})
    assert generated_objects("llama", prompt=[[3, 4], [5, 6]], attention={"edits": edits})


def test_the_estimate_grows_with_what_is_reported():
    def need(**fields):
        request = validate(CompletionRequest, {"model": "llama", "prompt": PROMPTS, "max_tokens": NEW} | fields)
        return plan_generation(loaded("llama"), request).needed_bytes(loaded("llama"))

    assert need() < need(attention={}) < need(attention={"weights": True})
    assert need() < need(n=4)
