"""Models from GGUF files, by transformers' own reader, with the entries of their metadata that it leaves out.

transformers 5.23 reads neither the scaling of rotations, nor the window of a Llama, nor the sizes below from a file
that its older reader takes. Their names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Mapping
from math import log
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from transformers import MistralConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.utils.quantization_config import GgufConfig

from attention_contract.errors import InvalidCheckpoint
from attention_service.models.gguf_facts import config_of, entries_of
from attention_service.modules.checkpoints.gguf_header import GgufHeader

_MORE: Final = {
    "attention.key_length": "head_dim", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
"""Fields of a config by the entries of the metadata that the older reader leaves out."""
_READ_HERE: Final = ("rope.", "attention.sliding_window", "attention.value_length", "vocab_size")
_FACTORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that divide the frequencies of rotations."""


def gguf_options(file: Path) -> dict[str, Any]:
    """The arguments with which transformers reads a file whole, as floats."""
    kind: Any = GgufConfig  # has no annotations
    return {"gguf_file": file.name, "quantization_config": kind(gguf_file=file.name, dequantize=True)}


def with_metadata(config: Any, header: GgufHeader, file: Path) -> Any:
    """The config that transformers made of a file, with what it left out. Raises InvalidCheckpoint."""
    config.architectures = config_of(header).get("architectures")
    if header.architecture in GGUF_CONFIG_ARCHS:  # its newer reader leaves nothing out
        return config
    for entry, field in _MORE.items():
        value = header.of_model(entry)
        if value is not None and hasattr(config, field):
            setattr(config, field, value)
    config = _windowed(config, header)
    _rotate(config, header, file)
    return config


def left_out_of(model: Any, header: GgufHeader) -> list[str]:
    """The tensors and entries of a file that its loaded model does not take, sorted."""
    if header.architecture in GGUF_CONFIG_ARCHS:
        return []
    processors: dict[str, Any] = TENSOR_PROCESSORS
    processor = processors.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    taken = get_gguf_hf_weights_map(model, processor)
    model.config.model_type = type(model.config).model_type
    tensors = [name for name in header.tensors if name not in taken and name not in {*_FACTORS, "output.weight"}]
    known = {*_known(header), *_MORE}
    entries = [name for name in entries_of(header) if name not in known and not name.startswith(_READ_HERE)]
    return sorted([*tensors, *(f"{header.architecture}.{name}" for name in entries)])


def _known(header: GgufHeader) -> Mapping[str, Any]:
    kind = str(config_of(header)["model_type"]).removesuffix("_text")
    table: Mapping[str, Any] = GGUF_CONFIG_MAPPING
    return table.get(kind) or table.get(header.architecture) or {}


def _windowed(config: Any, header: GgufHeader) -> Any:
    window = header.of_model("attention.sliding_window")
    if not window or getattr(config, "sliding_window", None) == window:
        return config
    if config.model_type in {"llama", "mistral"}:
        entries = {
            name: value for name, value in config.to_dict().items() if name not in {"model_type", "sliding_window"}
        }
        windowed: Any = MistralConfig(**entries, sliding_window=window)
        windowed.model_type = header.architecture  # by which transformers finds the names of tensors
        return windowed
    if config.model_type in {"phi3", "gpt_oss", "starcoder2"}:
        config.sliding_window = window
        return config
    raise _refused(f"its attention.sliding_window is {window}, which {config.model_type} of transformers has not")


def _rotate(config: Any, header: GgufHeader, file: Path) -> None:
    """Set the base, the width and the scaling of rotations."""
    if not isinstance(getattr(config, "rope_parameters", None), dict):
        if any(name in header.tensors for name in _FACTORS) or header.of_model("rope.scaling.type", "none") != "none":
            raise _refused(f"it scales rotations, which {config.model_type} of transformers has not")
        return
    # Gemma 3 scales those of its layers without a window alone.
    whole = config.rope_parameters.get("full_attention", config.rope_parameters)
    if (base := header.of_model("rope.freq_base")) is not None:
        whole["rope_theta"] = base
    width, size = header.of_model("rope.dimension_count"), _head_size(config)
    if width is not None and width != int(size * whole.get("partial_rotary_factor", 1.0)):
        whole["partial_rotary_factor"] = width / size
    whole.update(_scaling(header, file, config.max_position_embeddings))


def _head_size(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _scaling(header: GgufHeader, file: Path, longest: int) -> dict[str, Any]:
    kind = header.of_model("rope.scaling.type", "none")
    factor = header.of_model("rope.scaling.factor")
    if factor is None and (factor := header.of_model("rope.scale_linear")) is not None:
        kind = "linear"
    original = header.of_model("rope.scaling.original_context_length", longest)
    stretch = header.of_model("rope.scaling.attn_factor", 1.0)
    factors = _frequency_factors(header, file)
    if factors:
        # Llama 3 writes its scaling as factors, which are those of LongRoPE without two lengths.
        alike = factors.get("rope_freqs.weight")
        short = factors.get("rope_factors_short.weight", alike)
        long = factors.get("rope_factors_long.weight", alike)
        if short is None or long is None or (factor not in {None, 1.0} and kind not in {"longrope", "none"}):
            raise _refused(f"its rotations are scaled in two ways ({kind}, {', '.join(factors)})")
        return {
            "rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": stretch,
            "original_max_position_embeddings": longest if alike else original,
        }  # fmt: skip
    if kind == "none" or factor in {None, 1.0}:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        if header.of_model("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
            raise _refused("its rope.scaling.yarn_ext_factor is not 1")
        own = header.of_model("rope.scaling.yarn_attn_factor", stretch)
        return {
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
            "beta_fast": header.of_model("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": header.of_model("rope.scaling.yarn_beta_slow", 1.0),
            "attention_factor": own * (1 + 0.1 * log(factor)),
        }  # fmt: skip
    raise _refused(f"its rope.scaling.type is {kind!r}; expected none, linear, yarn or longrope")


def _frequency_factors(header: GgufHeader, file: Path) -> dict[str, list[float]]:
    names = [name for name in _FACTORS if name in header.tensors]
    if not names:
        return {}
    tensors = {each.name: each for each in gguf.GGUFReader(file).tensors if each.name in names}
    return {name: np.asarray(gguf.dequantize(x.data, x.tensor_type)).ravel().tolist() for name, x in tensors.items()}


def _refused(reason: str) -> InvalidCheckpoint:
    return InvalidCheckpoint.at("checkpoint", f"the GGUF file cannot be read as it is meant: {reason}")
