"""Linformer: softmax attention over a fixed number of projected keys."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core.kernels.extent import Extent
from attention_service.core.methods.approximation import (
    Approximation,
    no_masks,
    no_softmax,
    nothing_between,
    scored,
)
from attention_service.core.methods.base import METHODS, MethodCost, MethodFlops, Refusal
from attention_service.core.problem import Learned, Problem, Widths
from attention_service.core.tensors import product


@METHODS.register(
    spec.Linformer,
    formula="o = softmax(Q (E K)ᵀ · scale) (F V), E and F of rank × length, learned",
    gradient="as softmax over the projected keys; ∂E = Σ ∂(E K) Kᵀ, ∂F = Σ ∂(F V) Vᵀ",
    cost="O(n·r·d), r rank",
    source="Wang et al. 2020, eq. 7",
)
@dataclass(frozen=True)
class Linformer(Approximation):
    """Keys and values mixed along the sequence before any query meets them."""

    options: spec.Linformer

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return one matrix for keys and one for values, of all heads."""
        matrix = Learned((self.options.rank, self.options.length), heads=None)
        names = ("key_projection",) if self.options.shared else ("key_projection", "value_projection")
        return {f"method.{name}": matrix for name in names}

    def refuses(self, spec: spec.AttentionSpec) -> Iterator[Refusal]:
        """Yield masks, and every option that is not a softmax over dot products."""
        yield from no_softmax(spec)
        yield from no_masks(spec)
        yield from nothing_between(spec)

    def cost(self, extent: Extent) -> MethodCost:
        """Count two mixing products and two as in exact attention with r keys; scale 1, softmax 5 and 4 backward."""
        x, rank = extent, self.options.rank
        mixing, pairs = x.batch * x.kv_heads * rank * x.keys, x.batch * x.heads * x.queries * rank
        scores, values = 2 * (mixing + pairs) * x.head_dim, 2 * (mixing + pairs) * x.value_dim
        return MethodCost(
            MethodFlops(scores, values, pairs * 6),
            MethodFlops(2 * scores, 2 * values, pairs * 5),
        )

    def letters(self) -> Mapping[str, str]:
        """R projected keys."""
        return {"r": "rank"}

    def orders(self) -> tuple[str, str]:
        """With the keys, and of what stands between."""
        return "n·r·d", "n·r"

    def _context(self, problem: Problem) -> dict[str, Tensor]:
        q, k, factor = scored(problem)
        dtype = torch.promote_types(q.dtype, torch.float32)
        keys = k.shape[2]
        if keys > self.options.length:
            raise ValueError(f"{keys} keys are more than the length {self.options.length}")
        e = problem.learned["method.key_projection"]
        f = e if self.options.shared else problem.learned["method.value_projection"]
        mixed_k, mixed_v = (
            w[:, :keys].to(dtype) @ x.to(dtype) for w, x in ((e, k), (f, problem.v))
        )  # [B, Hkv, rank, D] and [B, Hkv, rank, V]
        weights = product(q.to(dtype) * factor, mixed_k.mT).softmax(-1)  # [B, H, Q, rank]
        return {"context": product(weights, mixed_v).to(problem.q.dtype)}
