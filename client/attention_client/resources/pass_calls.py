"""Kept passes: a forward pass now, and its backward pass in a second request that brings ∂L/∂output alone."""

from collections.abc import Sequence
from typing import Unpack

from attention_client.arguments import DropoutLike, SpecLike, TensorMap
from attention_client.array_likes import TensorLike
from attention_client.calls import CallOptions, call
from attention_client.resources.base import AsyncResource, Resource
from attention_contract import operations
from attention_contract.schemas.attention import KernelName
from attention_contract.schemas.backward_passes import PassReply
from attention_contract.schemas.gradients import GradientsReply


class Passes(Resource):
    """Calls about forward passes that stay on the server until their backward pass."""

    def create(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        wrt: Sequence[str] = ("query",), parameters: TensorMap | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        dropout: DropoutLike | None = None, kernel: KernelName | None = None, version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> PassReply:  # fmt: skip
        """Return the output of a module, and the id by which ``backward`` computes gradients of the same pass.

        ``wrt``: the inputs and parameters that get a gradient; ``parameters`` stands for all of them. The id is None if
        the server has no room to keep the pass. The other arguments are those of ``Client.forward``.
        """
        return self.send(call(operations.create_pass, locals()))

    def create_raw(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        wrt: Sequence[str] = ("query",), spec: SpecLike | None = None, parameters: TensorMap | None = None,
        num_heads: int | None = None, num_kv_heads: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        dropout: DropoutLike | None = None, kernel: KernelName | None = None, version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> PassReply:  # fmt: skip
        """Return the output of raw attention, and the id of the pass, as ``create`` does for a module.

        Inputs as in ``client.attention.forward``.
        """
        return self.send(call(operations.create_raw_pass, locals()))

    def backward(
        self, id: str, *, upstream: TensorLike | None = None, **options: Unpack[CallOptions],  # noqa: A002
    ) -> GradientsReply:  # fmt: skip
        """Return the gradients of a kept pass, which is used up. ``upstream`` is ∂L/∂output; default: ones.

        Raises PassNotFound if the pass is no longer kept: ask for ``gradients`` then, with the inputs.
        """
        return self.send(call(operations.backward, locals()))


class AsyncPasses(AsyncResource):
    """Calls about forward passes that stay on the server until their backward pass."""

    async def create(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        wrt: Sequence[str] = ("query",), parameters: TensorMap | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        dropout: DropoutLike | None = None, kernel: KernelName | None = None, version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> PassReply:  # fmt: skip
        """Return the output of a module, and the id by which ``backward`` computes gradients of the same pass.

        ``wrt``: the inputs and parameters that get a gradient; ``parameters`` stands for all of them. The id is None if
        the server has no room to keep the pass. The other arguments are those of ``Client.forward``.
        """
        return await self.send(call(operations.create_pass, locals()))

    async def create_raw(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        wrt: Sequence[str] = ("query",), spec: SpecLike | None = None, parameters: TensorMap | None = None,
        num_heads: int | None = None, num_kv_heads: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        dropout: DropoutLike | None = None, kernel: KernelName | None = None, version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> PassReply:  # fmt: skip
        """Return the output of raw attention, and the id of the pass, as ``create`` does for a module.

        Inputs as in ``client.attention.forward``.
        """
        return await self.send(call(operations.create_raw_pass, locals()))

    async def backward(
        self, id: str, *, upstream: TensorLike | None = None, **options: Unpack[CallOptions],  # noqa: A002
    ) -> GradientsReply:  # fmt: skip
        """Return the gradients of a kept pass, which is used up. ``upstream`` is ∂L/∂output; default: ones.

        Raises PassNotFound if the pass is no longer kept: ask for ``gradients`` then, with the inputs.
        """
        return await self.send(call(operations.backward, locals()))
