"""What a score is, and what those have in common that are products."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attention_service.core import steps
from attention_service.core.groups import product
from attention_service.core.registry import Registry
from attention_service.core.tape import Sketch, Tape
from attention_service.core.types import Learned, Widths

Tensors = Mapping[str, Tensor]


Sketches = Mapping[str, Sketch]


@dataclass(frozen=True)
class ScoreCost:
    """What a score costs, by what it is done for. Products are matrix products."""

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
    """Whether keys are treated once for each query head and not once for each key/value head."""
    query_width: int = 0
    """Elements made for each query, in place of the query; 0 where the query serves as it is."""
    key_width: int = 0
    """Elements made for each key, in place of the key; 0 where the key serves as it is."""
    scaled: bool = False
    """Whether what the query has become is multiplied by a number besides."""
    query_kept: int = 0
    """Elements for each query that autograd keeps besides."""
    key_kept: int = 0
    key_back: int = 0
    """Tensors as large as that, on the way back through what is made of the keys."""
    layer: int = 0
    """Elements of a hidden layer for each pair, of which no more than ``additive.BLOCK`` are held at a time."""
    layers: int = 0
    """How many tensors of that size are held at a time."""
    backward_layers: int = 0


class Score(Protocol):
    """s(q, k) for every query and key."""

    two_widths: bool
    """Queries and keys may differ in width."""

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Its learned tensors by name."""

    def scores(self, q: Tensor, k: Tensor, learned: Tensors) -> Tensor:
        """From q ``[B, H, Q, D]`` and k ``[B, Hkv, K, D]`` to ``[B, H, Q, K]``."""

    def cost(self, widths: Widths) -> ScoreCost:
        """What it costs at these widths."""

    def sketched(self, tape: Tape, q: Sketch, k: Sketch, learned: Sketches) -> Sketch:
        """``scores``, step by step."""


SCORES = Registry[Score]("score")


class Product:
    """A score that is a scaled dot product of tensors made of the queries and of tensors made of the keys."""

    two_widths = False
    plain = False
    """Whether q' and k' are the queries and keys as they are; else a half type would round what is made of them."""

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """None."""
        return {}

    def factors(self, q: Tensor, k: Tensor, learned: Tensors) -> tuple[Tensor, Tensor, float]:
        """Tensors q' ``[B, H, Q, W]`` and k' ``[B, Hkv, K, W]`` and a number f, such that s(q, k) = f · q'·k'."""
        return q, k, 1.0

    def scores(self, q: Tensor, k: Tensor, learned: Tensors) -> Tensor:
        """(Q · f) Kᵀ, since scaling the queries is D/K of the work of scaling the scores."""
        q, k, factor = self.factors(q, k, learned)
        return product(q if factor == 1 else q * factor, k.mT)

    def sketched_factors(self, tape: Tape, q: Sketch, k: Sketch, learned: Sketches) -> tuple[Sketch, Sketch, float]:
        """``factors``, step by step."""
        return q, k, 1.0

    def sketched(self, tape: Tape, q: Sketch, k: Sketch, learned: Sketches) -> Sketch:
        """Scaled, and multiplied."""
        q, k, factor = self.sketched_factors(tape, q, k, learned)
        return steps.product(tape, q if factor == 1 else steps.scale(tape, q), k, turned=True)
