"""Texts of encoder-decoders share the passes of their decoder: each has the logits, tokens and weights of it alone."""

from functools import cache

import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.generation.decoding.test_joined import TEXT, Callers, alone, held_bytes, same, tokens
from tests.models.small_models import device
from tools.models_walk.joined import BOUND, joined
from tools.models_walk.model_types import built
from transformers import GenerationConfig

from attention_contract.schemas.openai import CompletionRequest
from attention_contract.validation import validate
from attention_service.models.generation.decoding import decode_attention
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel

LONG = {"max_position_embeddings": 256}
KINDS = {
    "t5": {}, "bart": LONG, "marian": LONG, "pegasus": LONG, "m2m_100": LONG, "t5gemma": {}, "switch_transformers": {},
}  # fmt: skip
PROMPTS = [TEXT[:3], TEXT[1:40], TEXT[2:72], TEXT[3:10]]
"""Of unlike lengths, in slabs of two sizes."""


@cache
def loaded(kind):
    torch.set_num_threads(1)
    model = built(kind, **KINDS[kind]).requires_grad_(False)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=1, bos_token_id=1, pad_token_id=0, eos_token_id=None
    )
    return LoadedModel(kind, model, tokenizer(), device())


def prompts(kind):
    return [prompt[: loaded(kind).reader.max_length] for prompt in PROMPTS]


def at_different_steps(model, texts, **fields):
    """Requests that begin one turn after another, so that their decoders have unlike lengths."""
    callers = Callers(model)
    for name, prompt in enumerate(texts):
        callers.ask(name, prompt, **fields)
        callers.turn()
    return callers


@pytest.mark.sampled(kind=4)
@pytest.mark.parametrize("kind", KINDS)
def test_joined_texts_have_the_logits_and_weights_that_they_have_alone(kind):
    found = joined(loaded(kind), 6, prompts(kind))
    assert (found.kind, found.tokens) == ("unlike", True), found
    assert found.differ <= BOUND
    assert found.weights <= 1e-5


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", KINDS)
def test_joined_texts_have_the_tokens_of_transformers(kind):
    """Each text by ``generate`` alone; those that share a pass have decoders of unlike lengths."""
    model = loaded(kind)
    callers = at_different_steps(model, prompts(kind), max_tokens=9)
    shared = {name: each.joined for name, each in callers.running.items()}
    found = callers.end()
    assert max(shared.values()) == len(PROMPTS)
    for name, prompt in enumerate(prompts(kind)):
        given = torch.tensor([prompt])
        own = model.model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=9, do_sample=False)
        assert tokens(found[name]) == [own[0, 1:].tolist()]


CROSS = {"cross.0": [{"tap": "weights", "heads": [0], "keys": [1], "set": 0.0, "renormalize": True}]}
OWN = {"decoder.1": [{"tap": "v", "scale": -2.0}, {"tap": "scores", "scale": 0.5}]}
VALUES = {"cross.1": [{"tap": "v", "keys": [0], "scale": 9.0}], "encoder.0": [{"tap": "output", "scale": 1.5}]}


@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_edits_draws_and_choices_stay_with_their_text(kind):
    model = loaded(kind)
    asked = [
        {"prompt": TEXT[:5], "attention": {"weights": True}},
        {"prompt": TEXT[:40], "attention": {"weights": True, "edits": CROSS}},
        {"prompt": TEXT[4:70], "attention": {"top_k": 2, "edits": OWN}, "temperature": 0.8, "seed": 3},
        {"prompt": TEXT[9:20], "attention": {"weights": True, "edits": VALUES, "layers": ["cross.1"]}, "n": 2},
        {"prompt": TEXT[:7], "attention": {"heads": [1], "weights": True}, "max_tokens": 2},
    ]
    callers = Callers(model)
    for name, fields in enumerate(asked):
        callers.ask(name, **{"max_tokens": 8} | fields)
        callers.turn()
    found = callers.end()
    for name, fields in enumerate(asked):
        same(found[name], alone(model, **{"max_tokens": 8} | fields))


def test_alone_it_has_the_same_bits():
    callers = Callers(loaded("bart"))
    for number, prompt in enumerate(PROMPTS):
        callers.ask(number, prompt)
    fields = {"prompt": TEXT[:9], "attention": None, "logprobs": 3}
    callers.ask("it", **fields, alone=True)
    (found,), (own,) = callers.end()["it"], alone(loaded("bart"), **fields)
    assert found == own


def test_a_text_that_is_nan_or_leaves_changes_no_other():
    model = loaded("bart")
    nan = {"attention": {"edits": {"cross.1": [{"tap": "output", "scale": 3e38}]}}}
    callers = at_different_steps(model, PROMPTS, max_tokens=9)
    bound = plan_generation(model, validate(CompletionRequest, {"model": "it", "prompt": [3]} | nan)).edits
    broken = callers.running[1].texts[0]
    broken.edits = type(broken.edits)(model, bound)
    callers.turn()
    callers.running[2].leave()
    callers.running.pop(2)
    callers.ask("late", TEXT[:33], max_tokens=9)
    found = callers.end()
    assert 1 in callers.faults
    for name, prompt in {0: PROMPTS[0], 3: PROMPTS[3], "late": TEXT[:33]}.items():
        same(found[name], alone(model, prompt, max_tokens=9))


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_texts_attend_by_one_call_as_on_a_gpu_as_they_do_alone(kind, monkeypatch):
    monkeypatch.setattr(decode_attention, "on_gpu", lambda _: True)
    found = at_different_steps(loaded(kind), PROMPTS, attention=None, logprobs=0).end()
    for name, prompt in enumerate(PROMPTS):
        (own,) = alone(loaded(kind), prompt, attention=None, logprobs=0)
        assert found[name][0].text == own.text
        near = pytest.approx(own.logprobs.token_logprobs, abs=1e-4)
        assert found[name][0].logprobs.token_logprobs == near


@cache
def looking(marker):
    """A decoder whose cross-attentions look at one token of the encoder's text, wherever it is.

    The encoder has no layers, so that its state of a token is the normed embedding. Keys are these states, and each
    query is that of the marker, whatever the decoder has read.
    """
    model = built("bart", **LONG, encoder_layers=0, d_model=16, encoder_attention_heads=1, decoder_attention_heads=1)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=1, bos_token_id=1, pad_token_id=0, eos_token_id=None
    )
    model.requires_grad_(False)
    encoder = model.get_encoder()
    encoder.embed_positions.weight.zero_()
    state = encoder(torch.tensor([[marker]])).last_hidden_state[0, 0]
    for layer in model.get_decoder().layers:
        cross = layer.encoder_attn
        cross.q_proj.weight.zero_()
        cross.q_proj.bias.copy_(40 * state)
        cross.k_proj.weight.copy_(torch.eye(16))
        cross.k_proj.bias.zero_()
    return LoadedModel("bart", model, tokenizer(), device())


def test_each_decoder_looks_at_the_place_of_the_marker_in_its_own_text():
    model = looking(50)
    places = {3: 5, 0: 9, 68: 70, 1: 2}  # the marker's place in a text of so many tokens
    texts = [[50 if at == place else 3 + at % 40 for at in range(length)] for place, length in places.items()]
    callers = at_different_steps(
        model, texts, attention={"layers": ["cross.0", "cross.1"], "top_k": 1, "weights": True}
    )
    found = callers.end()
    assert max(each.joined for each in callers.running.values()) == len(texts)
    for name, (place, length) in enumerate(places.items()):
        for token in found[name][0].attention:
            for layer in token.layers:
                (weights,) = layer.weights.tolist()
                assert layer.top_keys.keys.tolist() == [[place]]
                assert len(weights) == length
                assert weights[place] > 0.99


@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_what_texts_hold_is_within_their_prices_and_freed(kind):
    model, lengths = loaded(kind), [61, 3, 5, 126, 9, 33]
    callers = Callers(model)
    for number, length in enumerate(lengths):
        callers.ask(number, TEXT[:length], max_tokens=4 + number % 3)
        callers.turn()
        running = [name for name, each in callers.running.items() if each.texts]
        assert held_bytes(callers) <= sum(callers.plans[name].cache_bytes(model) for name in running)
    callers.end()
    assert held_bytes(callers) == 0
