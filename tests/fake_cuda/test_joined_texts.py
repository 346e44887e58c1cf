"""Texts that share passes on a GPU: a pass over many launches as much as one over a single text, and waits as often."""

import pytest
import torch
from tools.models_walk.model_types import built

from attention_contract.schemas.openai import CompletionRequest
from attention_contract.validation import validate
from attention_service.models.generation.decoding import decode_attention
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.decoding.joined_group import Joining
from attention_service.models.generation.decoding.reading_on import ReadingOn
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.generation_turns import decode, read_prompts
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel
from tests.client.tiny_models import tokenizer
from tests.fake_cuda.machine import CUDA
from tests.models.small_models import device

LAYERS, TEXTS, TURNS, STAGES = 2, 6, 2, 18
FIELDS = {
    "nothing": None,
    "statistics": {"statistics": ["entropy"]},
    "edits": {"statistics": [], "edits": {"1": [{"tap": "context", "heads": [1], "set": 0.0}]}},
}


def attention(query, key, value, bias=None, *, scale=None):
    """PyTorch's kernel for any bias, which a GPU has with heads of 8 in float32."""
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, False, scale=scale)[0]


def of_one_text(module, query, key, value, mask, *, scaling=None, **_):
    return attention(query, key, value, mask, scale=scaling).transpose(1, 2).contiguous(), None


def generation(decoder, number, options):
    prompt = [3 + (number + place) % 5 for place in range(3 + number)]
    fields = {"model": "llama", "prompt": prompt, "max_tokens": 9, "temperature": 0, "attention": options}
    request = validate(CompletionRequest, fields)
    return RunningGeneration(decoder, request, plan_generation(decoder.loaded, request), lambda _: None)


def turn(counts, decoder, texts, options):
    """The launches and the waits of a turn in which so many texts get a token."""
    running = [generation(decoder, number, options) for number in range(texts)]
    while any(each.unread for each in running):
        assert not read_prompts(decoder, running, 1000)
    for _ in range(TURNS):
        before = counts.launches.total(), len(counts.waits)
        assert not decode(decoder, running)
        found = counts.launches.total() - before[0], len(counts.waits) - before[1]
    assert {each.joined for each in running} == {texts}
    for each in running:
        each.leave()
    return found


@pytest.mark.long
@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize("kind", FIELDS)
def test_a_pass_over_many_texts_launches_what_one_over_one_does_and_two_more_a_layer(cuda, monkeypatch, kind):
    model = built("llama", num_hidden_layers=LAYERS, num_key_value_heads=4, max_position_embeddings=256)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    loaded = LoadedModel("llama", model.requires_grad_(False), tokenizer(), device())
    host = torch.Generator()
    monkeypatch.setattr(torch, "Generator", lambda _: host)  # the build of torch has none of a GPU
    monkeypatch.setattr(decode_attention, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(decode_attention, "sdpa_attention_forward", of_one_text)
    with cuda.counted(scalar=1.0) as counts:
        model.to(CUDA)
        loaded.device = cuda.device()
        decoder = Decoder(loaded)
        decoder._joining = Joining(unlike=True, alike=True, direct=True)
        decoder._reading = ReadingOn(in_parts=True, by_steps=True)
        alone, waits = turn(counts, decoder, 1, FIELDS[kind])
        together, waits_together = turn(counts, decoder, TEXTS, FIELDS[kind])
        decoder.close()
    edited = TEXTS if kind == "edits" else 0  # each edited row of a layer attends by the stages
    assert together <= alone + 2 * LAYERS + STAGES * edited
    assert waits_together <= waits + edited
