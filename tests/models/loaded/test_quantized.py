"""Quantized checkpoints: the model has the numbers that they stand for, in every question."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.client.transformers.families import tiny
from tests.conftest import live_server
from tests.models.quantized_checkpoints import FORMS, torchao, words, write
from tests.models.small_models import IDS

from attention_client import Client
from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.modules import ImportModule
from attention_service.models.folders.model_catalogue import find_folder
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.modules.checkpoints.import_plan import plan


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


def test_scales_of_activations_are_told(tmp_path):
    write(tmp_path / "net", "FP8")
    scales = [name for name in load_file(tmp_path / "net" / "model.safetensors") if name.endswith(".input_scale")]
    assert scales
    told = f"input_scale of {len(scales)} modules (activations are not rounded here)"
    assert find_folder(tmp_path, "net").info("net", None).left_out == [told]
    assert opened(tmp_path / "net").left_out == []


def test_files_that_are_links_into_the_repository_are_unpacked_too(tmp_path):
    expected = write(tmp_path / "models" / "net", "FP8")
    file, blobs = tmp_path / "models" / "net" / "model.safetensors", tmp_path / "blobs"
    blobs.mkdir()
    file.rename(blobs / "1f")
    file.symlink_to(blobs / "1f")
    assert find_folder(tmp_path, "models/net").refused is None
    loaded = opened(tmp_path / "models" / "net")
    name = "model.layers.1.self_attn.k_proj.weight"
    torch.testing.assert_close(loaded.model.get_parameter(name), expected.get_parameter(name), atol=1e-6, rtol=1e-6)


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
def test_layers_of_mlx_may_have_bits_of_their_own(tmp_path):
    expected = write(tmp_path / "net", "MLX int4")
    config, name = tmp_path / "net" / "config.json", "model.layers.0.self_attn.q_proj"
    entries = json.loads(config.read_text())
    entries["quantization"] = entries.pop("quantization_config") | {name: {"bits": 8, "group_size": 8}}
    config.write_text(json.dumps(entries))
    file = tmp_path / "net" / "model.safetensors"
    rows, columns = expected.get_parameter(f"{name}.weight").shape
    stored = words(torch.arange(rows * columns).view(rows, columns) % 256, 8).view(torch.uint32)
    save_file(load_file(file) | {f"{name}.weight": stored}, file, {"format": "mlx"})
    loaded = opened(tmp_path / "net")
    scales, biases = (load_file(file)[f"{name}.{part}"].repeat_interleave(8, 1) for part in ("scales", "biases"))
    numbers = torch.arange(rows * columns).view(rows, columns) % 256
    torch.testing.assert_close(loaded.model.get_parameter(f"{name}.weight"), numbers * scales + biases)


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
        (torchao("Int4WeightOnlyConfig", group_size=128), "torchao's Int4WeightOnlyConfig is not read"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao's quant_type is not read"),
        ({"group_size": 64, "bits": 3}, "MLX of 3 bits"),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, "mode mxfp4"),
        ({"group_size": 64, "bits": 4, "lm_head": {"bits": 6}}, "MLX of 6 bits"),
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
    with pytest.raises(InvalidCheckpoint, match=r"q_proj\.weight_scale_inv of shape \[7, 5\] does not fit"):
        opened(tmp_path / "net")


CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CACHE_ALONE = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {},
        "kv_cache_scheme": CACHE_SCHEME, "ignore": ["lm_head"],
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": CACHE_SCHEME},
    "modelopt as in hf_quant_config.json": {
        "quant_method": "modelopt", "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
    },
}  # fmt: skip


def with_cache_scheme(folder, entry, extra=()):
    """Write a Llama of floats whose config says how vLLM rounds its cache, with the scales of that."""
    model = tiny("llama")
    model.save_pretrained(folder)
    config, file = folder / "config.json", folder / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": entry}))
    layer = "model.layers.0.self_attn."
    scales = {f"{layer}k_scale": torch.ones(()), f"{layer}v_scale": torch.ones(())}
    save_file(load_file(file) | scales | dict(extra), file, {"format": "pt"})
    return model.eval()


@pytest.mark.parametrize("writer", CACHE_ALONE)
def test_a_checkpoint_whose_cache_alone_is_quantized_is_loaded_as_it_is(tmp_path, writer):
    expected = with_cache_scheme(tmp_path / "net", CACHE_ALONE[writer])
    folder = find_folder(tmp_path, "net")
    assert folder.refused is None
    info = folder.info("net", None)
    assert info.stored == "float32"
    (told,) = [each for each in info.left_out if "quantization_config" in each]
    assert "kv_cache" in told
    loaded = opened(tmp_path / "net")
    assert loaded.weights == "float32"
    assert loaded.left_out == ["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"]
    for own, other in zip(loaded.model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(own, other)
    layer = plan(tmp_path, ImportModule(checkpoint="net", layer=1))
    assert layer.source.quantized is None
    assert torch.equal(layer.read()["q_proj.weight"], expected.model.layers[1].self_attn.q_proj.weight)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quant_algo": "NVFP4"}, "modelopt is none of"),
        ({"kv_cache_scheme": None}, "modelopt is none of"),
        ({"quantized_layers": {"a": 1}}, "modelopt is none of"),
    ],
)
def test_an_entry_that_says_more_than_the_cache_is_refused(tmp_path, change, reason):
    with_cache_scheme(tmp_path / "net", CACHE_ALONE["modelopt"] | change)
    assert reason in find_folder(tmp_path, "net").refused
    with pytest.raises(InvalidCheckpoint, match=reason):
        plan(tmp_path, ImportModule(checkpoint="net", layer=1))


def test_scales_beside_a_scheme_of_the_cache_alone_are_refused(tmp_path):
    scale = {"model.layers.0.self_attn.q_proj.weight_scale": torch.ones(1)}
    with_cache_scheme(tmp_path / "net", CACHE_ALONE["compressed-tensors"], scale)
    assert "belongs to quantized weights" in find_folder(tmp_path, "net").refused
