"""Circuits of heads: products of a module's projections, decomposed from their thin factors.

A circuit W = A Bᵀ has the rank of a head, so a d_model × d_model matrix is never formed. All is computed in float64.

Notation for shapes: d width of the model, n width of the other side, R width of a head, k = min(d, n, R).
Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec
from attention_service.core.multihead import Parameters, Sizes
from attention_service.core.scores import SCORES, Product
from attention_service.core.tensors import head_read_by


class Factors(NamedTuple):
    """A matrix W = A Bᵀ."""

    left: Tensor
    """A ``[d, R]``, float64."""
    right: Tensor
    """B ``[n, R]``, float64."""

    @property
    def transposed(self) -> "Factors":
        """Wᵀ = B Aᵀ."""
        return Factors(self.right, self.left)


class Decomposition(NamedTuple):
    """A singular value decomposition W = Σ σ u vᵀ."""

    values: Tensor
    """σ ``[k]``, largest first."""
    left: Tensor | None = None
    """u ``[k, d]`` of each σ; the largest element of each is positive. None if it was not asked for."""
    right: Tensor | None = None
    """v ``[k, n]``."""


def has_qk(spec: AttentionSpec) -> bool:
    """True if the score of two tokens is bilinear in them, so that W_QK exists."""
    score = SCORES.of(spec.score)
    return isinstance(score, Product) and score.bilinear


def qk_factors(parameters: Parameters, sizes: Sizes, head: int) -> Factors:
    """W_QK of a query head, ``[d_model, key_width]``: xᵀ W_QK y is the score of x and y without biases and positions.

    The factor of the score is part of it. Raises ValueError if ``has_qk`` is false.
    """
    score = SCORES.of(sizes.spec.score)
    if not isinstance(score, Product):
        raise ValueError(f"the score {sizes.spec.score.name} is not bilinear")
    read = head_read_by(head, sizes.heads, sizes.kv_heads)
    query, key = (
        _rows(parameters[f"{role}_proj.weight"], projected_head, sizes.head_dim).mT
        for role, projected_head in (("q", head), ("k", read))
    )
    learned = {name: parameters[name][head : head + 1] for name in score.learned(sizes.widths)}
    # The projections of the unit vectors, as queries and keys of one head.
    left, right, factor = score.factors(query[None, None], key[None, None], learned)
    return Factors(left[0, 0] * factor, right[0, 0])


def ov_factors(parameters: Parameters, sizes: Sizes, head: int) -> Factors:
    """W_OV of a query head, ``[d_model, value_width]``: W_OV y is what it writes of a token y, without biases."""
    read = head_read_by(head, sizes.heads, sizes.kv_heads)
    written = parameters["o_proj.weight"].narrow(1, head * sizes.value_dim, sizes.value_dim)
    return Factors(written.double(), _rows(parameters["v_proj.weight"], read, sizes.value_dim).mT)


def _rows(weight: Tensor, head: int, width: int) -> Tensor:
    return weight.narrow(0, head * width, width).double()


def decompose(factors: Factors, *, vectors: bool) -> Decomposition:
    """Decompose W from QR decompositions of its factors: W = Q (R Sᵀ) Pᵀ with A = Q R and B = P S.

    Raises OverflowError if W overflows float64.
    """
    if not vectors:
        return Decomposition(torch.linalg.svdvals(_core(factors)))
    (q, r), (p, s) = (torch.linalg.qr(factor) for factor in factors)
    u, values, v = torch.linalg.svd(_finite(r @ s.mT), full_matrices=False)
    left, right = (q @ u).mT, v @ p.mT
    largest = left.gather(1, left.abs().argmax(1, keepdim=True))  # [k, 1]
    sign = torch.where(largest < 0, -1.0, 1.0)
    return Decomposition(values, left * sign, right * sign)


def _core(factors: Factors) -> Tensor:
    """R Sᵀ, which has the singular values of W."""
    (_, r), (_, s) = (torch.linalg.qr(factor, mode="r") for factor in factors)
    return _finite(r @ s.mT)


def _finite(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise OverflowError("a product of parameters overflows float64")
    return x


def spectrum(parameter: Tensor) -> Tensor:
    """Singular values ``[..., k]`` of a parameter of any shape; one of a vector is its norm."""
    matrices = parameter.double() if parameter.ndim > 1 else parameter.double()[None]
    values: Tensor = torch.linalg.svdvals(matrices)
    return values


def norm(values: Tensor) -> Tensor:
    """The Frobenius norm of matrices with singular values ``[..., k]``."""
    largest = values[..., :1]
    total: Tensor = largest[..., 0] * torch.linalg.vector_norm(values / _divisor(largest), dim=-1)
    return total


def stable_rank(values: Tensor) -> Tensor:
    """Σ σ² / σ₁²; 0 of a zero matrix. Source: Rudelson & Vershynin 2007."""
    return (values / _divisor(values[..., :1])).square().sum(-1)


def effective_rank(values: Tensor) -> Tensor:
    """exp(−Σ p ln p) with p = σ / Σ σ; 0 of a zero matrix. Source: Roy & Vetterli 2007, definition 1."""
    relative = values / _divisor(values[..., :1])
    shares = relative / _divisor(relative.sum(-1, keepdim=True))
    rank: Tensor = torch.special.entr(shares).sum(-1).exp() * (values[..., 0] > 0)
    return rank


def _divisor(x: Tensor) -> Tensor:
    """The tensor with 1 in place of 0."""
    return x.masked_fill(x == 0, 1)


def copying(factors: Factors) -> Tensor:
    """Σ λ / Σ |λ| over the eigenvalues of a square W, which are those of Bᵀ A and zeros; 0 of a zero matrix.

    Source: Elhage et al. 2021, "Summarizing OV/QK matrices".
    """
    # On the host: not every build of CUDA has this decomposition.
    values = torch.linalg.eigvals((factors.right.mT @ factors.left).cpu())
    share: Tensor = values.real.sum() / _divisor(values.abs().sum())
    return share.to(factors.left.device)


class Writers:
    """The W_OV of several heads, which later heads read."""

    def __init__(self, heads: Sequence[Factors]) -> None:
        self._left = torch.cat([factors.left for factors in heads], 1)  # [d, H·V]
        roots = torch.stack([torch.linalg.qr(factors.right, mode="r")[1] for factors in heads])
        self._right = roots.mT  # [H, V, k]
        self._norms = torch.stack([norm(torch.linalg.svdvals(_core(factors))) for factors in heads])

    def composition(self, reader: Factors) -> Tensor:
        """‖W W_OV‖ / (‖W‖ ‖W_OV‖) in Frobenius norms with each of the heads, ``[H]``; 0 if one of them is zero.

        Raises OverflowError if a product overflows float64.
        """
        heads, width, _ = self._right.shape
        between = reader.right.mT @ self._left  # [R, H·V]
        between = between.view(-1, heads, width).transpose(0, 1)  # [H, R, V]
        _, root = torch.linalg.qr(reader.left, mode="r")
        products = _finite(torch.linalg.matrix_norm(root @ between @ self._right))
        scores: Tensor = products / _divisor(self._norms) / _divisor(norm(torch.linalg.svdvals(_core(reader))))
        return scores
