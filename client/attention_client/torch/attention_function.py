"""One attention of the service as a function of torch's automatic differentiation, twice differentiable.

If a gradient is needed, the server keeps the forward pass, and the backward pass sends ∂L/∂output alone. If it was not
kept, the backward pass is a gradients request with the same inputs. Its own backward pass is a gradients request with
``directions``, for products with the Hessian. Tensors are saved as torch saves them: a backward pass after one of them
was changed in place raises torch's error and computes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from attention_contract import operations
from attention_contract.errors import PassNotFound
from attention_contract.operations import Operation

PARAMETERS: Final = "parameters."
UPSTREAM: Final = "upstream"
_OF_TAP: Final = "tap_upstream."
Send = Callable[[Operation[Any], Mapping[str, Any]], Any]
"""Sends a request for an operation with these fields, and returns the reply."""


@dataclass(frozen=True)
class RemoteCall:
    """One attention: the options of its requests and the names of its tensors, which come beside it."""

    send: Send
    send_plain: Send
    """Sends a request that is about no module."""
    forward: Operation[Any]
    kept_forward: Operation[Any]
    """The forward pass that the server keeps."""
    gradients: Operation[Any]
    names: tuple[str, ...]
    """The request's field of each tensor, the query's first; a parameter is ``parameters.`` and its name."""
    options: Mapping[str, Any]
    """All other fields of the request."""
    taps: tuple[str, ...] = ()
    """Taps to return beside the output."""
    averaged_heads: int = 0
    """The number of heads over which ``weights`` are averaged, in a batched layout; 0 to return each head's."""

    @property
    def upstreams(self) -> tuple[str, ...]:
        """The names of the upstream gradients: of the output and of each tap."""
        return (UPSTREAM, *(f"{_OF_TAP}{tap}" for tap in self.taps))

    @property
    def can_be_kept(self) -> bool:
        """True if a kept pass computes all that is wanted: the output, and nothing edited."""
        return not self.taps and not self.options.get("edits")

    def backward(self, kept: str, given: Mapping[str, Tensor], wrt: Sequence[str]) -> dict[str, Tensor] | None:
        """∂L/∂name for each name, by the kept pass; None if the server keeps it no longer."""
        try:
            reply = self.send_plain(operations.backward, {"id": kept, UPSTREAM: given[UPSTREAM]})
        except PassNotFound:
            return None
        return {name: tensor_like(reply.gradients[name.removeprefix(PARAMETERS)], given[name]) for name in wrt}

    def attend(self, tensors: Sequence[Tensor], wrt: Sequence[str] = ()) -> tuple[tuple[Tensor, ...], str | None]:
        """Return the output and the taps, and the id of the pass if the server keeps it for gradients.

        ``wrt``: the names that get a gradient; none for a pass that is not to be kept.
        """
        if wrt and self.can_be_kept:
            fields = self._fields(self.names, tensors) | {"wrt": _in_request(wrt)}
            reply = self.send(self.kept_forward, fields)
            return (tensor_like(reply.output, tensors[0]),), reply.id
        returned = ("output", *self.taps)
        averages = self.averaged_heads > 0 and "weights" in returned
        fields = self._fields(self.names, tensors) | {"return_": returned, "average_heads": averages}
        reply = self.send(self.forward, fields)
        return tuple(tensor_like(getattr(reply, name), tensors[0]) for name in returned), None

    def differentiate(
        self, given: Mapping[str, Tensor], wrt: Sequence[str], along: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """∂L/∂name for each name, where L is Σ output · upstream, and the same for each tap.

        given: the tensors and the upstream gradients. With directions ``along`` some of the names, return instead
        ∂/∂name of Σ ⟨∂L/∂other, d_other⟩ over the others.
        """
        sent = {name: x[:, None] / self.averaged_heads if self._is_averaged(name) else x for name, x in given.items()}
        fields = self._fields(sent.keys(), sent.values())
        fields["wrt"] = _in_request(wrt)
        if along is not None:
            fields["directions"] = {name.removeprefix(PARAMETERS): direction for name, direction in along.items()}
        reply = self.send(self.gradients, fields)
        derivatives = reply.gradients if along is None else reply.hessian_products
        tensors = {name: tensor_like(derivatives[name.removeprefix(PARAMETERS)], given[name]) for name in wrt}
        return {name: x.mean(1) if self._is_averaged(name) else x for name, x in tensors.items()}

    def _is_averaged(self, name: str) -> bool:
        return self.averaged_heads > 0 and name == f"{_OF_TAP}weights"

    def _fields(self, names: Any, tensors: Any) -> dict[str, Any]:
        """The fields of a request, names with a dot in a map of their own."""
        fields = dict(self.options)
        for name, tensor in zip(names, tensors, strict=True):
            field, dot, rest = name.partition(".")
            if dot:
                fields.setdefault(field, {})[rest] = tensor
            else:
                fields[name] = tensor
        return fields


@torch.compiler.disable(reason="the attention is computed by a server")  # type: ignore[no-untyped-call,untyped-decorator]
def attend(call: RemoteCall, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the output and the taps of one attention of the service. ``torch.compile`` breaks its graph here."""
    wrt: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        wrt = tuple(name for name, x in zip(call.names, tensors, strict=True) if x.requires_grad)
    results: tuple[Tensor, ...] = _Attention.apply(call, wrt, *tensors)  # type: ignore[no-untyped-call]
    return results


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, call: RemoteCall, wrt: tuple[str, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        results, ctx.kept = call.attend(tensors, wrt)
        ctx.call, ctx.shape = call, results[0].shape
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor | None) -> tuple[Tensor | None, ...]:
        call: RemoteCall = ctx.call
        tensors = dict(zip(call.names, ctx.saved_tensors, strict=True))
        if all(x is None for x in upstreams):
            return (None, None, *(None for _ in tensors))
        output, *of_taps = upstreams
        given = {UPSTREAM: tensors[call.names[0]].new_zeros(ctx.shape) if output is None else output}
        given |= {name: x for name, x in zip(call.upstreams[1:], of_taps, strict=True) if x is not None}
        wrt = tuple(name for name, needed in zip(call.names, ctx.needs_input_grad[2:], strict=True) if needed)
        names = (*given, *tensors)
        sent = *given.values(), *tensors.values()
        gradients = _Gradients.apply(call, ctx.kept, names, wrt, *sent)  # type: ignore[no-untyped-call]
        by_name = dict(zip(wrt, gradients, strict=True))
        return (None, None, *(by_name.get(name) for name in call.names))


class _Gradients(Function):
    @staticmethod
    def forward(
        ctx: Any, call: RemoteCall, kept: str | None, names: tuple[str, ...], wrt: tuple[str, ...], *given: Tensor
    ) -> Any:
        by_name = dict(zip(names, given, strict=True))
        gradients = None if kept is None else call.backward(kept, by_name, wrt)
        if gradients is None:
            gradients = call.differentiate(by_name, wrt)
        ctx.call, ctx.names, ctx.wrt = call, names, wrt
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        return tuple(gradients[name] for name in wrt)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *directions: Tensor | None) -> tuple[Tensor | None, ...]:
        call: RemoteCall = ctx.call
        given = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        along = {name: x for name, x in zip(ctx.wrt, directions, strict=True) if x is not None}
        wanted = [name for name, needed in zip(ctx.names, ctx.needs_input_grad[4:], strict=True) if needed]
        if not along or not wanted:
            return (None, None, None, None, *(None for _ in given))
        products = call.differentiate(given, [*dict.fromkeys([*wanted, *along])], along)
        return (None, None, None, None, *(products[name] if name in wanted else None for name in given))


def _in_request(names: Sequence[str]) -> list[str]:
    return [name.removeprefix(PARAMETERS) for name in names]


def tensor_like(array: NDArray[Any], like: Tensor) -> Tensor:
    """An array of a reply as a tensor of another one's device and dtype."""
    array = np.asarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(like.device, like.dtype)
    return torch.from_numpy(array).to(like.device, like.dtype)
