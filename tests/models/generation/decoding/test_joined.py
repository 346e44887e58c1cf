"""Texts that share passes: each has the logits, tokens and attention that it has alone, whoever comes and goes."""

import weakref
from collections import deque
from dataclasses import replace
from functools import cache

import numpy as np
import orjson
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device
from tools.models_walk.joined import BOUND, joined
from tools.models_walk.model_types import built
from transformers.cache_utils import EncoderDecoderCache

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.openai import Completion, CompletionRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.generation.decoding import decode_attention
from attention_service.models.generation.decoding import decoder as decoding
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.decoding.joined_group import JoinedGroup
from attention_service.models.generation.decoding.pasts.text_pasts import own_past
from attention_service.models.generation.decoding.pasts.text_slabs import TextSlab
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.generation_turns import decode, read_prompts
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import STATE_TAPS
from attention_service.models.process.reply_writing import lines_of

WINDOW = 16
"""Longer than the texts of a trial, so that only texts of these tests are longer than a window."""
LONG = {"max_position_embeddings": 256}
FAMILIES = {
    "gpt2": ("unlike", {"n_positions": 256}),
    "qwen3": ("unlike", LONG),
    "mistral": ("unlike", {"sliding_window": WINDOW, **LONG}),
    "gpt_oss": ("unlike", {"sliding_window": WINDOW, **LONG}),
    "llama4_text": ("unlike", {"attention_chunk_size": WINDOW, **LONG}),
    "deepseek_v3": ("unlike", LONG),
    "diffllama": ("unlike", LONG),
    "jamba": ("unlike", LONG),
    "qwen3_next": ("unlike", LONG),
    "lfm2_moe": ("unlike", LONG),
    "inkling_text": ("alike", LONG),
    "recurrent_gemma": ("no", {"attention_window_size": WINDOW, **LONG}),
    "deepseek_v32": ("no", LONG),
}
"""Types of each kind, with the texts that share passes and entries of their config."""
TEXT = [3 + 7 * number % 83 for number in range(160)]


@cache
def loaded(kind, **entries):
    torch.set_num_threads(1)
    model = built(kind, **entries).requires_grad_(False)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return LoadedModel(kind, model, tokenizer(), device())


def llama():
    return loaded("llama", **LONG)


_OPEN = []


class Callers:
    """Requests to one model that run beside each other."""

    def __init__(self, model, **options):
        self.model, self.options = model, options
        while _OPEN:  # of a test that failed; a model has one at a time
            _OPEN.pop().close()
        self.decoder = Decoder(model)
        _OPEN.append(self.decoder)
        self.running, self.faults, self.plans, self.given = {}, {}, {}, {}

    def begin(self, name, prompt, **fields):
        options = {"max_tokens": 6, "temperature": 0, "attention": {"top_k": 1}} | fields
        if look := options["attention"]:
            edits = look.get("edits", {})
            own = {  # a hybrid has fewer layers that attend
                key: each
                for key, each in edits.items()
                if key in self.model.places or {edit["tap"] for edit in each} <= STATE_TAPS
            }
            options["attention"] = look | {"edits": own}
        request = validate(CompletionRequest, {"model": self.model.name, "prompt": prompt} | options)
        plan = replace(plan_generation(self.model, request), **self.options)
        self.plans[name], self.given[name] = plan, []
        self.running[name] = RunningGeneration(self.decoder, request, plan, self.given[name].append)

    def ask(self, name, prompt, **fields):
        self.begin(name, prompt, **fields)
        while self.running[name].unread:
            assert not read_prompts(self.decoder, [self.running[name]], 10_000)

    def turn(self):
        live = {name: each for name, each in self.running.items() if not each.has_ended and name not in self.faults}
        for at, fault in decode(self.decoder, list(live.values())).items():
            name = list(live)[at]
            self.faults[name] = fault
            live[name].leave()
        return list(live)

    def end(self):
        """Run to the end, and return the choices of each, or its fault."""
        while self.turn():
            pass
        _OPEN.remove(self.decoder)
        self.decoder.close()
        ended = {name: each.end() for name, each in self.running.items() if name not in self.faults}
        return {name: choices(each) for name, each in ended.items()} | self.faults


def choices(ended):
    (whole,) = ended.last
    return validate(Completion, orjson.loads(lines_of([whole]))).choices


def alone(model, prompt, **fields):
    callers = Callers(model, alone=True)
    callers.ask("it", prompt, **fields)
    return callers.end()["it"]


def tokens(found):
    return [[token.id for token in choice.attention] for choice in found]


def same(found, expected):
    assert tokens(found) == tokens(expected)
    for choice, own in zip(found, expected, strict=True):
        for token, other in zip(choice.attention, own.attention, strict=True):
            assert (token.position, token.token) == (other.position, other.token)
            for layer, theirs in zip(token.layers, other.layers, strict=True):
                compare(layer.model_dump(), theirs.model_dump())


def compare(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in set(expected) - {"keys"}:  # which of two keys is first may be a tie
            compare(found[name], expected[name])
    elif isinstance(expected, np.ndarray | list | float):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    else:
        assert found == expected


@pytest.mark.sampled(kind=4)
@pytest.mark.parametrize("kind", FAMILIES)
def test_joined_texts_have_the_logits_and_weights_that_they_have_alone(kind):
    """Some are longer than a window, and one leaves its slab for a larger one."""
    wanted, entries = FAMILIES[kind]
    lengths = (3, 21, 61, 40) if wanted == "unlike" else (61, 61, 61)
    found = joined(loaded(kind, **entries), 6, [TEXT[at : at + length] for at, length in enumerate(lengths)])
    assert found.kind == wanted, found
    if wanted == "no":
        assert found.reason
    else:
        assert found.differ <= BOUND
        assert found.weights <= 1e-5
        assert found.tokens


EDITS = [
    {},
    {"0": [{"tap": "weights", "heads": [0], "set": 0.0}]},
    {"1": [{"tap": "output", "scale": -1.5}], "0": [{"tap": "scores", "scale": 0.5}]},
    {"1": [{"tap": "weights", "keys": [0], "set": 0.0, "renormalize": True}]},
    {"0": [{"tap": "v", "queries": None, "scale": 2.0}]},
]
REPORTS = [
    {"statistics": ["entropy", "max_weight"], "top_k": 2},
    {"statistics": [], "weights": True},
    {"statistics": ["entropy"], "layers": [1], "heads": [1]},
    {"top_k": 1, "weights": True},
]
requests = st.fixed_dictionaries({
    "prompt": st.tuples(st.integers(0, 20), st.one_of(st.integers(1, 30), st.integers(58, 66), st.just(126))).map(
        lambda each: TEXT[each[0] : each[0] + each[1]]
    ),
    "max_tokens": st.integers(1, 9),
    "temperature": st.sampled_from([0, 0.8]),
    "seed": st.integers(0, 3),
    "n": st.sampled_from([1, 1, 2]),
    "attention": st.builds(lambda own, edits: own | {"edits": edits}, st.sampled_from(REPORTS), st.sampled_from(EDITS)),
})  # fmt: skip


@cache
def alone_by_json(kind, text):
    return alone(loaded(kind, **FAMILIES[kind][1]), **orjson.loads(text))


@pytest.mark.long
@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize("kind", ["mistral", "lfm2_moe"])
@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(order=st.lists(st.tuples(st.integers(0, 6), requests), min_size=2, max_size=6), left=st.integers(0, 9))
def test_texts_that_come_and_go_in_any_order_are_as_alone(kind, order, left):
    callers = Callers(loaded(kind, **FAMILIES[kind][1]))
    waiting = deque(sorted(enumerate(order), key=lambda each: each[1][0]))
    turn = 0
    while waiting:
        while waiting and waiting[0][1][0] <= turn:
            number, (_, fields) = waiting.popleft()
            callers.ask(number, **fields)
        callers.turn()
        if turn == left and callers.running:  # its caller has gone
            gone = min(callers.running)
            callers.running.pop(gone).leave()
        turn += 1
    found = callers.end()
    assert callers.decoder._groups == {}
    for number, choice in found.items():
        same(choice, alone_by_json(kind, orjson.dumps(order[number][1]).decode()))


def test_choices_read_their_prompt_once():
    model, lengths = llama(), []
    hook = model.model.register_forward_pre_hook(
        lambda _, __, given: lengths.append([*given["input_ids"].shape]), with_kwargs=True
    )
    try:
        callers = Callers(model)
        callers.decoder.joining  # noqa: B018  # the trial, which has passes of its own
        lengths.clear()
        callers.ask("it", TEXT[:9], n=3, temperature=0.9, seed=1, max_tokens=4)
        found = callers.end()["it"]
    finally:
        hook.remove()
    assert lengths == [[1, 9], [3, 1], [3, 1], [3, 1]]
    same(found, alone(model, TEXT[:9], n=3, temperature=0.9, seed=1, max_tokens=4))


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "llama4_text", "deepseek_v3", "lfm2_moe", "jamba"])
def test_a_long_prompt_is_read_in_parts_with_the_same_tokens(kind, monkeypatch):
    model = loaded(kind, **FAMILIES[kind][1])
    fields = {"attention": {"weights": True, "edits": EDITS[2]}}
    whole = alone(model, TEXT[:50], **fields)
    monkeypatch.setattr(decoding, "PART", 12)
    lengths = []
    hook = model.model.register_forward_pre_hook(
        lambda _, __, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        callers = Callers(model)
        callers.decoder.reading  # noqa: B018
        lengths.clear()
        callers.ask("it", TEXT[:50], **fields)
    finally:
        hook.remove()
    assert lengths == ([50] if kind == "jamba" else [12, 12, 12, 12, 2])
    same(callers.end()["it"], whole)


@pytest.mark.parametrize("kind", ["llama", "mistral", "llama4_text"])
def test_texts_attend_by_one_call_as_on_a_gpu_as_they_do_alone(kind, monkeypatch):
    """Some are longer than a window; one is edited; the keys of grouped heads are not copied."""
    monkeypatch.setattr(decode_attention, "on_gpu", lambda x: True)
    model = loaded(kind, **FAMILIES[kind][1]) if kind in FAMILIES else llama()
    requests_by_name = {
        name: {"prompt": TEXT[:length], "attention": {"statistics": [], "edits": edits}, "logprobs": 3}
        for name, (length, edits) in enumerate([(3, {}), (21, EDITS[2]), (61, EDITS[3]), (40, {})])
    }
    callers = Callers(model)
    for name, fields in requests_by_name.items():
        callers.ask(name, **fields)
    found = callers.end()
    assert {each.joined for each in callers.running.values()} == {4}
    for name, fields in requests_by_name.items():
        (own,), (ours,) = alone(model, **fields), found[name]
        assert own.logprobs.tokens == ours.logprobs.tokens
        np.testing.assert_allclose(ours.logprobs.token_logprobs, own.logprobs.token_logprobs, atol=1e-5)


def test_draws_are_the_same_whoever_runs_beside():
    model, fields = llama(), {"temperature": 1.1, "seed": 3, "max_tokens": 8}
    own = alone(model, TEXT[:7], **fields)
    for others in range(1, 4):
        callers = Callers(model)
        for number in range(others):
            callers.ask(number, TEXT[number : 12 * (number + 1)], temperature=0.7, max_tokens=3 + number)
        callers.turn()
        callers.ask("it", TEXT[:7], **fields)
        same(callers.end()["it"], own)


def test_a_text_whose_logits_are_nan_fails_alone_and_leaves_nothing_behind():
    model, nan = llama(), {"1": [{"tap": "output", "scale": 3e38}]}
    callers = Callers(model)
    callers.ask("first", TEXT[:5], max_tokens=9)
    callers.ask("late", TEXT[:40], max_tokens=1)
    callers.ask("broken", TEXT[:50], temperature=0.5, max_tokens=9)
    text = callers.running["broken"].texts[0]
    callers.turn()
    plan = plan_generation(
        model, validate(CompletionRequest, {"model": "it", "prompt": [3], "attention": {"edits": nan}})
    )
    text.edits = type(text.edits)(model, plan.edits)
    callers.turn()
    assert "broken" in callers.faults
    callers.ask("after", TEXT[:3], max_tokens=9)
    found = callers.end()
    assert isinstance(found["broken"], InvalidRequest)
    same(found["first"], alone(model, TEXT[:5], max_tokens=9))
    same(found["after"], alone(model, TEXT[:3], max_tokens=9))


@pytest.mark.parametrize("fault", [RuntimeError("broken"), torch.OutOfMemoryError("full")])
def test_a_joined_pass_that_fails_runs_each_alone(fault, monkeypatch):
    model, run, turns = llama(), JoinedGroup.run, []

    def failing(group):
        turns.append(len(group.texts))
        logits = run(group)
        if len(turns) in {2, 4}:
            raise fault
        return logits

    callers = Callers(model)
    for name, length in {"a": 5, "b": 62, "c": 31}.items():
        callers.ask(name, TEXT[:length])
    callers.decoder.joining  # noqa: B018
    monkeypatch.setattr(JoinedGroup, "run", failing)
    found = callers.end()
    assert turns == [3] * 5
    for name, length in {"a": 5, "b": 62, "c": 31}.items():
        same(found[name], alone(model, TEXT[:length]))


@pytest.mark.parametrize("method", ["add", "remove"])
def test_a_text_for_which_memory_is_missing_hurts_nobody_else(method, monkeypatch):
    """Taken in, it runs alone; given back, it fails alone."""
    model, own = llama(), getattr(TextSlab, method)
    callers = Callers(model)
    for name, length in {"a": 5, "b": 62, "c": 31}.items():
        callers.ask(name, TEXT[:length])
    callers.decoder.joining  # noqa: B018
    chosen = callers.running["b"].texts[0].state["past_key_values"]

    def failing(slab, text, *args, **options):
        if method == "add" and text is chosen:
            raise torch.OutOfMemoryError("full")
        own(slab, text, *args, **options)
        if method == "remove" and text is chosen and options["give_back"]:
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(TextSlab, method, failing)
    found = callers.end()
    for name, length in {"a": 5, "b": 62, "c": 31}.items():
        if (name, method) == ("b", "remove"):
            assert isinstance(found[name], torch.OutOfMemoryError)
        else:
            same(found[name], alone(model, TEXT[:length]))


def held_bytes(callers):
    """The bytes of all tensors in which keys, values and states of texts lie."""
    slabs = [slab for group in callers.decoder._groups.values() for slab in group.past.slabs]
    slabs += [slab.encoded for slab in slabs if slab.encoded is not None]
    tensors = [x for slab in slabs for own in slab._tensors.values() for x in own]
    for each in callers.running.values():
        for text in each.texts:
            past = text.state["past_key_values"]
            encoded = past.cross_attention_cache.layers if isinstance(past, EncoderDecoderCache) else []
            for layer in [*own_past(past).layers, *encoded]:
                tensors += [x for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "deepseek_v3", "gpt_oss"])
def test_what_texts_hold_is_within_their_prices(kind):
    model = loaded(kind, **FAMILIES[kind][1])
    callers = Callers(model)
    lengths = [61, 3, 5, 61, 9, 33, 126, 2, 7, 60, 12, 1]
    for number, length in enumerate(lengths):
        callers.ask(number, TEXT[:length], max_tokens=4 + number % 5)
        callers.turn()
        check_prices(callers, model)
    while callers.turn():
        check_prices(callers, model)
    callers.end()
    assert held_bytes(callers) == 0


def check_prices(callers, model):
    running = [name for name, each in callers.running.items() if each.texts]
    assert held_bytes(callers) <= sum(callers.plans[name].cache_bytes(model) for name in running)


def test_memory_is_freed_when_all_have_ended():
    callers = Callers(llama())
    for number in range(3):
        callers.ask(number, TEXT[: 20 * number + 3])
    callers.turn()
    slabs = [weakref.ref(x) for group in callers.decoder._groups.values() for slab in group.past.slabs
             for own in slab._tensors.values() for x in own]  # fmt: skip
    assert slabs
    callers.end()
    assert not [each for each in slabs if each() is not None]


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}


@pytest.mark.sampled
@pytest.mark.parametrize("scaling", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_a_rotation_by_the_length_of_a_text_is_by_its_own(scaling, monkeypatch):
    rotation = {"rope_theta": 1e4, "original_max_position_embeddings": 32} | scaling
    small = built("llama", max_position_embeddings=32, rope_parameters=rotation).requires_grad_(False)
    small.generation_config.pad_token_id, small.generation_config.eos_token_id = 0, None
    model = LoadedModel("llama", small, tokenizer(), device())
    monkeypatch.setattr(model.reader, "max_length", None)
    expected = {length: alone(model, TEXT[:length]) for length in (5, 30, 50, 36)}
    request = ModelForwardRequest(tokens=TEXT[:36], return_=["output"])
    before = forward_reply(model, request)
    callers = Callers(model)
    for length in (50, 5, 36, 30):
        callers.ask(length, TEXT[:length])
    found = callers.end()
    after = forward_reply(model, request)
    for length, own in expected.items():
        same(found[length], own)
    np.testing.assert_array_equal(after.layers[1].output, before.layers[1].output)


@pytest.mark.slow
def test_states_that_a_model_keeps_in_its_modules_stay_with_their_text():
    model = loaded("recurrent_gemma", **FAMILIES["recurrent_gemma"][1])
    callers = Callers(model)
    for length in (1, 9, 30):
        callers.ask(length, TEXT[:length], n=2, temperature=0.8, seed=4)
        callers.turn()
    found = callers.end()
    for length in (1, 9, 30):
        same(found[length], alone(model, TEXT[:length], n=2, temperature=0.8, seed=4))


def read_at_once(model, prompts):
    """Return the tokens of plain texts whose prompts are read in one call, and the shapes of the passes over them."""
    callers, shapes = Callers(model), []
    callers.decoder.joining, callers.decoder.reading  # noqa: B018
    for number, prompt in enumerate(prompts):
        fields = {"model": model.name, "prompt": prompt, "max_tokens": 6, "temperature": 0}
        request = validate(CompletionRequest, fields)
        plan = plan_generation(model, request)
        callers.running[number] = RunningGeneration(callers.decoder, request, plan, lambda _: None)
    hook = model.model.register_forward_pre_hook(
        lambda _, __, given: shapes.append([*given["input_ids"].shape]), with_kwargs=True
    )
    try:
        assert not read_prompts(callers.decoder, list(callers.running.values()), 10_000)
    finally:
        hook.remove()
    found = [each.texts[0].ids for each in callers.running.values()]
    while callers.turn():
        pass
    _OPEN.remove(callers.decoder)
    callers.decoder.close()
    return found, shapes


STATISTICS = "entropy", "max_weight", "sink_share", "mean_distance", "received", "own_position", "induction", "locality"


def asked_of(number, tokens):
    """What each of sixteen callers asks of its text, whose prompt has so many tokens, unlike those of the others."""
    look = {"statistics": [STATISTICS[(number + at) % 8] for at in range(1 + number % 4)], "top_k": number % 3}
    look |= {"weights": number % 4 == 0, "layers": [1]} if number > 8 else {}
    look |= {"heads": [1, 0]} if number % 5 == 1 else {}
    if number % 7 == 2:
        spans = {"spans": [{"name": "first", "tokens": [0, 2]}]} if number < 8 else {}
        look |= {"statistics": ["classes"], "statistic_options": {"token_classes": {"x": TEXT[:3]}, **spans}}
    if number % 7 == 4:
        pairs = {"pairs": [[tokens - 1, 0], [tokens, tokens - 2], [tokens, 1]]}
        look |= {"statistics": ["pairs", "entropy"], "statistic_options": pairs}
    return look


@pytest.mark.sampled(kind=4)
@pytest.mark.parametrize("kind", FAMILIES)
def test_sixteen_callers_with_statistics_of_their_own_are_told_as_alone(kind):
    """Prompts are read together where a past can be cut; some are longer than a window."""
    model = loaded(kind, **FAMILIES[kind][1])
    layers = {} if kind == "jamba" else {1: True}
    asked = []
    for number in range(16):
        prompt = TEXT[number : number + (3, 6, 5, 7, 21, 30, 41, 35)[number % 8]]
        look = asked_of(number, len(prompt))
        if not layers:
            look.pop("layers", None)
        asked.append({"prompt": prompt, "attention": look, "max_tokens": 3})
    callers = Callers(model)
    for number, fields in enumerate(asked):
        callers.begin(number, **fields)
    assert not read_prompts(callers.decoder, list(callers.running.values()), 10_000)
    found = callers.end()
    if kind in {"gpt2", "qwen3", "deepseek_v3"}:
        assert {each.joined for each in callers.running.values()} == {16}
    for number, fields in enumerate(asked):
        same(found[number], alone(model, **fields))


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize(
    "kind", ["gpt2", "qwen3", "mistral", "llama4_text", "deepseek_v3", "lfm2_moe", "recurrent_gemma"]
)
def test_prompts_that_are_read_together_have_the_tokens_of_each_alone(kind):
    model = loaded(kind, **FAMILIES[kind][1])
    prompts = [TEXT[2:11], TEXT[:14], TEXT[5:14]]
    found, shapes = read_at_once(model, prompts)
    together = kind in {"gpt2", "qwen3", "deepseek_v3"}  # windows and states keep no past that could be cut
    assert shapes == ([[3, 14]] if together else [[1, 9], [1, 14], [1, 9]])
    assert found == [read_at_once(model, [prompt])[0][0] for prompt in prompts]


def test_prompts_are_read_with_the_most_others_that_are_alike_in_length():
    model = loaded("qwen3", **FAMILIES["qwen3"][1])
    prompts = [TEXT[:length] for length in (18, 33, 9, 60, 40, 10, 59)]
    found, shapes = read_at_once(model, prompts)
    assert shapes == [[3, 18], [4, 60]]
    assert found == [read_at_once(model, [prompt])[0][0] for prompt in prompts]
