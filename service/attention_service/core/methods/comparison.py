"""Distance of an approximation from exact attention over the same inputs, computed in blocks of queries."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_contract.spec import Exact
from attention_service.core.blocks import blocks
from attention_service.core.cancellation import checkpoint
from attention_service.core.masks.visibility import EVERYTHING, without_padding
from attention_service.core.methods import Approximation
from attention_service.core.problem import Problem, RunningInputs, Selection
from attention_service.core.stages import stages


@dataclass(frozen=True)
class MethodComparison:
    """Exact attention beside an approximation."""

    context: Tensor
    """``[B, H, Q, V]``, exact."""
    mean_kl: float | None
    """Mean over all queries of KL(exact || approximate) in nats; None if the method has no weights that are a
    distribution. A query without an allowed key is not counted; NaN if there is no other."""


def compare(problem: Problem, method: Approximation) -> MethodComparison:
    """Compute the exact context, and the divergence of the weights if the approximation implies a distribution."""
    exact, clean = exactly(problem), without_padding(problem)
    contexts: list[Tensor] = []
    divergences: list[Tensor] = []
    for block in blocks(problem, EVERYTHING):
        checkpoint()
        context, lost = compare_block(exact, clean, method, block)
        contexts.append(context)
        divergences.extend(lost)
    if not divergences:
        return MethodComparison(torch.cat(contexts, 2), None)
    return MethodComparison(torch.cat(contexts, 2), float(torch.cat(divergences).mean()))


def exactly(problem: Problem) -> Problem:
    """Return the problem with the exact method."""
    return replace(problem, spec=problem.spec.model_copy(update={"method": Exact()}), recurrent=RunningInputs())


def compare_block(
    exact: Problem, clean: Problem, method: Approximation, block: Selection
) -> tuple[Tensor, list[Tensor]]:
    """Return the exact context of some queries, and the divergences of each sequence if there are any.

    ``clean``: the approximated problem, without padding.
    """
    rows = range(clean.q.shape[2]) if block.queries is None else block.queries
    tapped = dict(stages(exact, ("weights", "context"), selection=block))
    implied = method.implied(clean, rows)
    lost = [] if implied is None else [*_divergence(tapped["weights"], implied)]
    return tapped["context"], lost


def _divergence(exact: Tensor, implied: Tensor) -> Iterator[Tensor]:
    """Σ_j p_j ln(p_j / p̂_j) for each query that looks somewhere, in float64; +∞ where p̂_j = 0 < p_j."""
    for p, approximate in zip(exact.double(), implied.double(), strict=True):  # one sequence at a time
        terms = torch.xlogy(p, p) - torch.xlogy(p, approximate)  # [H, Q, K]
        yield terms.sum(-1)[(p > 0).any(-1)]
