"""Normalizers by exponentials: softmax and sigmoid."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from attention_contract import spec
from attention_service.core.normalizers.base import (
    NORMALIZERS,
    NOTHING,
    PairCost,
    Plain,
    tempered_scores,
)
from attention_service.core.problem import Learned, Widths


@NORMALIZERS.register(
    spec.Softmax,
    formula="w_j = exp(s_j/T) / (Σ_k exp(s_k/T) + exp(sink/T)), T = temperature, the sink only with sinks = true",
    gradient="∂s_j = w_j (∂w_j − Σ_k w_k ∂w_k)/T, ∂sink = −w_sink Σ_k w_k ∂w_k / T",
    cost="O(n²)",
    source="Vaswani et al. 2017, eq. 1; temperature: Hinton et al. 2015, eq. 1; sinks: Agarwal et al. 2025, 2.2",
)
@dataclass(frozen=True)
class Softmax(Plain):
    """Softmax of s / T over the keys."""

    options: spec.Softmax

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return the sinks, one score per head, if the spec uses them."""
        return {"sinks": Learned((widths.heads,), fill=0.0)} if self.options.sinks else {}

    def weights(
        self, masked_scores: Tensor, lengths: Tensor | None = None, learned: Mapping[str, Tensor] = NOTHING
    ) -> Tensor:
        """Return exp(s/T − lse)."""
        if self.options.sinks:
            return self._with_sinks(masked_scores, learned).softmax(-1)[..., :-1]
        dtype = self.runs_in(masked_scores.dtype)
        weights: Tensor = _SeeingSoftmax.apply(tempered_scores(masked_scores, self.options.temperature, dtype))  # type: ignore[no-untyped-call]
        return weights

    def log_weights(self, masked_scores: Tensor) -> Tensor:
        """Return s/T − lse without sinks; −∞ for a query that may look nowhere."""
        x = tempered_scores(masked_scores, self.options.temperature, self.runs_in(masked_scores.dtype))
        logs: Tensor = x.log_softmax(-1)
        if x.is_cuda or bool(logs[..., :1].isnan().any()):  # a GPU is not waited for
            logs.masked_fill_(_blind(x), -torch.inf)
        return logs

    def lse(self, masked_scores: Tensor, learned: Mapping[str, Tensor] = NOTHING) -> Tensor:
        """Return log Σ exp(s/T), including a sink; −∞ for a query that may look nowhere."""
        if self.options.sinks:
            return self._with_sinks(masked_scores, learned).logsumexp(-1)
        tempered = tempered_scores(masked_scores, self.options.temperature, self.runs_in(masked_scores.dtype))
        blind = _blind(tempered)
        return tempered.masked_fill(blind, 0).logsumexp(-1).masked_fill(blind.squeeze(-1), -torch.inf)

    def cost(self, keys: int) -> PairCost:
        """Count forward: maximum, subtract, exp, sum, divide. Backward: w·∂w, its sum, subtract, multiply by w."""
        return PairCost(5, 4)

    def _with_sinks(self, masked_scores: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        """Append the sink of each head to s/T, so that every row has a finite score."""
        dtype = self.runs_in(masked_scores.dtype)
        x = tempered_scores(masked_scores, self.options.temperature, dtype)
        sinks = tempered_scores(learned["sinks"].to(masked_scores.dtype), self.options.temperature, dtype)
        sinks = sinks.clamp(min=torch.finfo(dtype).min).view(1, -1, 1, 1)
        return torch.cat([x, sinks.expand(*x.shape[:3], 1)], -1)


class _SeeingSoftmax(Function):
    """Softmax with zeros for a row of −∞, which is 0/0, and with zeros for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        weights = x.softmax(-1)
        if x.is_cuda or not bool(weights[..., :1].isfinite().all()):  # a GPU is not waited for
            weights.masked_fill_(_blind(x), 0)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        gradient: Tensor = torch.ops.aten._softmax_backward_data(upstream, weights, -1, weights.dtype)
        return gradient


def _blind(x: Tensor) -> Tensor:
    """Return a mask ``[..., 1]`` of the rows of queries that may look nowhere."""
    if not x.shape[-1]:
        return torch.ones((*x.shape[:-1], 1), dtype=torch.bool, device=x.device)
    return x.detach().amax(-1, keepdim=True) == -torch.inf


@NORMALIZERS.register(
    spec.Sigmoid,
    formula="w_j = 1 / (1 + exp(−s_j/T − b)), b = −ln n by default, T = temperature",
    gradient="∂s_j = w_j (1 − w_j) ∂w_j / T",
    cost="O(n²)",
    source="Ramapuram et al. 2024, section 3",
)
@dataclass(frozen=True)
class Sigmoid(Plain):
    """Sigmoid of s / T + b per key. A masked key has score −∞, so its weight and gradient are exactly 0."""

    options: spec.Sigmoid

    def weights(
        self, masked_scores: Tensor, lengths: Tensor | None = None, learned: Mapping[str, Tensor] = NOTHING
    ) -> Tensor:
        """Return σ(s/T + b)."""
        x = tempered_scores(masked_scores, self.options.temperature, self.runs_in(masked_scores.dtype))
        x = x + self._bias(x, lengths)
        return x.sigmoid()

    def cost(self, keys: int) -> PairCost:
        """Count forward: add the bias, exp, add 1, divide. Backward: 1 − w, times w, times ∂w."""
        return PairCost(4, 3)

    def _bias(self, x: Tensor, lengths: Tensor | None) -> Tensor | float:
        """Return one number, or ``[B, 1, 1, 1]`` if lengths differ; a sequence without keys has length 1."""
        if self.options.bias is not None:
            return self.options.bias
        if lengths is None:
            return -log(max(x.shape[-1], 1))
        # Computed in float64: a half type does not represent every length.
        return lengths.clamp(min=1).double().log().neg().to(x.dtype)[:, None, None, None]
