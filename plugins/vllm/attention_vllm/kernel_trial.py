"""Comparison of the attention that vLLM's kernel computed with that of the core, from the same pages."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_service.core.stages import stages
from attention_vllm.layer_facts import LayerFacts

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""The largest difference, relative to the largest number of the context."""


def departure(facts: LayerFacts, q: Tensor, k: Tensor, v: Tensor, output: Tensor, first: int) -> str | None:
    """Return how weights · V departs from the kernel's output ``[Q, H, D]``, if by more than rounding.

    ``q [H, Q, D]``, ``k`` and ``v`` ``[Hkv, K, D]``; ``first``: the position of the first query.
    """
    problem = facts.problem(q[None], k[None], v[None], torch.tensor([first], device=q.device))
    context = dict(stages(problem, ("context",)))["context"]
    return departures(context, output.transpose(0, 1)[None])[0]


def departures(contexts: Tensor, outputs: Tensor) -> list[str | None]:
    """Return how each of N contexts ``[N, H, Q, D]`` departs from the kernel's output, if by more than rounding."""
    largest = outputs.float().abs().amax((1, 2, 3)).tolist()
    differences = (contexts - outputs).abs().amax((1, 2, 3)).tolist()
    tolerance = TOLERANCE.get(outputs.dtype, 0.0)
    return [
        None  # NaN departs
        if difference <= tolerance * size
        else f"weights times values depart from the kernel's output by {difference:.2g}, of numbers up to {size:.2g}"
        for difference, size in zip(differences, largest, strict=True)
    ]


@dataclass(eq=False)
class KernelTrial:
    """The passes of the self-test at start."""

    names: frozenset[str]
    """The requests that it makes."""
    compared: dict[int, int] = field(default_factory=dict)
    """The queries that were compared, by layer."""
    fault: str | None = None
    """The first departure."""

    def compare(
        self, layer: int, facts: LayerFacts, q: Tensor, k: Tensor, v: Tensor, output: Tensor, first: int
    ) -> None:
        """Compare all queries of a row, as ``departure`` does."""
        difference = departure(facts, q, k, v, output, first)
        self.compared[layer] = self.compared.get(layer, 0) + q.shape[1]
        if difference is not None and self.fault is None:
            self.fault = f"layer {layer}: {difference}"

    def verdict(self, layers: frozenset[int], queries: int) -> str | None:
        """Return the reason to refuse asks; None if all ``queries`` of all layers agree."""
        if self.fault is not None:
            return self.fault
        missing = sorted(layer for layer in layers if self.compared.get(layer, 0) != queries)
        if missing or not layers:
            return f"the attention of layers {missing} was not seen: another backend computes it"
        return None
