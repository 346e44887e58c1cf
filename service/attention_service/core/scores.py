"""Scores: how well a query and a key agree."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core import steps
from attention_service.core.additive import additive_scores, sketched_sums
from attention_service.core.groups import one_for_each_query_head, product
from attention_service.core.registry import Registry
from attention_service.core.tape import BOOL, Sketch, Tape
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
    reads: bool = True
    """Whether autograd keeps queries and keys as they come, for what the score makes of them."""
    layer: int = 0
    """Elements of a hidden layer for each pair, of which no more than ``additive.BLOCK`` are held at a time."""
    layers: int = 0
    """How many tensors of that size are held at a time."""
    backward_layers: int = 0


class Score(Protocol):
    """s(q, k) for every query and key."""

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Its learned tensors by name."""

    def scores(self, q: Tensor, k: Tensor, learned: Tensors) -> Tensor:
        """From q ``[B, H, Q, D]`` and k ``[B, Hkv, K, D]`` to ``[B, H, Q, K]``."""

    def cost(self, widths: Widths) -> ScoreCost:
        """What it costs at these widths."""

    def sketched(self, tape: Tape, q: Sketch, k: Sketch, learned: Sketches) -> Sketch:
        """``scores``, step by step."""


SCORES = Registry[Score]("score")
SMALLEST_SIGMA = 1e-6
"""A learned bandwidth is taken for this where it is smaller, as one that is given may not be smaller."""


class Product:
    """A score that is a scaled dot product of tensors made of the queries and of tensors made of the keys."""

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


@SCORES.register(
    spec.Dot,
    formula="q·k",
    gradient="∂q_i = Σ_j ∂s_ij k_j, ∂k_j = Σ_i ∂s_ij q_i",
    cost="O(n²·d)",
    source="Luong et al. 2015, eq. 8",
)
@dataclass(frozen=True)
class Dot(Product):
    """s = q·k."""

    options: spec.Dot
    plain = True

    def cost(self, widths: Widths) -> ScoreCost:
        """The product."""
        return ScoreCost(pair_products=2 * widths.head_dim)


@SCORES.register(
    spec.ScaledDot,
    formula="q·k · scale, scale = 1/√d by default",
    gradient="∂q_i = scale · Σ_j ∂s_ij k_j, ∂k_j = scale · Σ_i ∂s_ij q_i",
    cost="O(n²·d)",
    source="Vaswani et al. 2017, eq. 1",
)
@dataclass(frozen=True)
class ScaledDot(Product):
    """s = q·k · scale."""

    options: spec.ScaledDot
    plain = True

    def factors(self, q: Tensor, k: Tensor, learned: Tensors) -> tuple[Tensor, Tensor, float]:
        """The scale asked for, or 1/√D."""
        return q, k, self._scale(q.shape[-1])

    def sketched_factors(self, tape: Tape, q: Sketch, k: Sketch, learned: Sketches) -> tuple[Sketch, Sketch, float]:
        """The scale alone."""
        return q, k, self._scale(int(q.dims[-1]))

    def _scale(self, width: int) -> float:
        return float(width**-0.5) if self.options.scale is None else self.options.scale

    def cost(self, widths: Widths) -> ScoreCost:
        """The product, and the scale for each pair, as the formula has it."""
        scale = int(self.options.scale != 1)
        return ScoreCost(2 * widths.head_dim, scale, pair_backward_flops=scale, scaled=scale > 0)


@SCORES.register(
    spec.Bilinear,
    formula="qᵀ W k, W for each head",
    gradient="∂q_i = Σ_j ∂s_ij W k_j, ∂k_j = Σ_i ∂s_ij Wᵀ q_i, ∂W = Σ_ij ∂s_ij q_i k_jᵀ",
    cost="O(n²·d + n·d²)",
    source="Luong et al. 2015, eq. 8 (general)",
)
@dataclass(frozen=True)
class Bilinear(Product):
    """s = qᵀ W k."""

    options: spec.Bilinear

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """W."""
        return {"score.weight": Learned((widths.heads, widths.head_dim, widths.head_dim))}

    def factors(self, q: Tensor, k: Tensor, learned: Tensors) -> tuple[Tensor, Tensor, float]:
        """Wᵀq and k."""
        return q @ learned["score.weight"].to(q.dtype), k, 1.0

    def sketched_factors(self, tape: Tape, q: Sketch, k: Sketch, learned: Sketches) -> tuple[Sketch, Sketch, float]:
        """The queries through W."""
        weight = steps.cast(tape, learned["score.weight"], q.itemsize)
        return steps.by_weight(tape, q, weight, q.dims), k, 1.0

    def cost(self, widths: Widths) -> ScoreCost:
        """The queries through W, and the product."""
        d = widths.head_dim
        return ScoreCost(2 * d, query_products=2 * d * d, query_width=d)


@SCORES.register(
    spec.Additive,
    formula="vᵀ tanh(W₁ q + W₂ k), W₁, W₂ and v for each head",
    gradient="t = tanh(W₁ q_i + W₂ k_j), g = ∂s_ij v ⊙ (1 − t²): ∂v = Σ ∂s_ij t, "
    "∂W₁ = Σ g q_iᵀ, ∂W₂ = Σ g k_jᵀ, ∂q_i = W₁ᵀ Σ_j g, ∂k_j = W₂ᵀ Σ_i g",
    cost="O(n²·hidden + n·hidden·d)",
    source="Bahdanau et al. 2015, appendix A.1.2",
)
@dataclass(frozen=True)
class Additive:
    """s = vᵀ tanh(W₁ q + W₂ k)."""

    options: spec.Additive

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """W₁, W₂ and v."""
        heads, hidden = widths.heads, self._hidden(widths.head_dim)
        return {
            "score.query_weight": Learned((heads, hidden, widths.head_dim)),
            "score.key_weight": Learned((heads, hidden, widths.head_dim)),
            "score.v": Learned((heads, hidden)),
        }

    def scores(self, q: Tensor, k: Tensor, learned: Tensors) -> Tensor:
        """Block by block, so that what stands between is never held whole."""
        into, of_keys, v = (learned[f"score.{name}"].to(q.dtype) for name in ("query_weight", "key_weight", "v"))
        return additive_scores(q @ into.mT, one_for_each_query_head(k, q.shape[1]) @ of_keys.mT, v)

    def sketched(self, tape: Tape, q: Sketch, k: Sketch, learned: Sketches) -> Sketch:
        """Both through their weights, then the sums over the hidden layer."""
        names = ("query_weight", "key_weight", "v")
        into, of_keys, v = (steps.cast(tape, learned[f"score.{name}"], q.itemsize) for name in names)
        hidden = into.dims[1]
        a = steps.by_weight(tape, q, into, (*q.dims[:3], hidden))
        k = steps.for_each_head(tape, k, q.dims[1])
        return sketched_sums(tape, a, steps.by_weight(tape, k, of_keys, (*k.dims[:3], hidden)), v)

    def cost(self, widths: Widths) -> ScoreCost:
        """For each pair: add and tanh, and the product with v.

        Backward: add and tanh again; 1 − t², times v, times ∂s, and its sums over keys and over queries; and the
        product that gives ∂v.
        """
        d, hidden = widths.head_dim, self._hidden(widths.head_dim)
        return ScoreCost(
            pair_products=2 * hidden,
            pair_flops=2 * hidden,
            pair_backward_products=2 * hidden,
            pair_backward_flops=8 * hidden,
            query_products=2 * hidden * d,
            key_products=2 * hidden * d,
            by_query_head=True,
            query_width=hidden,
            key_width=hidden,
            key_kept=d * (widths.heads // widths.kv_heads),
            layer=hidden,
            layers=3,
            backward_layers=4,
        )

    def _hidden(self, head_dim: int) -> int:
        return self.options.hidden or head_dim


@SCORES.register(
    spec.Gaussian,
    formula="−‖q − k‖² / 2σ²",
    gradient="∂q_i = Σ_j ∂s_ij (k_j − q_i)/σ², ∂k_j = Σ_i ∂s_ij (q_i − k_j)/σ², ∂σ = Σ_ij ∂s_ij ‖q_i − k_j‖²/σ³",
    cost="O(n²·d)",
    source="Nadaraya 1964; Watson 1964 (with a softmax, their estimator with a Gaussian kernel)",
)
@dataclass(frozen=True)
class Gaussian(Product):
    """s = −‖q − k‖² / 2σ²."""

    options: spec.Gaussian

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """σ, where it is learned."""
        return {"score.sigma": Learned((widths.heads,), fill=1.0)} if self.options.sigma == "learned" else {}

    def factors(self, q: Tensor, k: Tensor, learned: Tensors) -> tuple[Tensor, Tensor, float]:
        """From (q, −‖q‖²/2, 1)/σ² and (k, 1, −‖k‖²/2), once both are moved so that the keys lie around zero.

        No distance changes by that, and less is lost where points are close together and far from zero.
        """
        centre = k.detach().nan_to_num(0, 0, 0).mean(2, keepdim=True) if k.shape[2] else 0
        around = one_for_each_query_head(centre, q.shape[1]) if isinstance(centre, Tensor) else centre
        q, k = q - around, k - centre
        q = torch.cat([q, _half_square(q), torch.ones_like(q[..., :1])], -1)
        k = torch.cat([k, torch.ones_like(k[..., :1]), _half_square(k)], -1)
        if self.options.sigma != "learned":
            return q, k, self.options.sigma**-2
        sigma = learned["score.sigma"].to(q.dtype).abs().clamp(min=SMALLEST_SIGMA)
        return q * sigma.view(-1, 1, 1) ** -2, k, 1.0

    def sketched_factors(self, tape: Tape, q: Sketch, k: Sketch, learned: Sketches) -> tuple[Sketch, Sketch, float]:
        """Moved, squared, summed and put side by side; σ on the queries where it is learned."""
        finite = steps.plain(tape, steps.like(k, tracked=False))
        centre = steps.reduced(tape, finite, (*k.dims[:2], 1, k.dims[3]))
        around = steps.for_each_head(tape, centre, q.dims[1])
        q, k = steps.add(tape, q, around, minus=True), steps.add(tape, k, centre, minus=True)
        q = steps.cat(tape, [q, _half_square_sketched(tape, q), _ones(tape, q)], 3)
        k = steps.cat(tape, [k, _ones(tape, k), _half_square_sketched(tape, k)], 3)
        if self.options.sigma != "learned":
            return q, k, self.options.sigma**-2
        sigma = steps.cast(tape, learned["score.sigma"], q.itemsize)
        factor = steps.view(tape, _inverse_square(tape, sigma), (sigma.dims[0], 1, 1))
        return steps.multiply(tape, q, factor), k, 1.0

    def cost(self, widths: Widths) -> ScoreCost:
        """The product of D + 2 columns, and σ; for a query 4·D, for a key 5·D: moved, squared, summed, (averaged)."""
        d, learned = widths.head_dim, self.options.sigma == "learned"
        return ScoreCost(
            2 * (d + 2), 1, pair_backward_flops=1, query_flops=4 * d, key_flops=5 * d,
            query_width=d + 2, key_width=d + 2, scaled=not learned and self.options.sigma != 1,
            query_kept=d + (d + 2) * learned, key_kept=d, key_back=3, reads=False,
        )  # fmt: skip


@SCORES.register(
    spec.Cosine,
    formula="q·k / (‖q‖ ‖k‖) · scale, 0 for a zero vector",
    gradient="u = q/‖q‖, w = k/‖k‖: ∂q_i = Σ_j ∂s_ij scale (w_j − (u_i·w_j) u_i)/‖q_i‖, ∂k_j alike, "
    "∂scale = Σ_ij ∂s_ij u_i·w_j",
    cost="O(n²·d)",
    source="Graves et al. 2014, eq. 6; a learned scale for each head: Liu et al. 2022, section 3.2",
)
@dataclass(frozen=True)
class Cosine(Product):
    """s = q·k / (‖q‖ ‖k‖) · scale."""

    options: spec.Cosine

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """The scale, where it is learned."""
        return {"score.scale": Learned((widths.heads,), fill=1.0)} if self.options.scale == "learned" else {}

    def factors(self, q: Tensor, k: Tensor, learned: Tensors) -> tuple[Tensor, Tensor, float]:
        """Both at length 1."""
        q, k = _unit(q), _unit(k)
        if self.options.scale != "learned":
            return q, k, self.options.scale
        return q * learned["score.scale"].to(q.dtype).view(-1, 1, 1), k, 1.0

    def sketched_factors(self, tape: Tape, q: Sketch, k: Sketch, learned: Sketches) -> tuple[Sketch, Sketch, float]:
        """Both at length 1, and the scale on the queries where it is learned."""
        q, k = _unit_sketched(tape, q), _unit_sketched(tape, k)
        if self.options.scale != "learned":
            return q, k, self.options.scale
        scale = steps.cast(tape, learned["score.scale"], q.itemsize)
        return steps.multiply(tape, q, steps.view(tape, scale, (scale.dims[0], 1, 1))), k, 1.0

    def cost(self, widths: Widths) -> ScoreCost:
        """The product and the scale; for a query or a key 3·D: squared, summed, divided."""
        d, scaled, learned = widths.head_dim, int(self.options.scale != 1), self.options.scale == "learned"
        return ScoreCost(
            2 * d, 1, pair_backward_flops=1, query_flops=3 * d, key_flops=3 * d,
            query_width=d, key_width=d, scaled=scaled > 0 and not learned,
            query_kept=d * (1 + learned), key_kept=d, key_back=2,
        )  # fmt: skip


def _half_square(x: Tensor) -> Tensor:
    """``[..., W]`` to ``[..., 1]``: −‖x‖²/2."""
    half: Tensor = x.square().sum(-1, keepdim=True) * -0.5
    return half


def _half_square_sketched(tape: Tape, x: Sketch) -> Sketch:
    return steps.scale(tape, steps.total(tape, steps.square(tape, x), (*x.dims[:3], 1)))


def _ones(tape: Tape, x: Sketch) -> Sketch:
    return steps.filled(tape, (*x.dims[:3], 1), x.itemsize)


def _inverse_square(tape: Tape, sigma: Sketch) -> Sketch:
    """|σ|, kept from being too small, to the power −2; each undone by two or three operations on the way back."""
    y = steps.like(sigma)
    tape.does(3 * sigma.bytes, 3 * sigma.bytes, 0, 3)

    def step() -> None:
        n = sigma.bytes
        tape.does(n, n)  # σ⁻³
        tape.does(n, n)
        tape.does(2 * n, n)
        tape.does(0, sigma.itemsize)  # not where it was kept from being smaller
        tape.does(n, sigma.size * BOOL)
        tape.does(n + sigma.size * BOOL + sigma.itemsize, n)
        tape.does(n, n)  # its sign
        tape.does(2 * n, n)
        tape.give(sigma, sigma.size)

    return tape.later(y, step) if y.tracked else y


def _unit_sketched(tape: Tape, x: Sketch) -> Sketch:
    """``_unit``: the length found, the zeros, the length again without them, its inverse, the product."""
    dims = (*x.dims[:3], 1)
    one = steps.reduced(tape, steps.like(x, tracked=False), dims, functions=1)
    zero = steps.plain(tape, one, itemsize=BOOL)
    filled = steps.hide(tape, x, zero)
    inverse = Sketch(dims, x.itemsize, tracked=x.tracked)
    tape.does(x.bytes, one.bytes, one.size)
    tape.does(2 * one.bytes, 2 * one.bytes, 0, 2)

    def step() -> None:
        n, mask = one.bytes, zero.bytes
        tape.does(n, n)  # the product by 1, and −∂·(1/length)²
        tape.does(n, n)
        tape.does(n, n)
        tape.does(2 * n, n)
        tape.does(x.bytes + n, x.bytes)  # x / length, zero where that is
        tape.does(n, mask)
        tape.does(x.bytes + mask, x.bytes)
        tape.does(n + x.bytes, x.bytes)
        tape.give(filled, x.size, x.lies)

    if inverse.tracked:
        tape.later(inverse, step)
    return steps.multiply(tape, x, steps.hide(tape, inverse, zero))


def _unit(x: Tensor) -> Tensor:
    """x/‖x‖; zero, with a gradient of zero, where x is."""
    zero = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True) == 0
    # Filled before the length is found: its second derivative at zero is NaN.
    length = torch.linalg.vector_norm(x.masked_fill(zero, 1), dim=-1, keepdim=True)
    inverse: Tensor = (1 / length).masked_fill(zero, 0)
    return x * inverse
