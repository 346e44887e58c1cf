"""The attention of a model on this machine, by its own eager functions: its taps are kept, and edited where asked."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_client.array_likes import as_array
from attention_client.transformers.attached import attending_by
from attention_client.transformers.local_attention import local_attention
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit
from attention_contract.tensors import Array
from attention_transformers.model_layers import LayerKey, attention_modules

_BY_QUERY: Final = {"heads": 1, "queries": 2}
_BY_KEY: Final = {"heads": 1, "keys": 2}
_AXES: Final[dict[str, dict[str, int]]] = {
    "q": _BY_QUERY,
    "k": _BY_KEY,
    "v": _BY_KEY,
    "weights": {"heads": 1, "queries": 2, "keys": 3},
    "context": _BY_QUERY,
}
"""The dimensions of each tap that an edit may choose from."""


@contextmanager
def local_taps(
    model: PreTrainedModel, edits: Mapping[str, Sequence[Edit]] | None = None
) -> Iterator[dict[LayerKey, dict[str, Array]]]:
    """Yield a dict that each pass fills with q, k, v, weights and context by layer, with their batch dimension.

    The model attends by its own eager functions until the block ends. ``edits`` are by the text of the layer's key.
    They touch q, k, v, weights and context, or scale ``masked_scores``. Raises UnsupportedModel for a model that does
    not use the attention interface of transformers, and InvalidRequest for an edit that cannot be made.
    """
    modules = attention_modules(model)
    known = [key for one in modules for key in one.keys]
    changes = edits or {}
    for layer, wanted in changes.items():
        _check(wanted)
        if layer not in map(str, known):
            raise InvalidRequest(
                f"edits: expected layers among {', '.join(map(str, known))}; got {layer}", param="edits"
            )
    taps: dict[LayerKey, dict[str, Array]] = {}
    keys = {id(one.module): one.keys for one in modules}
    functions = {id(one.module): local_attention(one.module, "eager") for one in modules}
    calls: dict[int, int] = {}

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        place = id(module)
        calls[place] = calls.get(place, -1) + 1
        layer = keys[place][calls[place] % len(keys[place])]
        wanted = changes.get(str(layer), ())
        query, key, value = (_edited(tensor, wanted, tap) for tap, tensor in (("q", query), ("k", key), ("v", value)))
        output, weights = functions[place](module, query, key, value, mask, *args, **options)
        if weights is not None and wanted:
            weights = _edited(_tempered(weights, wanted), wanted, "weights")
            values = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
            output = _edited(weights.to(value.dtype) @ values, wanted, "context").transpose(1, 2).contiguous()
        found = {"q": query, "k": key, "v": value, "weights": weights, "context": output.transpose(1, 2)}
        taps[layer] = {tap: as_array(tensor) for tap, tensor in found.items() if tensor is not None}
        return output, weights

    with attending_by(model, attend):
        yield taps


def _tempered(weights: Tensor, edits: Sequence[Edit]) -> Tensor:
    """Scale the scores behind weights: softmax(t · s) = softmax(s)ᵗ / Σ softmax(s)ᵗ, row by row."""
    for edit in edits:
        if edit.tap == "masked_scores" and edit.scale is not None:
            weights = _shares(weights**edit.scale)
    return weights


def _check(edits: Sequence[Edit]) -> None:
    """Raise InvalidRequest for an edit that is not computed beside a model."""
    for edit in edits:
        whole = edit.heads is None and edit.queries is None and edit.keys is None
        scaled = edit.tap == "masked_scores" and whole and edit.scale is not None and edit.scale > 0
        if edit.value is not None or not (edit.tap in _AXES or scaled):
            raise InvalidRequest(
                f"edits: this edit of {edit.tap} is not computed beside a model; expected set or scale of "
                f"{', '.join(_AXES)}, or a positive scale of all masked_scores",
                param="edits",
            )


def _edited(tensor: Tensor, edits: Sequence[Edit], tap: str) -> Tensor:
    """Apply the edits of a tap to it, ``[1, heads, queries or keys, …]``, one after another."""
    for edit in edits:
        if edit.tap != tap:
            continue
        chosen = torch.ones_like(tensor, dtype=torch.bool)
        for axis in ("heads", "queries", "keys"):
            indices = getattr(edit, axis)
            if indices is None:
                continue
            if axis not in _AXES[tap]:
                raise InvalidRequest(f"edits: {tap} has no {axis}; it has {', '.join(_AXES[tap])}", param="edits")
            dimension = _AXES[tap][axis]
            size = tensor.shape[dimension]
            if max(indices) >= size:
                raise InvalidRequest(
                    f"edits: {axis} {max(indices)} of {tap} is out of range; expected 0 to {size - 1}", param="edits"
                )
            along = torch.zeros(size, dtype=torch.bool, device=tensor.device)
            along[list(indices)] = True
            chosen &= along.view([-1 if at == dimension else 1 for at in range(tensor.dim())])
        new = torch.full_like(tensor, edit.set) if edit.set is not None else tensor * (edit.scale or 0.0)
        tensor = torch.where(chosen, new, tensor)
        tensor = _shares(tensor) if edit.renormalize else tensor
    return tensor


def _shares(weights: Tensor) -> Tensor:
    """Each row divided by its sum; a row of zeros stays."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total == 0, weights, weights / total)
