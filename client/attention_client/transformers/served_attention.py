"""One attention on the service as a function of torch: forward and backward are requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_client import Client
from attention_contract.schemas.attention import Edit, Tap
from attention_contract.spec import AttentionSpec

_NAMES: Final = ("query", "key", "value", "mask", "sinks")
"""The tensors that may need a gradient, by the names that requests give them."""


@dataclass
class Served:
    """One request for raw attention, without the tensors that may need a gradient."""

    client: Client
    spec: AttentionSpec
    key_mask: Tensor | None = None
    offsets: int | None = None
    dropout: dict[str, Any] | None = None
    edits: Sequence[Edit] = ()
    record: Sequence[Tap] = ()
    recorded: dict[str, NDArray[Any]] = field(default_factory=dict)
    """The taps of ``record``, once the request is answered."""

    def output(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the output ``[B, H, Lq, Dv]`` for ``query [B, H, Lq, D]``, ``key``, ``value [B, Hkv, Lk, D or Dv]``.

        ``mask``, float or bool, is broadcastable to ``[B, H, Lq, Lk]``; ``sinks [H]``. Gradients flow to all five.
        """
        output: Tensor = _ServedFunction.apply(self, query, key, value, mask, sinks)  # type: ignore[no-untyped-call]
        return output

    def forward(self, tensors: Sequence[Any]) -> Tensor:
        """Ask for the output and keep the taps."""
        query, key, value, mask, sinks = tensors
        reply = self.client.raw_forward(
            query, key, value, mask=mask, return_=("output", *self.record), **self._fields(sinks)
        )
        self.recorded = {tap: getattr(reply, tap) for tap in self.record}
        return as_tensor(cast("NDArray[Any]", reply.output), query)

    def gradients(self, tensors: Sequence[Any], upstream: Tensor, wrt: Sequence[str]) -> dict[str, Tensor]:
        """Ask for the gradients with respect to the tensors named, given that of the output."""
        query, key, value, mask, sinks = tensors
        reply = self.client.raw_gradients(
            query, key, value, mask=mask, wrt=wrt, upstream=upstream, return_=("output",), **self._fields(sinks)
        )
        return {name: as_tensor(reply.gradients[name], query) for name in wrt}

    def _fields(self, sinks: Tensor | None) -> dict[str, Any]:
        return {
            "spec": self.spec,
            "parameters": None if sinks is None else {"sinks": sinks},
            "key_mask": self.key_mask,
            "offsets": self.offsets,
            "dropout": self.dropout,
            "edits": self.edits,
        }


class _ServedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, served: Served, *tensors: Tensor | None) -> Tensor:
        ctx.served = served
        ctx.save_for_backward(*tensors)
        return served.forward(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        needed = dict(zip(_NAMES, ctx.needs_input_grad[1:], strict=True))
        wrt = [name for name, needs in needed.items() if needs]
        found = ctx.served.gradients(ctx.saved_tensors, upstream, wrt)
        return (None, *(found.get(name) for name in _NAMES))


def as_tensor(array: NDArray[Any], like: Tensor) -> Tensor:
    """Return an array of a reply as a tensor, on the device and in the dtype of another."""
    tensor = (
        torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(array)
    )
    return tensor.to(like.device, like.dtype)
