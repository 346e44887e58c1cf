"""Embeddings: hidden states of transformers itself, pooled as the checkpoint says."""

import base64
import json

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.runtime.models.small_models import device, eager

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.openai import EmbeddingRequest
from attention_contract.validation import validate
from attention_service.runtime.models.loaded_model import LoadedModel
from attention_service.runtime.models.text_embeddings import embed, embedding_bytes

TEXTS = ["the cat sat", "the dog sat on the mat", "mat"]


@pytest.fixture
def made(tmp_path):
    """Return a function that stores a family's model in a folder, with a pooling, and loads it as the worker does."""
    loaded = []

    def load(family, pooling=None, *, normalize=False):
        eager(family).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        if pooling is not None:
            kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
            modules = [
                {"idx": at, "name": str(at), "path": f"{at}_{kind}", "type": f"sentence_transformers.models.{kind}"}
                for at, kind in enumerate(kinds)
            ]
            (tmp_path / "modules.json").write_text(json.dumps(modules))
            (tmp_path / "1_Pooling").mkdir(exist_ok=True)
            (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        loaded.append(LoadedModel.load(tmp_path, dtype=None, device=device().torch, progress=lambda _: None))
        return loaded[-1]

    yield load
    for each in loaded:
        each.close()


def states(family, text):
    """Return the last hidden states of one text, by transformers alone."""
    model = eager(family)
    ids = tokenizer()(text)["input_ids"]
    with torch.no_grad():
        base = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
        return base(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()


def vectors(loaded, **fields):
    request = validate(EmbeddingRequest, {"model": "m", "input": TEXTS} | fields)
    assert embedding_bytes(loaded, request) > 0
    return embed(loaded, request)


def unit(vector):
    return vector / np.linalg.norm(vector)


POOLINGS = {
    "mean": (lambda each: each.mean(0), {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}),
    "cls": (lambda each: each[0], {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}),
    "max": (lambda each: each.max(0), {"pooling_mode": "max"}),
    "last": (lambda each: each[-1], {"pooling_mode_lasttoken": True, "pooling_mode": "last"}),
}


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("mode", POOLINGS)
def test_texts_are_pooled_as_the_checkpoint_says(made, family, mode):
    pool, config = POOLINGS[mode]
    found = vectors(made(family, config))
    for text, each in zip(TEXTS, found.data, strict=True):
        np.testing.assert_allclose(each.embedding, pool(states(family, text)), atol=1e-5)
    assert found.usage.prompt_tokens == sum(len(tokenizer()(text)["input_ids"]) for text in TEXTS)


@pytest.mark.parametrize(
    ("family", "pool"), [("bert", "mean"), ("t5", "mean"), ("gpt2", "last")], ids=["encoder", "pair", "decoder"]
)
def test_without_a_word_of_the_checkpoint_vectors_have_length_one(made, family, pool):
    found = vectors(made(family))
    for text, each in zip(TEXTS, found.data, strict=True):
        np.testing.assert_allclose(each.embedding, unit(POOLINGS[pool][0](states(family, text))), atol=1e-5)


def test_the_forms_of_a_vector(made):
    loaded = made("bert", POOLINGS["mean"][1], normalize=True)
    plain = np.array([each.embedding for each in vectors(loaded).data])
    np.testing.assert_allclose(np.linalg.norm(plain, axis=1), 1, atol=1e-6)
    packed = vectors(loaded, encoding_format="base64").data
    np.testing.assert_allclose([np.frombuffer(base64.b64decode(each.embedding), "<f4") for each in packed], plain)
    short = vectors(loaded, dimensions=4).data
    np.testing.assert_allclose([each.embedding for each in short], [unit(each[:4]) for each in plain], atol=1e-6)
    ids = tokenizer()(TEXTS[0])["input_ids"]
    np.testing.assert_allclose(vectors(loaded, input=ids).data[0].embedding, plain[0], atol=1e-5)


@pytest.mark.parametrize(("fields", "param"), [({"dimensions": 99}, "dimensions"), ({"input": [[3], [99]]}, "input.1")])
def test_what_cannot_be_embedded_is_refused_by_its_field(made, fields, param):
    with pytest.raises(InvalidRequest) as refusal:
        vectors(made("bert"), **fields)
    assert refusal.value.param == param


def test_a_pooling_that_is_not_known_is_refused(made):
    with pytest.raises(InvalidCheckpoint, match="pooling"):
        vectors(made("bert", {"pooling_mode": "weightedmean"}))


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("modules.json", {"a": 1}, "no JSON list"),
        ("modules.json", [1], "list of objects"),
        ("modules.json", [{"type": "Pooling"}], "no JSON object"),
        ("modules.json", [{"type": "Pooling", "path": "../.."}], "no JSON object inside the checkpoint"),
        ("1_Pooling/config.json", [], "no JSON object"),
    ],
)
def test_a_pooling_in_another_form_is_refused(made, tmp_path, file, content, says):
    loaded = made("bert", POOLINGS["mean"][1])
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(InvalidCheckpoint, match=says) as fault:
        vectors(loaded)
    assert fault.value.param == "model"
