"""Protocol and registry of position encodings, and the entry without an encoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attention_contract import positions as options
from attention_contract.errors import InvalidRequest
from attention_contract.spec import AttentionSpec
from attention_service.core.positions.token_positions import TokenPositions
from attention_service.core.problem import Learned, Widths
from attention_service.core.registry import Registry

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class HeadSubset:
    """Some of the query heads."""

    count: int
    """Number of heads, H."""
    picked: Sequence[int] | None = None
    """Indices of the heads, in this order; None for all."""


@dataclass(frozen=True)
class PositionCost:
    """Cost of an encoding, in FLOPs unless a field says otherwise. Integer arithmetic on places costs nothing."""

    place: int = 0
    """FLOPs to encode one place, for all heads together."""
    added: int = 0
    """FLOPs per vector to which the encoding is added."""
    rotated: int = 0
    """FLOPs to rotate a query or new key of one head; the backward pass costs the same."""
    pair: int = 0
    """FLOPs per query-key pair and head."""
    pair_backward: int = 0


class Position(Protocol):
    """Encoding of places. A method that does not apply returns its input, or None."""

    reads: bool
    """True if the encoding depends on places, so that a request can give them."""
    biased: bool
    """True if ``bias`` returns a bias."""

    @property
    def length(self) -> int | None:
        """Number of encoded places, from 0; None for any place."""

    def fault(self, widths: Widths, inputs: Sequence[int]) -> tuple[str, str] | None:
        """Return the invalid option (or "") and the reason, if the encoding does not fit these widths.

        inputs: input widths of a module's query, key and value; empty for raw q and k.
        """

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return the learned tensors by name."""

    def added(self, x: Tensor, places: Tensor, learned: Tensors) -> Tensor:
        """Add the encoding to x: inputs of a module ``[B, L, W]``, or raw q and k ``[B, H, L, D]``.

        places ``[1 or B, L]``.
        """

    def rotated(self, q: Tensor, k: Tensor, places: TokenPositions) -> tuple[Tensor, Tensor]:
        """Rotate queries ``[B, H, Q, D]`` and new keys ``[B, Hkv, K − P, D]`` by their places."""

    def bias(
        self, queries: Tensor, keys: Tensor, heads: HeadSubset, learned: Tensors, dtype: torch.dtype
    ) -> Tensor | None:
        """Return the bias of the scores of these queries and keys: ``[1 or B, H, Q, K]``.

        queries ``[1 or B, Q]`` and keys ``[1 or B, K]`` are places; the learned tensors cover all heads.
        """

    def cost(self, head_dim: int, width: int) -> PositionCost:
        """Return the cost for this head width, and for this width of the tensors to which it is added."""


class Inert:
    """Default methods of an encoding, which do nothing."""

    reads = True
    biased = False

    @property
    def length(self) -> int | None:
        """Return None: every place is valid."""
        return None

    def fault(self, widths: Widths, inputs: Sequence[int]) -> tuple[str, str] | None:
        """Return None: every width is valid."""
        return None

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return no learned tensors."""
        return {}

    def added(self, x: Tensor, places: Tensor, learned: Tensors) -> Tensor:
        """Return x unchanged."""
        return x

    def rotated(self, q: Tensor, k: Tensor, places: TokenPositions) -> tuple[Tensor, Tensor]:
        """Return q and k unchanged."""
        return q, k

    def bias(
        self, queries: Tensor, keys: Tensor, heads: HeadSubset, learned: Tensors, dtype: torch.dtype
    ) -> Tensor | None:
        """Return no bias."""
        return None

    def cost(self, head_dim: int, width: int) -> PositionCost:
        """Return a cost of zero."""
        return PositionCost()


POSITIONS = Registry[Position]("position")


def check_position(spec: AttentionSpec, widths: Widths, inputs: Sequence[int] = (), at: str = "spec") -> None:
    """Raise InvalidRequest if an encoding does not fit these widths; the error names the option under ``at``.

    inputs: how wide query, key and value of a module come; none for raw attention.
    """
    fault = POSITIONS.of(spec.position).fault(widths, inputs)
    if fault is not None:
        option, why = fault
        param = f"{at}.position.{option}" if option else f"{at}.position"
        raise InvalidRequest.at(param, why)


@POSITIONS.register(
    options.NoPosition,
    formula="q, k unchanged",
    gradient="∂q and ∂k unchanged",
    cost="O(1)",
    source="Vaswani et al. 2017, section 3.5 (attention without an encoding)",
)
@dataclass(frozen=True)
class NoPosition(Inert):
    """Entry without a position encoding."""

    options: options.NoPosition
    reads = False
