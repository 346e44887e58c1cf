"""Quantized checkpoints: the model has the numbers that they stand for, in every question."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import live_server
from tests.models.quantized_checkpoints import FORMS, write
from tests.models.small_models import IDS

from attention_client import Client
from attention_contract.errors import InvalidCheckpoint
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.model_catalogue import find_folder


def opened(folder):
    return LoadedModel.load(folder, dtype="float32", device=torch.device("cpu"), progress=lambda _: None)


@pytest.mark.sampled(label=3)
@pytest.mark.parametrize("label", FORMS)
def test_its_weights_are_unpacked(tmp_path, label):
    expected = write(tmp_path / "net", label)
    loaded = opened(tmp_path / "net")
    assert loaded.weights == f"dequantized from {label}"
    assert loaded.left_out == []
    for (name, own), other in zip(loaded.model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("label", FORMS)
def test_its_size_is_that_of_the_unpacked_numbers(tmp_path, label):
    expected = write(tmp_path / "net", label)
    folder = find_folder(tmp_path, "net")
    assert folder.refused is None
    assert folder.info("net", None).stored == label
    numbers = sum(each.numel() for each in expected.parameters())
    assert folder.tensor_bytes == pytest.approx(4 * numbers, rel=0.02)  # AWQ and GPTQ may fill up words
    assert folder.file_bytes < folder.tensor_bytes


@pytest.mark.slow
def test_it_answers_over_http(tmp_path):
    expected = write(tmp_path / "net", "GPTQ int4")
    with live_server(tmp_path) as url, Client(url) as client:
        (listed,) = [each for each in client.models.list().data if each.id == "net"]
        assert listed.refused is None
        assert "text" in listed.takes
        reply = client.models.forward("net", tokens=IDS, return_=["logits"])
        assert reply.ran.weights == "dequantized from GPTQ int4"
        with torch.no_grad():
            logits = expected(torch.tensor([IDS])).logits[0]
        np.testing.assert_allclose(reply.logits, logits[-1:], atol=1e-5)
        edited = client.models.forward("net", tokens=IDS, edits={"0": [{"tap": "weights", "heads": [0], "set": 0}]})
        assert edited.predictions
        gradients = client.models.gradients("net", tokens=IDS, of={"token": IDS[0]})
        assert gradients.layers


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
            "config_groups",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "nvfp4-pack-quantized with float4",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "FP4"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "two sizes"),
        ({"quant_method": "of-mine"}, "none of compressed-tensors"),
    ],
)
def test_another_form_is_refused_before_a_process_is_started(tmp_path, entry, reason):
    write(tmp_path / "net", "FP8")
    config = tmp_path / "net" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": entry}))
    assert reason in find_folder(tmp_path, "net").refused


def test_a_scale_that_does_not_fit_is_named(tmp_path):
    write(tmp_path / "net", "FP8")
    file = tmp_path / "net" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    save_file(tensors | {name: torch.ones(7, 5)}, file, {"format": "pt"})
    with pytest.raises(InvalidCheckpoint, match=r"q_proj\.scale of shape \[7, 5\] does not fit"):
        opened(tmp_path / "net")
