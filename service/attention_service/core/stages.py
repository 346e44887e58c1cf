"""The formula, stage by stage: q, k → scores → softcap → bias and masks → normalizer → weighted sum of the values."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec
from attention_service.core import edits as interventions
from attention_service.core.blocks import put_together, rows_at_once
from attention_service.core.cancellation import checked
from attention_service.core.dropout import dropped, kept
from attention_service.core.edits import BoundEdit
from attention_service.core.masks.global_projections import global_rows
from attention_service.core.masks.key_spans import pick_spans, places
from attention_service.core.masks.visibility import EVERYTHING, narrow_mask, real_keys, visibility
from attention_service.core.nonfinite_keys import find_nonfinite_keys, with_nan_scores, without
from attention_service.core.normalizers import NORMALIZERS, Exponential, Softmax, has_lse
from attention_service.core.positions import POSITIONS
from attention_service.core.positions.pair_bias import pair_bias
from attention_service.core.problem import Learned, Problem, Selection, Span, Widths
from attention_service.core.scores import SCORES, qk_norm
from attention_service.core.tensors import constant, heads_read_by, pick, product

TAPS = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "lse", "weights", "context")
"""Taps in the order of the computation. Only a softmax has ``lse``."""
LOG_WEIGHTS = "log_weights"
"""ln of the weights, from which these are then computed. No tap of a request; see ``normalizers.has_log_weights``."""


def taps_of(spec: AttentionSpec) -> tuple[str, ...]:
    """The taps that this spec has."""
    return TAPS if has_lse(spec.normalizer) else tuple(tap for tap in TAPS if tap != "lse")


def stages(
    problem: Problem,
    taps: Collection[str],
    edits: Sequence[BoundEdit] = (),
    selection: Selection = EVERYTHING,
    parts: "Parts | None" = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield each of these taps by name, computed only for the selection and up to the last tap.

    Edits name heads and queries of the whole problem. ``parts``: tensors to use in place of ``parts_of``.

    Every tap is a node of its own in the graph that leads to the context, so that each has a gradient.
    """
    missing = set(taps) & {*TAPS, LOG_WEIGHTS}
    if lacking := missing - {*taps_of(problem.spec), LOG_WEIGHTS}:
        raise ValueError(f"{problem.spec.normalizer.name} has no {', '.join(lacking)}; ask `taps_of` first")
    if not missing:
        return
    if problem.given is not None:
        yield "weights", _given(problem, problem.given, edits, selection)
        return
    parts = parts or parts_of(problem, selection)
    for tap, x in _stages(problem, edits, selection, parts, frozenset(missing)):
        checked(x)
        if tap in missing:
            missing.remove(tap)
            yield tap, x
        del x  # free a tap that was not requested as soon as the next stage has read it
        if not missing:
            return


def _given(problem: Problem, weights: Tensor, edits: Sequence[BoundEdit], selection: Selection) -> Tensor:
    """The weights that a problem brings, after the edits."""
    real = real_keys(problem, selection)
    edits = interventions.narrowed(edits, selection, problem.q.shape[1], problem.k.shape[1])
    x = narrow(weights, "weights", problem, selection)
    return interventions.apply(edits, "weights", x, None if real is None else real[:, None, None, :])


@dataclass(frozen=True)
class Parts:
    """The tensors of a problem, narrowed to a selection."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    """The request's mask, of rank 4."""
    learned: Mapping[str, Tensor]
    padded: bool = True
    """False if padding has zeros already."""


def parts_of(problem: Problem, selection: Selection) -> Parts:
    """Return views of the tensors of a problem; copies of heads, queries and keys that are not side by side."""
    q, k, v = (narrow(x, name, problem, selection) for name, x in (("q", problem.q), *_kv(problem)))
    return Parts(q, k, v, narrow_mask(problem, selection), narrow_learned(problem, selection))


def _stages(
    problem: Problem, edits: Sequence[BoundEdit], selection: Selection, parts: Parts, taps: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    spec = problem.spec
    edits = interventions.narrowed(edits, selection, problem.q.shape[1], problem.k.shape[1])
    normalizer = NORMALIZERS.of(spec.normalizer)
    apart = None if problem.global_qkv is None else global_rows(problem, selection)
    q = parts.q
    if apart is not None:
        q = apart.put(q, pick(narrow(apart.problem.q, "q", problem, selection), 2, apart.rows))
    q = interventions.apply(edits, "q", q)
    yield "q", q  # [B, H, Q, D]
    k = interventions.apply(edits, "k", parts.k)
    yield "k", k  # [B, Hkv, K, D]
    v = interventions.apply(edits, "v", parts.v)
    yield "v", v  # [B, Hkv, K, V]

    real = real_keys(problem, selection)
    seen = _seen(problem, k, v, real if parts.padded and not problem.finite else None)
    # Half types are scored in float32, as a fused kernel accumulates, unless the spec asks for a half type itself.
    dtype = torch.promote_types(q.dtype, normalizer.runs_in(q.dtype))
    x = seen.scored(q, dtype, parts.learned)
    if apart is not None:
        far_k, far_v = (narrow(x, name, apart.problem, selection) for name, x in _kv(apart.problem))
        seen_apart = _seen(problem, far_k, far_v, real)
        x = apart.put(x, seen_apart.scored(pick(q, 2, apart.rows), dtype, parts.learned))
    x = interventions.apply(edits, "scores", x)
    yield "scores", x  # [B, H, Q, K], as all up to the weights

    x = x.view_as(x) if spec.softcap is None else spec.softcap * torch.tanh(x / spec.softcap)
    x = interventions.apply(edits, "capped_scores", x)
    yield "capped_scores", x

    x = x.view_as(x)
    if (bias := pair_bias(problem, x.dtype)) is not None:
        x = x + bias.tile(selection.queries, selection.keys_of(problem), selection.heads)
    own = not (x.requires_grad or "scores" in taps or "capped_scores" in taps)  # then nobody else holds them
    x = visibility(problem, selection, parts.mask).forbid(x, own=own)
    if any(edit.tap == "masked_scores" for edit in edits):
        x = interventions.apply(edits, "masked_scores", x).masked_fill(x == -torch.inf, -torch.inf)
    yield "masked_scores", x

    if "lse" in taps and isinstance(normalizer, Exponential):
        yield "lse", normalizer.lse(x, parts.learned)  # [B, H, Q]

    if LOG_WEIGHTS in taps and isinstance(normalizer, Softmax):
        x = normalizer.log_weights(x)
        yield LOG_WEIGHTS, x
        x = x.exp().to(q.dtype)
    else:
        x = normalizer.weights(x, _lengths(problem, selection, real), parts.learned).to(q.dtype)
    x = interventions.apply(edits, "weights", x, None if real is None else real[:, None, None, :])
    yield "weights", x

    if problem.dropout is not None:
        x = dropped(x, problem.dropout, kept_weights(problem, selection))
    context = product(x, seen.v)
    if apart is not None:
        context = apart.put(context, product(pick(x, 2, apart.rows), seen_apart.v))
    yield "context", interventions.apply(edits, "context", context)  # [B, H, Q, V]


@dataclass(frozen=True)
class _Seen:
    """Keys and values with zeros for padding and for nonfinite numbers."""

    problem: Problem
    nonfinite: Tensor | None
    """Bool ``[B, Hkv, K]``: nonfinite keys."""

    @property
    def v(self) -> Tensor:
        return self.problem.v

    def scored(self, q: Tensor, dtype: torch.dtype, learned: Mapping[str, Tensor]) -> Tensor:
        """The scores of these queries, computed in this dtype."""
        x = SCORES.of(self.problem.spec.score).scores(q.to(dtype), self.problem.k.to(dtype), learned)
        if self.nonfinite is None:
            return x
        return with_nan_scores(self.nonfinite, x)


def _lengths(problem: Problem, selection: Selection, real: Tensor | None) -> Tensor | None:
    """Return the number of all real keys of each sequence, ``[B]``; None if the selection has all keys."""
    if real is None and selection.keys is not None:
        return torch.full(problem.q.shape[:1], problem.k.shape[2], device=problem.q.device)
    real = real if real is None or selection.keys is None else real_keys(problem)
    return None if real is None else real.sum(-1)


def _seen(problem: Problem, k: Tensor, v: Tensor, real: Tensor | None) -> _Seen:
    if real is not None:
        padded = ~real[:, None, :, None]  # [B, 1, K, 1]
        k, v = k.masked_fill(padded, 0), v.masked_fill(padded, 0)
    clean = replace(problem, k=k, v=v, key_mask=None, key_lengths=None)
    nonfinite = None if problem.finite else find_nonfinite_keys(clean)
    return _Seen(clean if nonfinite is None else without(nonfinite, clean), nonfinite)


def values_read(
    problem: Problem, edits: Sequence[BoundEdit] = (), heads: Sequence[int] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the values ``[B, Hkv, K, V]`` that weights multiply, and those of global projections; None for none.

    They are those after the edits of v, with zeros for padding and for nonfinite numbers. ``heads``: one value head
    for each of these query heads, ``[B, heads, K, V]``.
    """
    selection, far = Selection(heads), None
    k, v = (narrow(interventions.apply(edits, name, x), name, problem, selection) for name, x in _kv(problem))
    near = _seen(problem, k, v, real_keys(problem)).v
    if problem.global_qkv is not None:
        apart = replace(problem, k=problem.global_qkv[1], v=problem.global_qkv[2], global_qkv=None)
        k, v = (narrow(x, name, apart, selection) for name, x in _kv(apart))
        far = _seen(apart, k, v, real_keys(problem)).v
    return near, far


def _kv(problem: Problem) -> tuple[tuple[str, Tensor], ...]:
    return ("k", problem.k), ("v", problem.v)


def kept_weights(problem: Problem, selection: Selection = EVERYTHING) -> Tensor:
    """Bool ``[B, H, Q, K]``: which weights of the selection the problem's dropout keeps."""
    if problem.dropout is None:
        raise ValueError("the problem has no dropout")
    device, (batch, heads, queries, _) = problem.q.device, problem.q.shape
    first = problem.dropout.first
    chosen = (range(first, first + batch), selection.heads or range(heads), selection.queries or range(queries))
    of_batch, of_heads, of_queries = (constant(indices, device, torch.int64) for indices in chosen)
    spans = selection.keys_of(problem)
    of_keys = places((Span(0, problem.k.shape[2]),) if spans is None else spans, device)
    rows = rows_at_once(batch, len(of_heads), len(of_keys))  # the numbers drawn are eight times as large as the answer
    starts = range(0, max(len(of_queries), 1), rows)
    parts = (kept(problem.dropout, of_batch, of_heads, of_queries[start : start + rows], of_keys) for start in starts)
    return put_together(parts, len(of_queries))


def narrow(x: Tensor, tap: str, problem: Problem, selection: Selection) -> Tensor:
    """The selection of a tap; of k and v, the selected keys of the heads that the selected query heads read."""
    axes = interventions.AXES[tap] if tap != "lse" else interventions.AXES["context"]
    heads, queries = selection.heads, selection.queries
    if heads is not None and tap in ("k", "v"):
        heads = heads_read_by(heads, problem.q.shape[1], problem.k.shape[1])
    for axis, index in (("heads", heads), ("queries", queries)):
        if index is not None and axis in axes:
            x = pick(x, axes[axis], index)
    spans = selection.keys_of(problem)
    return x if spans is None or "keys" not in axes else pick_spans(x, axes["keys"], spans)


def stage_tensors(spec: AttentionSpec, widths: Widths) -> dict[str, Learned]:
    """Every learned tensor beside the projections and those of the method, by name, in the order of the computation."""
    tensors = POSITIONS.of(spec.position).learned(widths) | qk_norm.learned(spec.qk_norm, widths)
    if spec.add_bias_kv:
        tensors["bias_k"] = Learned((widths.kv_heads * widths.key_dim,), fill=0.0, heads=None)
        tensors["bias_v"] = Learned((widths.kv_heads * widths.value_dim,), fill=0.0, heads=None)
    return tensors | SCORES.of(spec.score).learned(widths) | NORMALIZERS.of(spec.normalizer).learned(widths)


def narrow_learned(problem: Problem, selection: Selection) -> Mapping[str, Tensor]:
    """The learned tensors of the stages, of the selected heads alone."""
    if selection.heads is None or not problem.learned:
        return problem.learned
    narrowed = {}
    for name, learned in stage_tensors(problem.spec, problem.widths).items():
        x = problem.learned[name]
        narrowed[name] = x if learned.heads is None else pick(x, learned.heads, selection.heads)
    return narrowed
