"""The heads of one device, where a model is spread over several: each has the same number of heads of every attention.

The process of each device runs the same model on the same inputs at the same time, and inspects and edits its own heads
alone. What was found of them is put together at the end of a pass (``DividedHeads``), and so are gradients by head. A
tap that is made beside the attention itself has all heads in every process instead: it is gathered on the way in
(``whole``), and that of the device's own heads is taken on the way out (``own``). The gradient of one is the other, so
that a tap between them has its whole gradient in every process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed, nn

from attention_contract.errors import InvalidCheckpoint
from attention_service.core.edits import BoundEdit, narrowed
from attention_service.core.problem import Selection
from attention_service.models.passes.module_hooks import State, after
from attention_service.models.passes.module_taps import MODULE_TAPS
from attention_transformers.function_calls import RawAttentionInputs

HEADS: Final = 1
"""The dimension of heads in what an attention takes and makes."""
_WITHOUT_HEADS: Final = MODULE_TAPS | {"queries"}
"""The results of a layer that each device has whole."""


class DeviceHeads(NamedTuple):
    """The part of the heads of each attention that lies on one device."""

    rank: int
    """The number of the device among those of the model."""
    devices: int

    def divides(self, module: nn.Module, heads: int) -> bool:
        """True if a module that is called with so many heads has a part of all; False if it has all of them.

        Raises InvalidCheckpoint if its config says neither.
        """
        config: Any = module.config
        every = getattr(config.get_text_config(), "num_attention_heads", 0)
        if heads == every:
            return False
        if heads * self.devices == every:
            return True
        raise not_spread(module, f"has {heads} heads on each device, where its config says {every}")

    def whole(self, x: Tensor, dim: int = HEADS) -> Tensor:
        """Return a tensor with the heads of all devices, from that with the heads of each."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self._gathered(x, dim)
        whole: Tensor = _Whole.apply(x, self, dim)  # type: ignore[no-untyped-call]
        return whole

    def own(self, x: Tensor, dim: int = HEADS) -> Tensor:
        """Return a tensor with the heads of this device, from that with all of them."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self._taken(x, dim)
        own: Tensor = _Own.apply(x, self, dim)  # type: ignore[no-untyped-call]
        return own

    def around(self, change: State) -> State:
        """A change of states with all heads one behind the other, as one of those with the heads of this device."""

        def of_own(state: Tensor) -> Tensor | None:
            changed = change(self.whole(state, -1))
            return None if changed is None else self.own(changed, -1)

        return of_own

    def whole_attention(self, raw: RawAttentionInputs) -> RawAttentionInputs:
        """Return an attention of the heads of all devices, from that of this device."""
        heads = raw.query.shape[HEADS]
        mask, by_head = raw.mask, raw.mask is not None and raw.mask.ndim == 4 and raw.mask.shape[HEADS] == heads
        return replace(
            raw, query=self.whole(raw.query), key=self.whole(raw.key), value=self.whole(raw.value),
            mask=self.whole(mask) if mask is not None and by_head else mask,
            sinks=None if raw.sinks is None else self.whole(raw.sinks, 0),
            weights=None if raw.weights is None else self.whole(raw.weights),
        )  # fmt: skip

    def own_edits(self, edits: Sequence[BoundEdit], heads: int, kv_heads: int) -> list[BoundEdit]:
        """Return the edits of all heads as they apply to those of this device, which has so many."""
        own = range(self.rank * heads, (self.rank + 1) * heads)
        return narrowed(edits, Selection(heads=own), heads * self.devices, kv_heads * self.devices)

    def of_all(self, x: Any) -> list[Any]:
        """Return what each device has in the place of an object on the host."""
        parts: list[Any] = [None] * self.devices
        distributed.all_gather_object(parts, x)
        return parts

    def _gathered(self, x: Tensor, dim: int) -> Tensor:
        sent = (x.to(torch.uint8) if x.dtype == torch.bool else x).detach().contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.devices)]
        distributed.all_gather(parts, sent)
        return torch.cat(parts, dim).to(x.dtype)

    def _taken(self, x: Tensor, dim: int) -> Tensor:
        size = x.shape[dim] // self.devices
        return x.narrow(dim, self.rank * size, size)


class DividedHeads(NamedTuple):
    """The heads of an attention of which each device answers for its own."""

    share: DeviceHeads
    heads: int
    """The heads of each device."""
    chosen: Sequence[int] | None = None
    """The ones that are asked for, among those of all devices; None for all."""
    dim: int = HEADS
    averaged: bool = False
    """True if the weights to return are the mean of the chosen heads."""

    @property
    def own(self) -> tuple[int, ...] | None:
        """The chosen ones of this device; the first one if there is none."""
        return None if self.chosen is None else self._of(self.share.rank) or (0,)

    def of_all(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results of all devices, from those of this one on the host."""
        parts = self.share.of_all(found)
        return {name: self._joined(name, [part[name] for part in parts]) for name in found}

    def of_all_chosen(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return arrays of the chosen heads of all devices, with the same nesting."""
        whole: dict[str, Any] = self._stacked(self.share.of_all(found), narrowed=True)
        return whole

    def _stacked(self, parts: Sequence[Any], *, narrowed: bool) -> Any:
        """Arrays of all devices as one. ``narrowed``: they have the chosen heads alone."""
        if isinstance(parts[0], Mapping):
            return {key: self._stacked([part[key] for part in parts], narrowed=narrowed) for key in parts[0]}
        whole = np.concatenate(parts, self.dim)
        return whole.take(self._places, self.dim) if narrowed and self.chosen is not None else whole

    def _joined(self, name: str, parts: Sequence[Any]) -> Any:
        if name in _WITHOUT_HEADS:
            return parts[0]
        if name == "differences":
            return {key: self._joined(key, [part[key] for part in parts]) for key in parts[0]}
        if name == "weights" and self.averaged:
            counts = [self.heads if self.chosen is None else len(self._of(rank)) for rank in range(len(parts))]
            mean = sum(count * part.astype(np.float64) for count, part in zip(counts, parts, strict=True))
            return np.asarray(mean / sum(counts)).astype(parts[0].dtype)
        return self._stacked(parts, narrowed=name not in {"statistics", "whole"})

    def _of(self, rank: int) -> tuple[int, ...]:
        """The chosen heads of a device, counted from its first."""
        return tuple(head - rank * self.heads for head in self.chosen or () if head // self.heads == rank)

    @property
    def _places(self) -> list[int]:
        """The places of the chosen heads among those that the devices return one behind the other."""
        by_device = [self._of(rank) for rank in range(self.share.devices)]
        begins = np.cumsum([0, *(max(1, len(own)) for own in by_device)]).tolist()
        return [
            begins[head // self.heads] + by_device[head // self.heads].index(head % self.heads)
            for head in self.chosen or ()
        ]


def own_part(x: Tensor) -> Tensor:
    """Return the part of a parameter that lies on this device."""
    divided: Any = x
    own: Tensor = divided.to_local() if is_divided(x) else x
    return own


def whole_parameter(x: Tensor) -> Tensor:
    """Return a parameter with the parts of all devices; the same one if it is not divided."""
    divided: Any = x
    whole: Tensor = divided.full_tensor() if is_divided(x) else x
    return whole


def is_divided(x: Tensor) -> bool:
    """True if a parameter has a part on each device."""
    return hasattr(x, "full_tensor")


def let_outputs_change(model: nn.Module) -> None:
    """Let the outputs of divided modules be changed in place on a graph, which PyTorch refuses of such views."""
    for module in model.modules():
        if any(is_divided(x) for x in module.parameters(recurse=False)):
            after(module, _copied_view)


def _copied_view(state: Tensor) -> Tensor | None:
    return state.clone() if state.requires_grad and state._is_view() else None


def not_spread(module: nn.Module, reason: str) -> InvalidCheckpoint:
    """The error for a model, or a part of one, that is on one device alone."""
    return InvalidCheckpoint.at(
        "devices", f"{type(module).__name__} {reason}, so that it is not spread over devices; load it on one"
    )


class _Whole(torch.autograd.Function):
    """The heads of all devices, whose gradient is whole in every process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: DeviceHeads, dim: int) -> Tensor:
        ctx.share, ctx.dim = share, dim
        return share._gathered(x, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.share._taken(gradients[0], ctx.dim), None, None


class _Own(torch.autograd.Function):
    """The heads of this device, whose gradient is the part that it has of the whole one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: DeviceHeads, dim: int) -> Tensor:
        ctx.share, ctx.dim = share, dim
        return share._taken(x, dim).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.share._gathered(gradients[0], ctx.dim), None, None
