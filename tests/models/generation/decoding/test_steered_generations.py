"""Steering vectors in generations: tokens and logits of transformers' ``generate`` with a hook, alone and among 16."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tests.models.generation.decoding.test_added_vectors import KINDS, PROMPT, loaded, made
from tests.models.generation.decoding.test_joined import Callers, alone, same, tokens
from tests.models.generation.decoding.test_read_texts import text

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.openai import CompletionRequest
from attention_contract.validation import validate
from attention_service.models.loaded.streams.added_vectors import AddedVectors

NEW, SCALE = 24, 1.75
TOLERANCE = 1e-6


@pytest.fixture
def stored(tmp_path):
    """Store directions ``[layers, d]`` under an id."""

    def store(number, model, seed):
        width = model.places["0"].output_width
        drawn = np.random.default_rng(seed).normal(size=(2, width)).astype(np.float32)
        path = tmp_path / f"{number:032x}.safetensors"
        save_file({f"directions.{layer}": drawn[layer] for layer in range(2)}, path)
        return path.stem, str(path), drawn

    return store


def attention(files, steer, **fields):
    """The field of a request as its model's process has it."""
    request = validate(CompletionRequest, {"model": "it", "prompt": "a", "attention": {"steer": steer} | fields})
    edits = AddedVectors(files).within(request).attention.edits
    named = {layer: [{"tap": each.tap, "add": each.add} for each in own] for layer, own in edits.items()}
    return {"edits": named, "top_k": 1} | fields


def generated(kind, drawn, layers):
    """The tokens and ``log_softmax`` of logits of transformers' ``generate``, with hooks that add."""
    model, given = made(kind, torch.float64), loaded(kind, torch.float64)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None

    def adding(x):
        def hook(_, __, output):
            state = output[0] if isinstance(output, tuple) else output
            state = state + SCALE * x
            return (state, *output[1:]) if isinstance(output, tuple) else state

        return hook

    for layer in layers:
        place = given.places[str(layer)]
        name = next(name for name, module in given.model.named_modules() if module is place.layer)
        model.get_submodule(name).register_forward_hook(adding(torch.from_numpy(drawn[layer]).double()))
    with torch.no_grad():
        found = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    ids = found.sequences[0, len(PROMPT) :].tolist()
    logs = [logits[0].log_softmax(-1)[token].item() for logits, token in zip(found.logits, ids, strict=True)]
    return ids, logs


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logits_are_those_of_generate_with_a_hook_in_float64(kind, stored):
    model = loaded(kind, torch.float64)
    vector, path, drawn = stored(1, model, seed=3)
    for steering, layers in (
        ({"vector": vector, "scale": SCALE}, (0, 1)),
        ({"id": vector, "layer": 1, "scale": SCALE}, (1,)),
    ):
        (choice,) = alone(model, PROMPT, max_tokens=NEW, logprobs=0, attention=attention({vector: path}, [steering]))
        ids, logs = generated(kind, drawn, layers)
        assert tokens([choice]) == [ids]
        np.testing.assert_allclose(choice.logprobs.token_logprobs, logs, atol=TOLERANCE, rtol=TOLERANCE)
    assert ids != tokens(alone(model, PROMPT, max_tokens=NEW))[0]


def test_sixteen_callers_with_sixteen_vectors_are_each_as_alone(stored):
    model = loaded("llama")
    asked = {"plain": {"prompt": text(7), "max_tokens": 6}}
    for number in range(16):
        vector, path, _ = stored(number, model, seed=number)
        asked[number] = {
            "prompt": text(5 + number % 5), "max_tokens": 6,
            "attention": attention(
                {vector: path}, [{"vector": vector, "scale": 2.0, **({"layers": [number % 2]} if number % 3 else {})}],
                **({"from": "answer"} if number % 4 == 1 else {}),
            ),
        }  # fmt: skip
    callers = Callers(model)
    for name, fields in asked.items():
        callers.ask(name, **fields)
    running = callers.running
    found = callers.end()
    assert min(each.joined for each in running.values()) == 17
    for name, fields in asked.items():
        same(found[name], alone(model, **fields))
    assert len({tuple(tokens(each)[0]) for each in found.values()}) > 12


def test_several_vectors_at_one_layer_are_added_up(stored):
    model = loaded("llama")
    one, path, first = stored(1, model, seed=1)
    other, second_path, second = stored(2, model, seed=2)
    steer = [{"vector": one, "scale": 2}, {"vector": other, "scale": -0.5, "layers": [1]}]
    edits = attention({one: path, other: second_path}, steer)["edits"]
    np.testing.assert_allclose(edits["0"][0]["add"], 2.0 * first[0], rtol=1e-12)
    np.testing.assert_allclose(
        edits["1"][0]["add"], 2.0 * first[1] - 0.5 * second[1].astype(float), rtol=1e-6, atol=1e-6
    )


def test_a_vector_that_was_deleted_meanwhile_is_told(tmp_path):
    with pytest.raises(InvalidRequest, match="deleted meanwhile"):
        AddedVectors({"0" * 32: str(tmp_path / "gone.safetensors")})
