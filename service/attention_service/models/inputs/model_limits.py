"""Limits of the inputs of a model, found in its config and its modules: tokens, lengths, padding."""

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_contract.errors import InvalidCheckpoint
from attention_service.models.folders.head_kinds import head_kind
from attention_service.models.folders.input_kinds import PAIRS

_STRETCHED: Final = frozenset({"linear", "yarn"})
"""Rotations whose factor a config may have beside the positions without it. What a dynamic one does for a long text
depends on the texts before, so its factor is not taken."""
_NO_TOKEN: Final = -1
SOUND: Final = frozenset({"input_features", "input_values"})
"""The main arguments of models that hear."""


def is_classifier(model: PreTrainedModel) -> bool:
    """True for a model that predicts classes."""
    kind = head_kind(type(model).__name__)
    return kind is not None and kind.predicts == "class"


def takes_last_token(model: PreTrainedModel) -> bool:
    """True for a classifier that takes the state of the last token, and knows no padding by which to find it.

    transformers refuses several texts then. With a padding that no token is, the last token is the last of the batch.
    """
    config = model.config.get_text_config()
    kind = head_kind(type(model).__name__)
    if kind is None or kind.predicts != "class" or kind.unit != "input" or model.main_input_name in SOUND:
        return False
    if getattr(config, "pad_token_id", None) is not None:
        return False
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(2, 2, dtype=torch.int64, device=model.device))
    except ValueError:
        config.pad_token_id = _NO_TOKEN
        return True
    return False


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of rows of the table of token embeddings. Raises InvalidCheckpoint without one."""
    reads: Any = getattr(model, "text_model", model) if model.config.model_type in PAIRS else model
    try:
        return int(reads.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):
        reason = f"{type(model).__name__} has no table of token embeddings, and reads {_reads(model)}"
        raise InvalidCheckpoint.at("checkpoint", reason) from None


def _reads(model: PreTrainedModel) -> str:
    """The arguments without which a model does not run, or else its main one."""
    takes = inspect.signature(model.forward).parameters.values()
    needed = [
        parameter.name
        for parameter in takes
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return ", ".join(needed or [model.main_input_name])


def first_token(model: PreTrainedModel, default: int) -> int:
    """The token with which a decoder begins, found as ``generate`` finds it."""
    generation = getattr(model, "generation_config", None)
    places = (
        (model.config, "decoder_start_token_id"), (generation, "decoder_start_token_id"), (generation, "bos_token_id"),
    )  # fmt: skip
    stated = (getattr(place, name, None) for place, name in places)
    return next((token_id for token_id in stated if isinstance(token_id, int)), default)


def max_length(model: PreTrainedModel) -> int | None:
    """The most tokens for which its config has positions; None if there is no limit."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    rope: Any = getattr(config, "rope_parameters", None) or {}
    rotations = (
        [rope] if "rope_type" in rope else [rotation for rotation in rope.values() if isinstance(rotation, dict)]
    )
    return max([limit, *(_stretched(rotation, limit) for rotation in rotations)])


def _stretched(rotation: Mapping[str, Any], limit: int) -> int:
    """The positions that a rotation reaches; a config has one, or one for each type of its layers."""
    if rotation.get("rope_type") not in _STRETCHED:
        return limit
    return int((rotation.get("factor") or 1) * (rotation.get("original_max_position_embeddings") or limit))


def positions_behind_padding(model: PreTrainedModel) -> int | None:
    """The positions of a table in which they are counted from behind the padding's, as in RoBERTa; None without one."""
    for path, module in model.named_modules():
        table, padding = getattr(module, "weight", None), getattr(module, "padding_idx", None)
        named = path.rpartition(".")[2] in {"position_embeddings", "embed_positions"}
        if named and isinstance(table, Tensor) and padding is not None:
            return int(table.shape[0]) - int(padding) - 1
    return None


def object_count(config: Any) -> int:
    """The objects that a detector looks for; 0 for another model."""
    if (tokens := getattr(config, "num_detection_tokens", None)) is not None:  # of YOLOS, behind its patches
        return int(tokens)
    patterns = getattr(config, "num_patterns", None) or 1  # of DAB-DETR, each of which asks for all objects
    return int(getattr(config, "num_queries", None) or 0) * int(patterns)
