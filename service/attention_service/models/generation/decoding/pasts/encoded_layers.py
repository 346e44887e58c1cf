"""Outputs of encoders for the texts of a pass, as the cross-attentions of a decoder read them.

Shapes: B texts of the pass, R rows of a slab, H heads, K keys, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from attention_service.models.generation.decoding.pasts.text_pasts import PastPart
from attention_service.models.generation.decoding.pasts.text_slabs import TextSlab
from attention_transformers.model_layers import UnsupportedModel


def unread(like: Tensor, rows: int, keys: int) -> Tensor:
    """Return NaN of the shape of keys ``[rows, H, keys, D]``, without memory.

    It stands for keys that the attention reads in slabs; a model that computes with it has NaN.
    """
    return like.new_full((), torch.nan).expand(rows, like.shape[1], keys, like.shape[3])


class EncodedLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # of ``__init_subclass__``
    """The keys and values of one cross-attention."""

    def __init__(self, parts: list[PastPart]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts = parts
        rows, longest = parts[-1].rows.stop, max(part.key.shape[2] for part in parts)
        key, value = unread(parts[0].key, rows, longest), unread(parts[0].value, rows, longest)
        self.given = key, value
        """The keys and values by which the attention knows them again."""
        self.keys, self.values = key, value
        self.dtype, self.device, self.is_initialized = key.dtype, key.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Refuse: no token is added to what an encoder made."""
        raise UnsupportedModel("its decoder makes the keys of its encoder again")


def encoded_layers(slabs: Sequence[tuple[TextSlab, slice]]) -> list[Any]:
    """The layers of all texts of a pass, by slabs and their rows of the pass; a layer that read nothing is empty."""
    masks = [_seen(slab) for slab, _ in slabs]
    first, layers = slabs[0][0], list[Any]()
    for number in range(len(first.texts[0].layers)):
        if number not in first.layers:
            layers.append(DynamicLayer())  # type: ignore[no-untyped-call]
            continue
        parts = []
        for (slab, rows), mask in zip(slabs, masks, strict=True):
            key, value = (x[: len(slab.counts), :, : max(slab.counts)] for x in slab.tensors(number))
            seen = [range(count) for count in slab.counts]
            parts.append(PastPart(rows, key, value, mask, seen, encoded=True))
        layers.append(EncodedLayer(parts))
    return layers


def _seen(slab: TextSlab) -> Tensor | None:
    """The keys that each text has, bool ``[R, K]``; None if all have the same number."""
    if len(set(slab.counts)) == 1:
        return None
    device = slab.tensors(slab.layers[0])[0].device
    return torch.arange(max(slab.counts), device=device)[None] < torch.tensor(slab.counts, device=device)[:, None]
