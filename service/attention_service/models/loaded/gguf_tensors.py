"""Tensors of GGUF files as the parameters of transformers' classes: names by the package gguf, and values as they were.

llama.cpp's converters join, turn and shift tensors; each such change is undone here, one function an architecture.
Their source is the folder ``conversion`` of llama.cpp 0.5.0.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from attention_service.core.cancellation import checkpoint
from attention_service.modules.checkpoints.forms.gguf.gguf_header import GgufHeader
from attention_service.modules.checkpoints.forms.gguf.rotations import FREQUENCY_FACTORS

Array = NDArray[np.float32]
Undo = Callable[[str, Array, Any], Array]
_EXPERTS: Final = re.compile(r".*\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)(_bias)?$")
_OF_LAYER: Final = {
    r"self_attn\.sinks": "attn_sinks.weight", r"layer_scalar": "layer_output_scale.weight",
    r"mixer\.A_log": "ssm_a", r"mixer\.D": "ssm_d", r"mlp\.e_score_correction_bias": "exp_probs_b.bias",
    r"mlp\.router\.(weight|bias)": r"ffn_gate_inp.\1",
    r"self_attn\.([qk])_layernorm\.norms\.\d+\.weight": r"attn_\1_norm.weight",
}  # fmt: skip
"""Names of a layer's tensors by those of parameters that the package gguf does not know."""
_LAYER: Final = re.compile(r".*\.layers\.(\d+)\.(.+)")
_HEAD: Final = re.compile(r"\.norms\.(\d+)\.")


class ReadTensors(NamedTuple):
    """The tensors of a file under the names of a model's parameters."""

    tensors: dict[str, torch.Tensor]
    left_out: list[str]
    """The tensors that no parameter takes."""


def read_tensors(
    file: Path, header: GgufHeader, model: Any, dtype: torch.dtype, progress: Callable[[float], None]
) -> ReadTensors:
    """Read the tensors that a model takes. ``model``: on the meta device, for its names and shapes."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    wanted = model.state_dict()
    layers = max(model.config.num_hidden_layers, getattr(model.config, "num_decoder_layers", None) or 0)
    kind = next(kind for kind, own in gguf.MODEL_ARCH_NAMES.items() if own == header.architecture)
    names = gguf.get_tensor_name_map(kind, layers)
    sources = {name: _sources(name, header, names) for name in wanted}
    undo = _UNDO.get(header.architecture, _as_it_is)
    tensors: dict[str, torch.Tensor] = {}
    for number, (name, parameter) in enumerate(wanted.items()):
        checkpoint()
        if sources[name] and all(source in stored for source in sources[name]):
            parts = [np.asarray(gguf.dequantize(x.data, x.tensor_type)) for x in map(stored.get, sources[name]) if x]
            values = undo(name, _joined(parts, model.config), model.config)
            if values.size == parameter.numel():  # a converter may leave out dimensions of 1
                values = values.reshape(parameter.shape)
            tensors[name] = torch.from_numpy(np.array(values)).to(dtype)
        elif name.endswith(".bias") and header.architecture in _BIASES_MAY_LACK:
            tensors[name] = torch.zeros(parameter.shape, dtype=dtype)
        progress((number + 1) / len(wanted))
    taken = {source for name in tensors for source in sources[name]} | {*FREQUENCY_FACTORS}
    return ReadTensors(tensors, [name for name in header.tensors if name not in taken])


def _sources(name: str, header: GgufHeader, names: gguf.TensorNameMap) -> list[str]:
    """The names of a parameter's tensors in a file, of which one is its whole, or two are its halves."""
    if (experts := _EXPERTS.match(name)) is not None:
        layer, kind, bias = experts.groups()
        end = "bias" if bias else "weight"
        whole = f"blk.{layer}.ffn_gate_up_exps.{end}"
        if kind == "gate_up_proj" and whole not in header.tensors:
            return [f"blk.{layer}.ffn_gate_exps.{end}", f"blk.{layer}.ffn_up_exps.{end}"]
        return [whole if kind == "gate_up_proj" else f"blk.{layer}.ffn_down_exps.{end}"]
    if (of_layer := _LAYER.fullmatch(name)) is not None:
        for pattern, own in _OF_LAYER.items():
            if (matched := re.fullmatch(pattern, of_layer[2])) is not None:
                return [f"blk.{of_layer[1]}.{matched.expand(own)}"]
    for start in ("", "model.", "transformer.", "backbone."):
        found_name = names.get_name(name.removeprefix(start), (".weight", ".bias"))
        if found_name is not None and name.startswith(start):
            return [found_name]
    return []


def _joined(parts: list[Array], config: Any) -> Array:
    """The halves of a parameter as one: gates before the others, or by turns as gpt-oss has them."""
    if len(parts) == 1:
        return parts[0]
    if config.model_type == "gpt_oss":
        experts, rows, *rest = parts[0].shape
        return np.stack(parts, axis=2).reshape(experts, 2 * rows, *rest)
    return np.concatenate(parts, axis=1)


def _as_it_is(_: str, values: Array, __: Any) -> Array:
    return values


def _llama(name: str, values: Array, config: Any) -> Array:
    """Rows of queries and keys, of which llama.cpp turns neighbours, and transformers halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    return values if heads is None else values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2)


def _bloom(name: str, values: Array, config: Any) -> Array:
    """Queries, keys and values, apart in a file, by heads in the model."""
    if "query_key_value" not in name:
        return values
    return values.reshape(3, config.n_head, -1, *values.shape[1:]).swapaxes(0, 1)


def _falcon(name: str, values: Array, config: Any) -> Array:
    """Queries, keys and values, apart in a file, by groups of heads that share a key in the model."""
    if "query_key_value" not in name:
        return values
    groups = config.num_kv_heads
    size = config.hidden_size // config.num_attention_heads
    query = values[: config.hidden_size].reshape(groups, -1, values.shape[1])
    key, value = (part.reshape(groups, size, -1) for part in np.split(values[config.hidden_size :], 2))
    return np.concatenate([query, key, value], axis=1)


def _gpt2(name: str, values: Array, _: Any) -> Array:
    """Matrices that GPT-2 of transformers multiplies from the other side."""
    return values.T if name.endswith(".weight") and ("c_attn" in name or "c_proj" in name or "c_fc" in name) else values


def _gpt_oss(name: str, values: Array, _: Any) -> Array:
    """Matrices of experts that gpt-oss of transformers multiplies from the other side."""
    return values.swapaxes(1, 2) if name.endswith(("gate_up_proj", "down_proj")) else values


def _mamba(name: str, values: Array, _: Any) -> Array:
    return np.log(-values) if name.endswith("A_log") else values


def _stablelm(name: str, values: Array, _: Any) -> Array:
    """The norm of one head, of those of all heads."""
    head = _HEAD.search(name)
    return values if head is None else values.reshape(-1, values.shape[-1])[int(head[1])]


def _norms_from_zero(name: str, values: Array, _: Any) -> Array:
    """Weights of norms to which the class adds 1, as llama.cpp's converter has done already."""
    return values - 1 if name.endswith("norm.weight") else values


_UNDO: Final[Mapping[str, Undo]] = {
    "llama": _llama, "bloom": _bloom, "falcon": _falcon, "gpt2": _gpt2, "gpt-oss": _gpt_oss, "mamba": _mamba,
    "stablelm": _stablelm, "nemotron": _norms_from_zero, "gemma2": _norms_from_zero, "gemma3": _norms_from_zero,
}  # fmt: skip
"""Functions that undo the changes of llama.cpp's converter, by the architecture of a file."""
_BIASES_MAY_LACK: Final = {"llama", "qwen3", "qwen3moe", "nemotron"}
"""Architectures of which llama.cpp takes a bias that a file has not as zero, where their class has all or none."""
