"""Performer: softmax attention by random features."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core.kernels.extent import Extent
from attention_service.core.masks.visibility import real_keys
from attention_service.core.methods.approximation import (
    Approximation,
    no_order,
    no_softmax,
    nothing_between,
    reach_in,
    scored,
)
from attention_service.core.methods.base import METHODS, MethodCost, Refusal
from attention_service.core.methods.features import (
    PositiveRandom,
    orthogonal_directions,
)
from attention_service.core.methods.linear import implied_by
from attention_service.core.methods.recurrence import StateRule, WrittenTokens
from attention_service.core.methods.recurrence_cost import FeatureCost, running_cost
from attention_service.core.problem import Problem
from attention_service.core.tensors import to_device


@METHODS.register(
    spec.Performer,
    formula="o_i = φ(q_i) S_i / φ(q_i)·z_i, φ(x)_f = exp(ω_f·x − |x|²/2), ω orthogonal, N(0, I) each",
    gradient="as linear, through φ; the directions ω have no gradient",
    cost="O(n·m·d), m features",
    source="Choromanski et al. 2021, lemma 1 and section 2.4",
)
@dataclass(frozen=True)
class Performer(Approximation):
    """A running state whose features' products are exp(q·k) on average."""

    options: spec.Performer

    def refuses(self, spec: spec.AttentionSpec) -> Iterator[Refusal]:
        """Yield masks other than causal, and every option that is not a softmax over dot products."""
        yield from no_softmax(spec)
        yield from no_order(spec)
        yield from nothing_between(spec)

    def implied(self, problem: Problem, rows: Sequence[int]) -> Tensor:
        """Return φ(q)·φ(k) over its sum."""
        q, k, factor = scored(problem)
        return implied_by(self._features(q, factor), replace(problem, q=q, k=k), rows)

    def cost(self, extent: Extent) -> MethodCost:
        """Return the cost by ``running_cost``: scale, projection, |x|²/2 (3 for each of D); subtract twice, exp."""
        count = self.features(extent.head_dim)
        return running_cost(extent, FeatureCost(count, 4, 4, projected=True), normalize=True)

    def letters(self) -> Mapping[str, str]:
        """M features."""
        return {"m": "features"}

    def orders(self) -> tuple[str, str]:
        """With the keys, and of what stands between."""
        return "n·m·d", "n·m"

    def features(self, width: int) -> int:
        """Return the number of features at this head width."""
        return max(1, int(width * log(width))) if self.options.features is None else self.options.features

    def _features(self, q: Tensor, factor: float) -> PositiveRandom:
        width = q.shape[3]
        drawn_on = "meta" if q.is_meta else "cpu"
        directions = orthogonal_directions(self.features(width), width, self.options.seed, drawn_on)
        root = abs(factor) ** 0.5
        dtype = torch.promote_types(q.dtype, torch.float32)
        return PositiveRandom(to_device(directions.to(dtype), q.device), -root if factor < 0 else root, root)

    def _context(self, problem: Problem) -> dict[str, Tensor]:
        q, k, factor = scored(problem)
        real = real_keys(problem)
        tokens = WrittenTokens(k, problem.v, None if real is None else real[:, None, :, None])
        context, _ = StateRule(self._features(q, factor), normalize=True).attend(q, tokens, reach_in(problem))
        return {"context": context}
