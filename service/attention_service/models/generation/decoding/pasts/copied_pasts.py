"""Copies of a past, whatever object its model keeps it in: tensors in lists, in mappings, in objects of any class."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin


def copied(past: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A past of its own, with ``change`` of each tensor; modules and configs stay those of the model."""
    found: dict[int, Any] = {}
    _find(past, found)
    made = {at: change(x) if isinstance(x, Tensor) else x for at, x in found.items()}
    return copy.deepcopy(past, made)


def bytes_of(past: Any) -> int:
    """The bytes of the numbers of a past."""
    found: dict[int, Any] = {}
    _find(past, found)
    return sum(x.nbytes for x in found.values() if isinstance(x, Tensor))


def alone(x: Tensor) -> Tensor:
    """The numbers of a tensor in memory that holds no others; those of a window are a view of more."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def is_cuttable(past: object, tokens: int) -> bool:
    """True if a past of so many tokens can be cut to that of fewer: each layer's class says how, and it holds them."""
    return isinstance(past, Cache) and past.is_croppable and all(_holds_each(layer, tokens) for layer in past.layers)


def cut(past: Any, length: int, tokens: int) -> Any:
    """The first ``length`` of the ``tokens`` of a past that can be cut, which shares its numbers."""
    shorter = copied(past, lambda x: x)  # what can be cut grows by new tensors
    if length < tokens:
        shorter.crop(length - tokens)
    return shorter


def _holds_each(layer: Any, tokens: int) -> bool:
    """True if a layer holds numbers of each of so many tokens, and its own class says how they are cut."""
    if "crop" not in vars(type(layer)) or isinstance(layer, LinearAttentionCacheLayerMixin):
        return False
    return not getattr(layer, "is_sliding", False) or tokens < int(layer.sliding_window)


def _find(part: Any, found: dict[int, Any]) -> None:
    """Find the tensors of a part of a past, and what belongs to the model, by their identities."""
    if isinstance(part, Tensor | nn.Module | PreTrainedConfig | type):
        found[id(part)] = part
    elif isinstance(part, Mapping):
        for entry in part.values():
            _find(entry, found)
    elif isinstance(part, list | tuple | set):
        for entry in part:
            _find(entry, found)
    elif hasattr(part, "__dict__"):
        for entry in vars(part).values():
            _find(entry, found)
