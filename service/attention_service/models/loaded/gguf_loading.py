"""Models from GGUF files: their config by what llama.cpp implies, their tensors dequantized, and what neither takes."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from transformers import AutoConfig
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf.reader import GgufHeader as TransformersHeader
from transformers.integrations.gguf.utils import get_gguf_conversion_mapping
from transformers.utils.quantization_config import GgufConfig

from attention_contract.errors import InvalidCheckpoint
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.models.loaded.checkpoint_processors import SAFE
from attention_service.models.loaded.gguf_tensors import read_tensors
from attention_service.modules.checkpoints.forms.gguf.entries import UnreadableGguf
from attention_service.modules.checkpoints.forms.gguf.families import FAMILIES
from attention_service.modules.checkpoints.forms.gguf.gguf_form import read_config
from attention_service.modules.checkpoints.forms.gguf.gguf_header import GgufHeader, read_header
from attention_service.modules.checkpoints.forms.gguf.rotations import FREQUENCY_FACTORS


class GgufSource(NamedTuple):
    """A GGUF file as a config, and the arguments from which transformers makes its model."""

    config: Any
    arguments: dict[str, Any]
    left_out: list[str]
    """The entries and tensors of the file that its model does not take, sorted."""


def open_gguf(file: Path, kind_of: Callable[[Any], Any], dtype: str, progress: Callable[[float], None]) -> GgufSource:
    """Read a file. ``kind_of``: the class of a config. ``dtype``: of the tensors. Raises InvalidCheckpoint."""
    header = read_header(file)
    try:
        stated = read_config(header, _frequency_factors(header, file))
    except UnreadableGguf as fault:
        raise InvalidCheckpoint.at("checkpoint", f"{file.name} is no model of this server: {fault}") from fault
    if FAMILIES[header.architecture].converted_by_transformers:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, **SAFE)
        unpacked: Any = GgufConfig  # has no annotations
        arguments = {
            "pretrained_model_name_or_path": file.parent, "gguf_file": file.name,
            "quantization_config": unpacked(gguf_file=file.name, dequantize=True),
        }  # fmt: skip
        with torch.device("meta"):
            model = kind_of(config)(config)
        return GgufSource(config, arguments, sorted([*stated.unread, *_unconverted(model, file)]))
    config = _config(dict(stated.fields))
    with torch.device("meta"):
        model = kind_of(config)(config)
    read = read_tensors(file, header, model, TORCH_DTYPES[dtype], progress)
    arguments = {"pretrained_model_name_or_path": None, "state_dict": read.tensors}
    return GgufSource(config, arguments, sorted([*stated.unread, *read.left_out]))


def _config(fields: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    if config.model_type == "umt5":  # its class ties whatever it is told, and scales states that are tied
        config.tie_word_embeddings = fields["tie_word_embeddings"]
    return config


def _frequency_factors(header: GgufHeader, file: Path) -> dict[str, list[float]]:
    names = [name for name in FREQUENCY_FACTORS if name in header.tensors]
    if not names:
        return {}
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name in names}
    return {name: np.asarray(gguf.dequantize(x.data, x.tensor_type)).ravel().tolist() for name, x in tensors.items()}


def _unconverted(model: Any, file: Path) -> list[str]:
    """The tensors of a file that transformers' own conversion gives a name that the model has not."""
    header: Any = TransformersHeader.from_file(str(file))
    mapping = deepcopy(get_gguf_conversion_mapping(header.architecture, model.config))
    renamings = [conversion for conversion in mapping if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
    wanted = model.state_dict()
    return [name for name in header.ggml_types if rename_source_key(name, renamings, converters)[0] not in wanted]
