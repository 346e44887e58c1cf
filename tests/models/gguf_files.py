"""GGUF files of small models, written by the package gguf as llama.cpp's converter writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tests.client.tiny_models import tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
"""Rows of 256 numbers, as K-quants need them."""
BLOCK_BYTES = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
"""Bytes of a block of 256 numbers; the package reads these forms, and does not write them."""
IDS = torch.tensor([[5, 3, 7, 8, 6, 4, 9, 10, 11, 2, 1, 0]])


def llama(**entries: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": len(tokenizer())} | entries)).eval()


def packed(values: np.ndarray, form: str, rng: np.random.Generator) -> np.ndarray:
    """A matrix in a form, ``[rows, bytes]``; random blocks of a form that the package does not write."""
    kind = gguf.GGMLQuantizationType[form]
    if form not in BLOCK_BYTES:
        return gguf.quantize(values, kind)
    blocks = rng.integers(0, 256, (values.size // 256, BLOCK_BYTES[form]), np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[form]
    for start in halves:
        blocks[:, start : start + 2] = np.full((len(blocks), 1), 1e-3, np.float16).view(np.uint8)
    return blocks.reshape(len(values), -1)


def write(
    file: Path, model: LlamaForCausalLM, form: str = "Q8_0", *, entries: Mapping[str, Any] = {}, tokens: bool = False,
    tensors: Mapping[str, np.ndarray] = {},
) -> None:  # fmt: skip
    """Write a Llama, and give the model the numbers that the file holds. ``entries``: further ones, by their names."""
    config, rng = model.config, np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for name, value in entries.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"llama.{name}", value)
    if tokens:
        _add_tokens(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        own = str(names.get_name(name, (".weight",)))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        array = tensor.numpy()
        if array.ndim == 1:
            writer.add_tensor(own, array)
            continue
        if heads is not None:  # llama.cpp rotates neighbours, transformers halves
            array = np.ascontiguousarray(
                array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
            )
        kind = gguf.GGMLQuantizationType[form]
        data = packed(array, form, rng)
        writer.add_tensor(own, data, raw_dtype=kind)
        held = gguf.dequantize(data, kind).reshape(array.shape)
        if heads is not None:
            held = held.reshape(heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        model.get_parameter(name).data = torch.from_numpy(held.copy())
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    words = ["▁", "a", "b", "c", "d", "▁a", "▁b", "▁c", "▁d"]
    assert len(words) == count - 3
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *words])
    writer.add_token_scores([0.0, 0.0, 0.0, *(-float(number) for number in range(len(words)))])
    writer.add_token_types([2, 3, 3, *([1] * (count - 3))])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
