"""Edits of states of layers that mix tokens by a running state, while tokens are generated: those of plain hooks."""

from functools import cache

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.generation.decoding.test_joined import Callers, alone
from tests.models.generation.decoding.test_kept_prefixes import turn
from tests.models.generation.decoding.test_read_texts import text
from tests.models.small_models import device
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.float64_runs import compute_in_float64, made_in_float64
from attention_service.models.passes.points import EMBEDDINGS

KINDS = ("mamba2", "qwen3_next", "rwkv", "falcon_h1", "zamba2", "kimi_linear")
MORE = (
    "mamba", "falcon_mamba", "xlstm", "jamba", "bamba", "nemotron_h", "granitemoehybrid", "qwen3_5_text", "olmo_hybrid",
    "minimax", "recurrent_gemma",
)  # fmt: skip
EVERY = [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)]
JOINED = ("mamba2", "qwen3_next", "falcon_h1", "jamba")
TAPS = ("hidden", "output", "mlp")
PLACES = {"everywhere": {}, "some tokens": {"queries": [2, 9]}, "the answer": {}}
PROMPT = text(9)
NEW = 6


def made(kind):
    with made_in_float64():
        model = built(kind).requires_grad_(False).double()
    compute_in_float64(model)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


@cache
def loaded(kind):
    torch.set_num_threads(1)
    return LoadedModel(kind, made(kind), tokenizer(), device())


def editable(kind):
    """The layers without attention, each with the taps of its states that are edited while tokens are generated."""
    model = loaded(kind)
    return {
        key: [tap for tap in TAPS if model.runner.refuses((place.key, tap), "generate") is None]
        for key, place in (model.places | model.implicit).items()
        if place.mixes != "attention"
    }


def added(kind, key, tap):
    """A tensor to add, ``[width]``."""
    model = loaded(kind)
    place = (model.places | model.implicit).get(key)
    width = model.runner.width(EMBEDDINGS if place is None else (place.key, "hidden"))
    return 2 * torch.randn(width, generator=torch.Generator().manual_seed(len(tap)), dtype=torch.float64)


class Hooked:
    """transformers' own model, in which a hook adds to what a module returns at some tokens."""

    def __init__(self, kind, key, tap, x, first=0, tokens=None):
        given = loaded(kind)
        place = (given.places | given.implicit).get(key)
        site = given.model.get_input_embeddings() if place is None else place.layer if tap == "hidden" else place.module
        self.model, self.x, self.first, self.tokens, self.seen = made(kind), x, first, tokens, 0
        name = next(name for name, module in given.model.named_modules() if module is site)
        self.model.get_submodule(name).register_forward_hook(self.hook)

    def hook(self, _, __, output):
        state = output[0] if isinstance(output, tuple) else output
        at = range(self.seen, self.seen + state.shape[1])
        rows = [float(number >= self.first and (self.tokens is None or number in self.tokens)) for number in at]
        self.seen += state.shape[1]
        state = state + torch.tensor(rows, dtype=state.dtype)[:, None] * self.x
        return (state, *output[1:]) if isinstance(output, tuple) else state

    def generate(self, prompt, count):
        with torch.no_grad():
            found = self.model.generate(
                torch.tensor([prompt]), max_new_tokens=count, do_sample=False, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        ids = found.sequences[0, len(prompt) :].tolist()
        return [logits[0].log_softmax(-1)[token].item() for logits, token in zip(found.logits, ids, strict=True)]


def asked(key, tap, x, places):
    edit = {"tap": tap, "add": x.tolist()} | PLACES[places]
    begins = "answer" if places == "the answer" else "prompt"
    return {"max_tokens": NEW, "logprobs": 0, "attention": {"edits": {key: [edit]}, "from": begins, "statistics": []}}


def log_probabilities(choices):
    (choice,) = choices
    return choice.logprobs.token_logprobs


@pytest.mark.sampled
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("tap", ["hidden", "output", "embeddings"])
@pytest.mark.parametrize("kind", EVERY)
def test_tokens_are_those_of_a_hook_that_adds(kind, tap, places):
    plain = log_probabilities(alone(loaded(kind), PROMPT, max_tokens=NEW, logprobs=0, attention=None))
    layers = ["embeddings"] if tap == "embeddings" else [key for key, taps in editable(kind).items() if tap in taps]
    assert layers
    for key in layers:
        x = added(kind, key, tap)
        first = len(PROMPT) if places == "the answer" else 0
        expected = Hooked(kind, key, tap, x, first, PLACES[places].get("queries")).generate(PROMPT, NEW)
        mine = log_probabilities(alone(loaded(kind), PROMPT, **asked(key, tap, x, places)))
        np.testing.assert_allclose(mine, expected, atol=1e-6, rtol=1e-6)  # they come in float32
        assert np.abs(np.subtract(mine, plain)).max() > 1e-4


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", JOINED)
def test_texts_that_share_passes_have_each_its_own_edits(kind):
    requests = {"plain": {"prompt": text(7), "max_tokens": NEW, "logprobs": 0, "attention": None}}
    taps = editable(kind) | {"embeddings": ["embeddings"]}
    every = [(key, tap, places) for key, own in taps.items() for tap in own for places in PLACES]
    for number, (key, tap, places) in enumerate(every):
        x = added(kind, key, tap) * (1 + number / 4)
        requests[number] = {"prompt": text(10 + number % 3), **asked(key, tap, x, places)}
    callers = Callers(loaded(kind))
    for name, fields in requests.items():
        callers.ask(name, **fields)
    running = callers.running
    found = callers.end()
    assert max(each.joined for each in running.values()) == len(requests)
    for name, fields in requests.items():
        own = log_probabilities(alone(loaded(kind), **fields))
        np.testing.assert_allclose(log_probabilities(found[name]), own, atol=1e-6, rtol=1e-6)


def test_what_edits_left_in_a_state_is_read_on_by_the_same_edits_alone():
    model = loaded("mamba2")
    steered = asked("0", "hidden", added("mamba2", "0", "hidden"), "everywhere")["attention"]
    kept, whole = Decoder(model, 2**24), Decoder(model)
    try:
        _, ids = turn(kept, text(100), steered)
        for attention, read in ((None, 0), (steered, len(ids) - 1)):
            found, _ = turn(kept, [*ids, 5, 9], attention)
            expected, _ = turn(whole, [*ids, 5, 9], attention)
            assert found.usage.prompt_tokens_details.cached_tokens == read
            mine, own = (log_probabilities(each.choices) for each in (found, expected))
            np.testing.assert_allclose(mine, own, atol=1e-6, rtol=1e-6)
    finally:
        kept.close()
        whole.close()


def test_edits_of_a_model_without_attention_need_no_word_on_statistics():
    model = loaded("mamba2")
    wanted = asked("0", "hidden", added("mamba2", "0", "hidden"), "everywhere")
    unsaid = {name: value for name, value in wanted["attention"].items() if name != "statistics"}
    said, silent = (alone(model, PROMPT, **wanted | {"attention": each}) for each in (wanted["attention"], unsaid))
    assert log_probabilities(said) == log_probabilities(silent)
    for refused in ({}, unsaid | {"statistics": ["entropy"]}, unsaid | {"top_k": 1}):
        with pytest.raises(InvalidRequest, match="not made token by token") as fault:
            alone(model, PROMPT, **wanted | {"attention": refused})
        assert fault.value.param.startswith("attention")
