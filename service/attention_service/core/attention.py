"""Attention over one problem: its context, any taps, and its whole differentiable graph.

Source: Vaswani et al. 2017, section 3.2.1.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec, Exact
from attention_service.core.blocks import blocks, put_together
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels import KERNELS, MATERIALIZED
from attention_service.core.kernels.base import Kernel
from attention_service.core.masks.global_projections import global_rows
from attention_service.core.masks.visibility import EVERYTHING
from attention_service.core.methods import METHODS, Approximation, approximation_of
from attention_service.core.nonfinite_keys import (
    affected_queries,
    find_nonfinite_keys,
    finite_part,
    with_nan_rows,
    without,
)
from attention_service.core.problem import Problem, Selection
from attention_service.core.stages import TAPS, narrow, stages
from attention_service.core.tensors import constant

_OVER_PAIRS = {"scores", "capped_scores", "masked_scores", "weights"}


@dataclass(eq=False, slots=True)
class Attended:
    """Result of one attention."""

    context: Tensor
    """``[B, H, Q, V]``, whole, from the kernel."""
    taps: dict[str, Tensor]
    """The requested taps, narrowed by the selection."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """``final_state`` and ``final_normalizer`` of a running state, if requested."""


def attend(
    problem: Problem,
    taps: Collection[str] = ("context",),
    selection: Selection = EVERYTHING,
    edits: Sequence[BoundEdit] = (),
    kernel: str | Kernel = "fused",
) -> Attended:
    """Attend from every query to every key that it may look at.

    The kernel, or the one of this name, computes the context, whichever taps are requested. If the kernel keeps no
    weights, taps up to the weights are recomputed for the selected heads and queries alone; edits need every tap, hence
    the materialized kernel. ``lse`` is log Σ exp(masked_scores / T), so that weights = exp(masked_scores / T − lse);
    for a normalizer other than the softmax it raises ValueError. A method that approximates has no kernel, and the taps
    of ``taps_of``.
    """
    if not isinstance(problem.spec.method, Exact) and (method := approximation_of(problem.spec)) is not None:
        return _approximate(method, problem, taps, selection, edits)
    if isinstance(kernel, str):
        kernel = KERNELS[MATERIALIZED if edits else kernel].make()
    by_stages = kernel.by_stages
    given, nonfinite = (problem, None) if by_stages or problem.finite else finite_part(problem)
    whole = kernel.attend(given, taps, edits)
    if nonfinite is not None:
        whole = {"context": with_nan_rows(whole["context"], affected_queries(nonfinite, problem))}
    if problem.global_qkv is not None and not by_stages and (apart := global_rows(problem, EVERYTHING)) is not None:
        chosen = blocks(problem, Selection(queries=apart.rows))
        far = torch.cat([dict(stages(problem, {"context"}, selection=selected))["context"] for selected in chosen], 2)
        whole = {"context": whole["context"].index_copy(2, constant(apart.rows, far.device), far)}
    if not taps:
        return Attended(whole["context"], {})
    again = _again(problem, set(taps) - set(whole), selection)
    narrowed = {tap: narrow(x, tap, problem, selection) for tap, x in whole.items() if tap in taps}
    return Attended(whole["context"], again | narrowed)


def _approximate(
    method: Approximation, problem: Problem, taps: Collection[str], selection: Selection, edits: Sequence[BoundEdit]
) -> Attended:
    # Without masks every query meets every key; with them, those before a NaN are kept from it.
    nonfinite = find_nonfinite_keys(problem) if problem.spec.masks and not edits else None
    given = problem if nonfinite is None else without(nonfinite, problem)
    tapped = method.attend(given, edits, taps)
    if nonfinite is not None:
        tapped |= {"k": problem.k, "v": problem.v}
        affected = affected_queries(nonfinite, problem)
        tapped |= {tap: tapped[tap].masked_fill(affected, torch.nan) for tap in ("weights", "context") if tap in tapped}
        for name, x in tapped.items():
            if name.startswith("final_"):  # [B, Hkv, F, ...]
                ruined = nonfinite.any(-1).view(*x.shape[:2], *(1 for _ in x.shape[2:]))
                tapped[name] = x.masked_fill(ruined, torch.nan)
    narrowed = {tap: narrow(tapped[tap], tap, problem, selection) for tap in taps if tap != "output"}
    return Attended(tapped["context"], narrowed, {name: x for name, x in tapped.items() if name.startswith("final_")})


def taps_of(spec: AttentionSpec) -> tuple[str, ...]:
    """Return the taps of this spec, without ``output``."""
    return METHODS.of(spec.method).taps(spec)


def has_implicit_weights(spec: AttentionSpec) -> bool:
    """True if a method gives this spec implicit weights."""
    return approximation_of(spec) is not None and "weights" in taps_of(spec)


def _again(problem: Problem, taps: set[str], selection: Selection) -> dict[str, Tensor]:
    """Recompute the taps that the kernel did not keep, for the selected heads and queries alone."""
    if not taps:
        return {}
    if "lse" not in taps or taps & _OVER_PAIRS:
        return dict(stages(problem, taps, selection=selection))
    # One number a query: no reason to hold the scores of all of them.
    parts = (dict(stages(problem, {"lse"}, selection=block))["lse"] for block in blocks(problem, selection))
    lse = put_together(parts, problem.q.shape[2] if selection.queries is None else len(selection.queries))
    return dict(stages(problem, taps - {"lse"}, selection=selection)) | {"lse": lse}


def with_implicit_weights(problem: Problem, edits: Sequence[BoundEdit] = ()) -> Problem:
    """Return the problem of a method with implicit weights with these in ``given``; another one as it is.

    ``edits``: those of q and k are made; those of the weights still apply to ``given``.
    """
    method = approximation_of(problem.spec)
    if method is None:
        return problem
    before = [edit for edit in edits if edit.tap in ("q", "k")]
    weights = _approximate(method, problem, ("weights",), EVERYTHING, before).taps["weights"]
    return replace(problem, given=weights, implicit=True)


def trace(problem: Problem, edits: Sequence[BoundEdit] = (), taps: Collection[str] | None = None) -> dict[str, Tensor]:
    """Every tap, whole, each a node of one graph that leads from q, k and v to ``context``.

    ``torch.autograd.grad(trace["context"], trace[tap], upstream)`` is the gradient with respect to any of them, whether
    or not the problem's tensors ask for one. Forbidden scores and queries that may look nowhere have gradient zero.
    ``taps``: those that are needed of a method that approximates; default: all.
    """
    tracked = replace(problem, q=_tracked(problem.q), k=_tracked(problem.k), v=_tracked(problem.v))
    if (method := approximation_of(problem.spec)) is not None:
        needed = taps_of(problem.spec) if taps is None else taps
        tapped = method.attend(tracked, edits, needed, traced=True)
        return {tap: tapped[tap] for tap in taps_of(problem.spec) if tap in tapped}
    return dict(stages(tracked, set(TAPS) - {"lse"}, edits))


def _tracked(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()
