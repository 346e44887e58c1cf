"""Every family gives the same tokens and scores with its attention on the service as with eager attention."""

import pytest
import torch
from transformers import PreTrainedModel

from attention_client import Client
from attention_client.transformers import attach
from tests.client.transformers.families import DECODERS, ENCODERS, PAIRS, prompt, tiny

QUICK = {"bert", "gemma2", "gpt_oss", "llama", "t5"}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
WAYS = {
    "greedy": GREEDY,
    "beams": GREEDY | {"num_beams": 3},
    "static": GREEDY | {"cache_implementation": "static", "disable_compile": True},
    "no cache": GREEDY | {"use_cache": False},
}


def walk(*families: str) -> list[object]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in families]


def compare_generation(model: PreTrainedModel, client: Client, way: str, **inputs: torch.Tensor) -> None:
    expected = model.generate(**inputs, **WAYS[way])
    with attach(model, client):
        found = model.generate(**inputs, **WAYS[way])
    assert found.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["greedy", "beams", pytest.param("static", marks=pytest.mark.slow), "no cache"])
@pytest.mark.parametrize("family", walk(*DECODERS))
def test_a_decoder_generates_the_same(family, way, client):
    compare_generation(tiny(family), client, way, **prompt())


@pytest.mark.parametrize("family", walk(*DECODERS))
def test_a_decoder_gives_the_same_logits_and_attentions(family, client):
    model, inputs = tiny(family), prompt()
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
        whole = model(inputs["input_ids"][1:])
        with attach(model, client):
            found = model(**inputs, output_attentions=True)
            unpadded = model(inputs["input_ids"][1:])
    torch.testing.assert_close(found.logits[real], expected.logits[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(unpadded.logits, whole.logits, atol=1e-5, rtol=1e-5)
    assert expected.attentions
    if family == "granite_swa":
        return  # eager attention returns its weights before the sinks take their share
    for ours, theirs in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(ours[1], theirs[1], atol=1e-5, rtol=1e-5)
        assert not ours[0, :, :3].any(), "a query of padding looks nowhere"


@pytest.mark.parametrize("family", walk(*DECODERS))
def test_several_tokens_continue_a_past(family, client):
    model, tokens = tiny(family), prompt()["input_ids"][1:]

    @torch.no_grad()
    def last_logits() -> torch.Tensor:
        past = model(tokens[:, :4], use_cache=True).past_key_values
        past = model(tokens[:, 4:5], past_key_values=past).past_key_values
        return model(tokens[:, 5:], past_key_values=past).logits

    expected = last_logits()
    with attach(model, client):
        torch.testing.assert_close(last_logits(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", walk(*ENCODERS))
def test_an_encoder_gives_the_same_states(family, client):
    model, inputs = tiny(family), prompt(padding=0)
    inputs["attention_mask"][0, 6:] = 0
    real = inputs["attention_mask"].bool()
    if model.main_input_name == "pixel_values":
        inputs, real = {"pixel_values": torch.rand(2, 3, 8, 8)}, slice(None)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        with attach(model, client):
            found = model(**inputs).last_hidden_state
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)


@pytest.mark.sampled(way=1)
@pytest.mark.parametrize("way", ["greedy", "beams", pytest.param("static", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", walk(*PAIRS))
def test_an_encoder_with_a_decoder_generates_the_same(family, way, client):
    compare_generation(tiny(family), client, way, **prompt())
