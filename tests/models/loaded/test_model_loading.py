"""The load of a checkpoint by transformers: what it leaves out, what it refuses, and files that change later."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.modules.checkpoints.tiny_models import BERT
from transformers import (
    BertConfig,
    BertForNextSentencePrediction,
    BertForSequenceClassification,
    BertModel,
    LongformerConfig,
    LongformerModel,
    YosoConfig,
    YosoModel,
)

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.schemas.models import ModelInfo
from attention_contract.schemas.openai import CompletionRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info
from attention_service.models.passes.observed import windowed_attention
from attention_service.models.process.served_model import ServedModel

IDS = [5, 3, 7, 8]
CPU = torch.device("cpu")


def load(folder, **options):
    return LoadedModel.load(folder, dtype=None, device=CPU, progress=lambda _: None, **options)


def changed(folder, change):
    """Save a small Llama, and change its tensors."""
    tiny("llama").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def entry(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    return folder


def test_a_head_that_predicts_neither_tokens_nor_classes_is_left_out(tmp_path):
    config = BertConfig(**BERT)
    BertForNextSentencePrediction(config).save_pretrained(tmp_path / "net")
    tokenizer().save_pretrained(tmp_path / "net")
    loaded = load(tmp_path / "net")
    assert model_info(loaded)["left_out"][:2] == ["cls.seq_relationship.bias", "cls.seq_relationship.weight"]
    assert ModelInfo(id="a", created=0, checkpoint="a", state="resident", **ServedModel(loaded).info()).left_out
    reply = forward_reply(loaded, ModelForwardRequest(tokens=IDS))
    assert (reply.predicts, reply.predictions) == (None, [])
    words = r"no prediction head \(cls\.seq_relationship\.bias, cls\.seq_relationship\.weight are left out of the che"
    with pytest.raises(InvalidRequest, match=words):
        forward_reply(loaded, ModelForwardRequest(tokens=IDS, return_=["logits"]))
    with pytest.raises(InvalidRequest, match=words) as caught:
        ModelGradients(loaded, ModelGradientsRequest(tokens=IDS))
    assert caught.value.param == "of"
    with pytest.raises(InvalidRequest, match=words) as caught:
        plan_generation(loaded, validate(CompletionRequest, {"model": "net", "prompt": "the cat"}))
    assert caught.value.param == "model"


def without(model, folder, part):
    """Save a model without the tensors whose names have a part."""
    model.save_pretrained(folder)
    tensors = {name: x for name, x in load_file(folder / "model.safetensors").items() if part not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_pooler_without_tensors_makes_no_pooled_vector(tmp_path):
    model = BertModel(BertConfig(**BERT)).eval()
    loaded = load(without(model, tmp_path / "net", "pooler"))
    reply = forward_reply(loaded, ModelForwardRequest(tokens=IDS, layers=[1], return_=["hidden"]))
    with torch.no_grad():
        own = model(torch.tensor([IDS])).last_hidden_state[0]
    np.testing.assert_allclose(reply.layers[0].hidden, own, atol=1e-5)
    with pytest.raises(InvalidRequest, match="has no pooler") as refused:
        forward_reply(loaded, ModelForwardRequest(tokens=IDS, return_=["pooled"]))
    assert refused.value.param == "return"


@pytest.mark.parametrize(
    ("kind", "part", "named"),
    [
        (BertForSequenceClassification, "pooler", "bert.pooler.dense.bias"),
        (BertForSequenceClassification, "classifier", "classifier.bias"),
        (BertModel, "layer.1.attention.self.query.bias", "encoder.layer.1.attention.self.query.bias"),
    ],
)
def test_tensors_that_would_be_random_are_refused_by_name(tmp_path, kind, part, named):
    folder = without(kind(BertConfig(**BERT)), tmp_path / "net", part)
    with pytest.raises(InvalidCheckpoint, match="lacks") as refused:
        load(folder)
    assert named in refused.value.detail


def test_a_model_that_takes_all_leaves_nothing_out(tmp_path):
    assert model_info(load(changed(tmp_path / "net", lambda _: None)))["left_out"] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [("weight_scale", "quantized weights"), ("lora_A.weight", "an adapter"), ("lora_A.default.weight", "an adapter")],
)
def test_scales_and_adapters_in_the_file_are_refused(tmp_path, name, words):
    folder = changed(tmp_path / "net", lambda x: x.update({f"model.layers.0.self_attn.q_proj.{name}": torch.ones(1)}))
    with pytest.raises(InvalidCheckpoint, match=f"q_proj.{name} belongs to {words}"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_the_entry_that_asks_for_it(tmp_path):
    folder = entry(changed(tmp_path / "net", lambda _: None), vocab_size=77)
    with pytest.raises(InvalidCheckpoint) as caught:
        load(folder)
    words = r"lm_head.weight has shape [96, 32] in its file, and config.json asks for [77, 32] (vocab_size 77)"
    assert words in caught.value.detail


def zeroed(file):
    with file.open("r+b") as opened:
        opened.seek(-1000, os.SEEK_END)
        opened.write(bytes(1000))


def truncated(file):
    os.truncate(file, 100)


@pytest.mark.parametrize("spoil", [zeroed, truncated])
def test_a_loaded_model_does_not_care_what_becomes_of_its_files(tmp_path, spoil):
    loaded = load(changed(tmp_path / "net", lambda _: None))
    request = ModelForwardRequest(tokens=IDS, return_=["logits"])
    before = forward_reply(loaded, request).logits
    assert "model.safetensors" not in Path("/proc/self/maps").read_text()
    spoil(tmp_path / "net" / "model.safetensors")
    np.testing.assert_array_equal(forward_reply(loaded, request).logits, before)


def test_a_model_that_reads_layers_from_disk_notices_that_they_changed(tmp_path):
    pytest.importorskip("accelerate")
    folder = changed(tmp_path / "net", lambda _: None)
    served = ServedModel(load(folder, free_bytes=70_000))
    assert "disk" in served.info()["device"]
    body = memoryview(b'{"tokens": [5, 3], "layers": [0]}')
    served.prepare("weights", body, {}, lambda _: None)
    zeroed(folder / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match="have changed since it was loaded; unload it"):
        served.prepare("weights", body, {}, lambda _: None)


def test_no_advice_is_given_that_is_refused_too(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8}
    YosoModel(YosoConfig(vocab_size=29, **sizes)).save_pretrained(tmp_path / "net")
    with pytest.raises(
        InvalidCheckpoint, match=r"none has a softmax .* cannot be imported as modules either"
    ) as caught:
        load(tmp_path / "net")
    assert "or import its layers" not in caught.value.detail


def test_layers_that_can_be_imported_are_advised(tmp_path, monkeypatch):
    monkeypatch.setattr(windowed_attention, "_is_same", lambda _: False)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8}
    LongformerModel(LongformerConfig(attention_window=[4], vocab_size=29, **sizes)).save_pretrained(tmp_path / "net")
    with pytest.raises(InvalidCheckpoint, match=r"or import its layers as modules \(POST /v1/modules/import\)"):
        load(tmp_path / "net")


def test_the_refusal_of_a_word_in_the_place_of_a_list_names_both():
    with pytest.raises(InvalidRequest, match="unknown '0'; expected one of 'all', or a list") as caught:
        validate(ModelForwardRequest, {"text": "a", "layers": "0"})
    assert caught.value.param == "layers"
