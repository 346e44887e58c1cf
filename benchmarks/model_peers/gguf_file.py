"""A Llama of transformers as a GGUF file for llama.cpp, in float32: ``python gguf_file.py FOLDER FILE``.

llama.cpp rotates pairs of neighbours where transformers rotates halves, so the rows of the queries' and keys' matrices
change places, as in llama.cpp's own ``convert_hf_to_gguf.py``.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NAMES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
"""The first tokens, without which llama.cpp does not read a vocabulary."""
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write(folder: Path, file: Path) -> None:
    """Write the checkpoint of a folder."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    out = gguf.GGUFWriter(str(file), "llama")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_rope_dimension_count(config["hidden_size"] // heads)
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("llama")
    out.add_token_list(NAMES + [f"w{token}" for token in range(len(NAMES), config["vocab_size"])])
    out.add_token_scores([0.0] * config["vocab_size"])
    out.add_token_types([2, 3, 3] + [6] * 256 + [1] * (config["vocab_size"] - len(NAMES)))
    for name, tensor in load_file(folder / "model.safetensors").items():
        out.add_tensor(_name(name), np.ascontiguousarray(_neighbours(name, tensor, heads)))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _name(name: str) -> str:
    part = name.removesuffix(".weight")
    if part in OTHERS:
        return f"{OTHERS[part]}.weight"
    number, _, rest = part.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{LAYER[rest]}.weight"


def _neighbours(name: str, tensor: np.ndarray, heads: int) -> np.ndarray:
    if ".q_proj." not in name and ".k_proj." not in name:
        return tensor
    rows, columns = tensor.shape
    return tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:3]))
