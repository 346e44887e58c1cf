"""Modern Hopfield retrieval: states that fall to stored patterns.

Notation for shapes: B batch, H heads, N stored patterns, S states, D width of the associative space, V width of what
comes out (D unless projected), T steps. Wherever B or H is missing in the states, it is missing in the reply.

Source: Ramsauer et al. 2021, "Hopfield Networks is All You Need".
"""

from typing import Any, Final, Self

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, WireModel, at_fault
from attention_contract.schemas.attention import Ran
from attention_contract.tensors import BoolArray, Encoding, FloatArray, IntArray

MAX_STEPS: Final = 1000
"""The most steps of one request."""
DEFAULT_MAX_STEPS: Final = 100
"""The limit of an iteration with ``eps`` and without ``max_steps``."""


class Projections(WireModel):
    """The matrices of a Hopfield layer (eq. 10), each in the layout of ``torch.nn.Linear``, without a bias.

    With ``state`` or ``stored``, tensors come as ``[B, L, width]`` and ``num_heads`` (1 by default) says how the
    projected ones split into heads.
    """

    state: FloatArray | None = None
    """W_Q ``[H·D, state width]``: maps states to queries; default: the states are the queries."""
    stored: FloatArray | None = None
    """W_K ``[H·D, stored width]``: maps stored patterns to keys; default: the stored patterns are the keys."""
    output: FloatArray | None = None
    """W_V ``[H·V, D]``: maps the retrieved pattern of each head to its output; default: unchanged."""


class HopfieldRequest(WireModel):
    """Stored patterns, states, and how far to let the states fall.

    Layouts: ``[B, H, L, D]``, ``[H, L, D]`` or ``[L, D]`` (one head of one sequence); with ``num_heads``,
    ``[B, L, H·D]`` or ``[L, H·D]``. Exactly ``steps`` updates are made of each state, or as many as it takes until one
    is smaller than ``eps``; without either, one update, which is one attention.
    """

    stored: FloatArray
    """``[B, H, N, D]``: the stored patterns (the paper's X, or Y before its projection)."""
    states: FloatArray
    """``[B, H, S, D]``: the state patterns, from which retrieval starts (the paper's ξ, or R before its projection)."""
    beta: FloatArray | None = None
    """The inverse temperature β > 0, one number or ``[H]``; default: 1/√D. A large β retrieves single patterns; a small
    β averages over many."""
    steps: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Exactly this many updates."""
    eps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Update each state until the Euclidean norm of its update is below this."""
    max_steps: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """With ``eps``: at most this many updates; default: 100. The estimated cost assumes this number."""
    stored_mask: BoolArray | None = None
    """``[B, N]``, true for a real pattern, false for padding, which may contain any value."""
    projections: Projections | None = None
    """The matrices of a Hopfield layer; default: none."""
    num_heads: int | None = Field(default=None, ge=1)
    """Tensors have the layout ``[B, L, H·D]`` with this H."""
    return_association: bool = False
    """Return the association weights themselves."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.steps is not None and self.eps is not None:
            raise at_fault("steps", "it and eps exclude each other; to limit an iteration until eps, send max_steps")
        if self.max_steps is not None and self.eps is None:
            raise at_fault("max_steps", "it limits an iteration until eps, and there is none; send eps, or steps")
        return self


class Reached(WireModel):
    """The end of each state, by the association weights p of its last update: the state became Σ p_i x_i."""

    pattern: IntArray
    """``[B, H, S]``: the stored pattern of the largest weight."""
    weight: FloatArray
    """``[B, H, S]``: that weight."""
    similarity: FloatArray
    """``[B, H, S]``: the cosine between the state and that pattern, 0 where one of them is zero."""
    distance: FloatArray
    """``[B, H, S]``: the Euclidean distance between them."""
    mixed: FloatArray
    """``[B, H, S]``: how many patterns the state is a mixture of, exp(−Σ p ln p): 1 for one, N for all alike."""
    single: BoolArray
    """``[B, H, S]``: whether that weight is at least 0.9 and so the state one pattern (a fixed point near it);
    otherwise it is a metastable mixture of several, or not there yet."""


class HopfieldReply(WireModel):
    """The retrieved patterns, and the way of the states to them."""

    states: FloatArray
    """The states after their last update, projected where an output projection came: in the layout of the states."""
    energy: FloatArray
    """``[B, H, S, T + 1]``: E(ξ) before the first update and after each (eq. 2 with its constants), of the unprojected
    state. It never rises but for rounding. A state that had converged earlier keeps its last."""
    steps: IntArray
    """``[B, H, S]``: how many updates each state took."""
    change: FloatArray
    """``[B, H, S]``: the Euclidean norm of its last update."""
    converged: IfRequested[BoolArray] = ABSENT
    """``[B, H, S]``: whether that is below ``eps``; null where there is none."""
    reached: Reached
    association: IfRequested[FloatArray] = ABSENT
    """``[B, H, S, N]``: the weights of each state's last update."""
    ran: Ran


EXAMPLE_HOPFIELD: Final[dict[str, Any]] = {
    "stored": [[1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0], [1.0, -1.0, -1.0, 1.0]],
    "states": [[1.0, 1.0, 0.0, 0.0]],
    "beta": 2.0,
    "eps": 0.001,
    "return_association": True,
}
"""Three patterns, and one of them with its second half lost."""
