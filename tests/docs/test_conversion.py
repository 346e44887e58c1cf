"""The function by which docs/checkpoints.md converts other forms of a model, run on each form of its table."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tools.docs.checkpoints_page import PAGE
from tools.docs.snippets import blocks
from transformers import LlamaConfig, LlamaForCausalLM

from attention_contract.schemas.modules import ImportModule
from attention_service.modules.checkpoints.import_plan import plan

IDS = torch.tensor([[3, 4, 5, 6]])
EDGE = 16
"""Rows and columns of a block of FP8."""


@pytest.fixture(scope="module")
def convert():
    code = next(block.code for block in blocks(PAGE) if "def convert(" in block.code)
    names = {}
    exec(code, names)  # noqa: S102 - the page's own code
    return names["convert"]


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=50, max_position_embeddings=64, **sizes)).eval()


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "old")
    return tmp_path / "old"


def converted(convert, folder, expected, **options):
    """Convert the folder, and compare the logits. The server then imports a layer of it."""
    target = folder.parent / "new"
    convert(str(folder), str(target), **options)
    tensors = load_file(target / "model.safetensors")
    assert {x.dtype for x in tensors.values()} == {torch.float32}
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    found = LlamaForCausalLM.from_pretrained(target)  # with its head
    np.testing.assert_allclose(found(IDS).logits.detach(), expected, atol=1e-5)
    assert plan(folder.parent, ImportModule(checkpoint="new", layer=0)).config.num_heads == 4


def test_pickled_files(convert, model, folder):
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    converted(convert, folder, model(IDS).logits.detach())


def test_fp8_in_blocks(convert, model, folder):
    pytest.importorskip("accelerate")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        blocks = tensors[name].unflatten(0, (-1, EDGE)).unflatten(2, (-1, EDGE))
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        tensors[name] = (blocks / scale).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
        near = tensors[name].float().unflatten(0, (-1, EDGE)).unflatten(2, (-1, EDGE)) * scale
        model.get_parameter(name).data = near.flatten(2).flatten(0, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    entries = {"quant_method": "fp8", "weight_block_size": [EDGE, EDGE], "activation_scheme": "dynamic"}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": entries}
    (folder / "config.json").write_text(json.dumps(config))
    converted(convert, folder, model(IDS).logits.detach())
    read = LlamaForCausalLM.from_pretrained(folder)
    read.save_pretrained(folder.parent / "again")  # the reason for the copy in the function
    again = load_file(folder.parent / "again" / "model.safetensors")
    assert torch.float8_e4m3fn in {x.dtype for x in again.values()}


def test_gguf(convert, model, folder):
    gguf = pytest.importorskip("gguf")
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    writer, config = gguf.GGUFWriter(folder / "model.gguf", "llama"), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        array = tensor.numpy()
        if heads is not None:  # llama.cpp rotates neighbours, transformers halves
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    converted(convert, folder, model(IDS).logits.detach(), gguf_file="model.gguf")
