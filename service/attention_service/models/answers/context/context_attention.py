"""The attention of an answer to its sources, and the lookback ratios of its heads, layer by layer.

Notation: H heads, T tokens of the answer, L tokens of the whole text, S sources, A sentences.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from attention_service.core.problem import Selection
from attention_service.models.answers.context.context_plan import ContextPlan
from attention_service.models.passes.attention_pass import AttentionPass, LayerTask
from attention_service.runtime.scheduling.operation import Results
from attention_transformers.model_layers import LayerKey


class ContextAttention(AttentionPass):
    """A pass that sums the weights of the queries that predict an answer, and keeps none of them."""

    def __init__(self, plan: ContextPlan, chosen: Mapping[LayerKey, Collection[int]], *, lookback: bool) -> None:
        """``chosen``: the heads of each layer whose attention is kept by itself."""
        queries = tuple(at - 1 for at in plan.answers)
        places = [place for place in plan.places if place.taps is None or "weights" in place.taps]
        task = LayerTask(batched=False, taps=("weights",), selection=Selection(queries=queries))
        super().__init__({place.key: task for place in places})
        self._plan, self._chosen, self._looks_back = plan, chosen, lookback
        self._queries = torch.tensor(queries)
        self._total: Tensor | None = None
        self._heads = 0
        self.of_heads: dict[tuple[LayerKey, int], Tensor] = {}
        """``[S, A]`` of each chosen head."""
        self.lookback: dict[LayerKey, Tensor] = {}
        """``[H, A]`` of each layer."""

    @property
    def mean(self) -> Tensor:
        """``[S, A]``: the mean over all heads of all layers."""
        if self._total is None:
            return torch.zeros(len(self._plan.sources), len(self._plan.sentences))
        return self._total / self._heads

    def add(self, layer: LayerKey, results: Results) -> None:
        """Sum the weights ``[H, T, L]`` of a layer."""
        results_weights: Any = results["weights"]
        weights: Tensor = results_weights.to(torch.promote_types(results_weights.dtype, torch.float32))
        by_source = torch.stack(
            [weights[..., source.tokens.start : source.tokens.stop].sum(-1) for source in self._plan.sources]
        )
        by_sentence = self.of_all_heads(layer, self._by_sentence(by_source), 1)  # [S, H, A]
        total = by_sentence.sum(1)
        self._total = total if self._total is None else self._total + total
        self._heads += by_sentence.shape[1]
        for head in self._chosen.get(layer, ()):
            self.of_heads[layer, head] = by_sentence[:, head]
        if self._looks_back:
            self.lookback[layer] = self.of_all_heads(layer, self._by_sentence(self._ratios(weights)), 0)

    def _by_sentence(self, x: Tensor) -> Tensor:
        """The mean of ``[…, T]`` over the tokens of each sentence: ``[…, A]``."""
        return torch.stack(
            [x[..., sentence.tokens.start : sentence.tokens.stop].mean(-1) for sentence in self._plan.sentences], -1
        )

    def _ratios(self, weights: Tensor) -> Tensor:
        """The lookback ratio of each head at each token ``[H, T]``; 1 for the first, behind the prompt alone."""
        prompt, length = self._plan.answers[0], weights.shape[-1]
        queries = self._queries.to(weights.device)
        new = torch.arange(length, device=weights.device)
        is_new = (new >= prompt) & (new <= queries[:, None])  # [T, L]
        counts = is_new.sum(-1).clamp_min(1)
        of_prompt = weights[..., :prompt].mean(-1)
        of_answer = (weights * is_new).sum(-1) / counts
        total = of_prompt + of_answer
        return torch.where(total > 0, of_prompt / total, torch.zeros_like(total))
