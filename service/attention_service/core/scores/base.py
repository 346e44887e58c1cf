"""The interface of a score, and the base of scores that are products."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attention_service.core.problem import Learned, Widths
from attention_service.core.registry import Registry
from attention_service.core.tensors import product

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class ScoreCost:
    """The cost of a score: per pair, per query and per key. Products are matrix products."""

    pair_products: int
    """FLOPs of matrix products for each query-key pair of each head."""
    pair_flops: int = 0
    """Other FLOPs for each pair."""
    pair_backward_products: int | None = None
    """FLOPs of matrix products for each pair in the backward pass; None is twice those of the forward pass."""
    pair_backward_flops: int = 0
    query_products: int = 0
    """FLOPs of matrix products for each query of each head."""
    query_flops: int = 0
    key_products: int = 0
    """For each key, of each head for which it is done."""
    key_flops: int = 0
    by_query_head: bool = False
    """True if keys are processed once for each query head, not once for each key/value head."""
    layer: int = 0
    """Elements of a hidden layer for each pair, of which no more than ``additive.BLOCK`` are held at a time."""


class Score(Protocol):
    """s(q, k) for every query and key."""

    two_widths: bool
    """Queries and keys may differ in width."""

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return the learned tensors by name."""

    def scores(self, q: Tensor, k: Tensor, learned: Tensors) -> Tensor:
        """From q ``[B, H, Q, D]`` and k ``[B, Hkv, K, D]`` to ``[B, H, Q, K]``."""

    def cost(self, widths: Widths) -> ScoreCost:
        """Return the cost at these widths."""


SCORES = Registry[Score]("score")


class Product:
    """A score s(q, k) = f · q'·k', where q' depends on the query alone and k' on the key alone."""

    two_widths = False
    plain = False
    """True if q' = q and k' = k. Otherwise a half type would round q' and k'."""
    bilinear = False
    """True if q' is linear in q, and k' in k."""

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """None."""
        return {}

    def factors(self, q: Tensor, k: Tensor, learned: Tensors) -> tuple[Tensor, Tensor, float]:
        """Return q' ``[B, H, Q, W]``, k' ``[B, Hkv, K, W]`` and the number f."""
        return q, k, 1.0

    def scores(self, q: Tensor, k: Tensor, learned: Tensors) -> Tensor:
        """Return (Q · f) Kᵀ. Scaling the queries is D/K of the work of scaling the scores."""
        q, k, factor = self.factors(q, k, learned)
        # A product of several sequences copies keys that are not contiguous, and transposed ones slowly.
        k = k.contiguous() if len(k) > 1 else k
        return product(q if factor == 1 else q * factor, k.mT)
