"""Modern Hopfield retrieval."""

from typing import Unpack

from attention_client.arguments import ProjectionsLike
from attention_client.array_likes import TensorLike
from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.method import Group, WayT, method
from attention_contract import operations
from attention_contract.schemas.hopfield import HopfieldReply


class Hopfield(Group[WayT]):
    """Calls of Hopfield networks."""

    @method
    def retrieve(
        self, stored: TensorLike, states: TensorLike, *, beta: TensorLike | None = None, steps: int | None = None,
        eps: float | None = None, max_steps: int | None = None, stored_mask: TensorLike | None = None,
        projections: ProjectionsLike | None = None, num_heads: int | None = None, return_association: bool = False,
        **options: Unpack[CallOptions],
    ) -> Call[HopfieldReply]:  # fmt: skip
        """Let states fall to stored patterns: ``steps`` updates, or until an update is smaller than ``eps``.

        ``stored [B, H, N, D]``, ``states [B, H, S, D]``; or ``[B, L, H·D]`` with ``num_heads``. ``beta``, one number
        or ``[H]``, is the inverse temperature; by default 1/√D. ``max_steps`` goes with ``eps``; by default 100.
        ``stored_mask [B, N]``, True for a real pattern. ``projections``: state, stored and output matrices.
        """
        return call(operations.hopfield_retrieve, locals())
