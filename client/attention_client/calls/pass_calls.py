"""Kept passes: a forward pass now, and its backward pass in a second request that brings ∂L/∂output alone."""

from collections.abc import Sequence
from typing import Unpack

from attention_client.arguments import DropoutLike, InputFields, SpecLike
from attention_client.array_likes import TensorLike
from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.method import Group, WayT, method
from attention_contract import operations
from attention_contract.schemas.gradients import GradientsReply, PassReply


class Passes(Group[WayT]):
    """Calls about forward passes that stay on the server until their backward pass."""

    @method
    def create(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        past_key: TensorLike | None = None, past_value: TensorLike | None = None, offsets: TensorLike | None = None,
        wrt: Sequence[str] = ("query",), dropout: DropoutLike | None = None, **options: Unpack[InputFields],
    ) -> Call[PassReply]:  # fmt: skip
        """Return the output of a module, and the id by which ``backward`` computes gradients of the same pass.

        ``wrt``: the inputs and parameters that get a gradient; ``parameters`` stands for all of them. The id is None if
        the server has no room to keep the pass. The other arguments are those of ``Client.forward``.
        """
        return call(operations.create_pass, locals())

    @method
    def create_raw(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        past_key: TensorLike | None = None, past_value: TensorLike | None = None, offsets: TensorLike | None = None,
        spec: SpecLike | None = None, num_heads: int | None = None, num_kv_heads: int | None = None,
        wrt: Sequence[str] = ("query",), dropout: DropoutLike | None = None, **options: Unpack[InputFields],
    ) -> Call[PassReply]:  # fmt: skip
        """Return the output of raw attention, and the id of the pass, as ``create`` does for a module.

        Inputs as in ``client.attention.forward``.
        """
        return call(operations.create_raw_pass, locals())

    @method
    def backward(
        self, id: str, *, upstream: TensorLike | None = None, **options: Unpack[CallOptions],  # noqa: A002
    ) -> Call[GradientsReply]:  # fmt: skip
        """Return the gradients of a kept pass, which is used up. ``upstream`` is ∂L/∂output; default: ones.

        Raises PassNotFound if the pass is no longer kept: ask for ``gradients`` then, with the inputs.
        """
        return call(operations.backward, locals())
