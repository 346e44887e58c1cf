"""The model that ships loads offline, is small, has learnt what its card says, and computes the same here."""

import re
import shutil
from itertools import islice

import numpy as np
import pytest
import torch
from training.measure_tiny_model import HELD_OUT, measured, repeated
from training.tiny_text import KINDS_OF_DOCUMENT, documents
from training.train_tiny_model import FOLDER, untrained
from transformers import AutoModelForCausalLM, AutoTokenizer

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.modules import ImportModule
from attention_service.cost import Rates, Roofline
from attention_service.engine import Engine
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info
from attention_service.runtime.device.torch_device import Device
from tests.client.transformers.test_attach import close

SENTENCE = "the cat sat on the mat"


@pytest.fixture(scope="module")
def words():
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    kind = AutoModelForCausalLM
    found = kind.from_pretrained(FOLDER, local_files_only=True, dtype=torch.float32, attn_implementation="eager")
    return found.eval()


@pytest.fixture(scope="module")
def found(model, words):
    torch.set_num_threads(1)
    return measured(model, words)


def figures(name):
    """Return the figure of a row of the card."""
    row = next(line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith(f"| {name}"))
    return [float(each) for each in re.findall(r"(?<!\d)\d+(?:\.\d+)?", row.removeprefix(f"| {name}"))]


def test_the_files_are_few_and_small():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    expected = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(sizes) == expected | {"chat_template.jinja"}
    assert sum(sizes.values()) < 600_000


@pytest.mark.slow
def test_it_predicts_held_out_text_and_repeats_what_it_never_saw(found):
    assert found.loss < 1.4 < 4 < found.unigram
    assert found.second_loss < 1 < 6 < found.first_loss


def test_heads_look_back_and_repeat(found):
    assert found.previous.max() > 0.7
    assert found.induction.max() > 0.5


def test_the_card_says_what_is_measured(found):
    assert figures("loss, in nats a token")[0] == pytest.approx(found.loss, abs=0.01)
    assert figures("the same tokens, said again")[0] == pytest.approx(found.second_loss, abs=0.01)
    for layer, head in np.ndindex(*found.previous.shape):
        stated = figures(f"{layer}.{head} |")
        measures = (found.previous, found.induction, found.first_key)
        assert stated == pytest.approx([each[layer, head].item() for each in measures], abs=0.01)


def test_the_tokenizer_gives_every_text_back(words):
    for text in [*islice(documents(HELD_OUT), 50), SENTENCE, "Größe, naïve 日本語 🙂\n  two  spaces\t"]:
        assert words.decode(words(text).input_ids, skip_special_tokens=False) == words.bos_token + text
    assert len(words(SENTENCE).input_ids) == 7, "a token each, after the first"


def test_a_conversation_is_written_as_it_was_learnt(words):
    messages = [{"role": "user", "content": "Where is Ben?"}]
    text = words.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|begin|><|user|>Where is Ben?<|end|><|assistant|>"
    assert text.removeprefix(words.bos_token).endswith("<|assistant|>")


def test_the_same_seed_writes_the_same_text():
    first, second, other = (list(islice(documents(seed), 200)) for seed in (1, 1, 2))
    assert first == second != other
    assert all(kind.__name__ for kind in KINDS_OF_DOCUMENT)
    assert len(set(first)) > 150, "documents differ"


def test_the_first_parameters_have_the_shapes_of_those_that_ship(model):
    shapes = {name: value.shape for name, value in model.named_parameters()}
    assert {name: value.shape for name, value in untrained().named_parameters()} == shapes


def test_a_whole_model_of_it_predicts_the_same(model, words):
    loaded = LoadedModel.load(FOLDER, dtype=None, device=torch.device("cpu"), progress=lambda _: None)
    reply = forward_reply(loaded, ModelForwardRequest(text=SENTENCE, return_=["weights", "logits"]))
    expected = model(torch.tensor([words(SENTENCE).input_ids]), output_attentions=True)
    close(reply.logits, expected.logits[0, -1:])
    for layer, weights in zip(reply.layers, expected.attentions, strict=True):
        close(layer.weights, weights[0])
    assert model_info(loaded)["generates"]


async def test_its_layers_are_modules_too(model, tmp_path):
    """An imported layer computes what the layer of transformers does."""
    states = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(9)[None]
    angles = model.model.rotary_emb(states, positions)
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    expected, weights = model.model.layers[1].self_attn(states, position_embeddings=angles, attention_mask=mask)

    shutil.copytree(FOLDER, tmp_path / "tiny")
    engine = Engine(tmp_path, Device(torch.device("cpu"), "test", 2**32, Roofline(Rates(1e10, 1e10, 1e-5))))
    await engine.start()
    await engine.modules.import_checkpoint(ImportModule(checkpoint="tiny", layer=1, name="layer", durable=False))
    reply = await engine.forward("layer", ForwardRequest(query=states.numpy(), return_=["output", "weights"]))
    await engine.stop()
    # A module computes in the dtype of its file, float16.
    torch.testing.assert_close(torch.tensor(reply.output).float(), expected, atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(torch.tensor(reply.weights).float(), weights, atol=2e-3, rtol=0)


def test_repeated_tokens_are_written_twice():
    twice = repeated(torch.Generator().manual_seed(0), 2, 5, 96)
    assert twice.shape == (2, 11)
    assert torch.equal(twice[:, 1:6], twice[:, 6:])
