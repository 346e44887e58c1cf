"""The heads of one device, where a model is spread over several: each has the same number of heads of every attention.

The process of each device runs the same model on the same inputs at the same time. A layer that is only to attend
attends with its own heads. One of which more is asked has all heads in every process, so that what is asked of it is
answered as on one device: queries, keys and values are gathered on the way in (``whole``), and the context of the
device's own heads is taken on the way out (``own``). The gradient of one is the other, so that a tap between them has
its whole gradient in every process.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, distributed, nn

from attention_contract.errors import InvalidCheckpoint
from attention_service.core.edits import BoundEdit, narrowed
from attention_service.core.problem import Selection
from attention_service.models.passes.module_hooks import State
from attention_transformers.function_calls import RawAttentionInputs

HEADS: Final = 1
"""The dimension of heads in what an attention takes and makes."""


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
        own = tuple(range(self.rank * heads, (self.rank + 1) * heads))
        return narrowed(edits, Selection(heads=own), heads * self.devices, kv_heads * self.devices)

    def _gathered(self, x: Tensor, dim: int) -> Tensor:
        sent = (x.to(torch.uint8) if x.dtype == torch.bool else x).detach().contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.devices)]
        distributed.all_gather(parts, sent)
        return torch.cat(parts, dim).to(x.dtype)

    def _taken(self, x: Tensor, dim: int) -> Tensor:
        size = x.shape[dim] // self.devices
        return x.narrow(dim, self.rank * size, size)


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
