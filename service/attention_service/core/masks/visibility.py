"""The masks of the spec and of the request combined: pairs of a query and a key that it may look at."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_service.core.masks.key_spans import pick_spans, places
from attention_service.core.masks.rules import allowed
from attention_service.core.problem import Problem, Selection
from attention_service.core.tensors import constant, pick

EVERYTHING = Selection()
"""All heads and queries."""


@dataclass(frozen=True)
class Visibility:
    """All masks of a problem combined. Both tensors are broadcastable to ``[B, H, Q, K]``."""

    allowed: Tensor | None
    """Bool, true where a query may look; None if nothing is forbidden."""
    bias: Tensor | None
    """Float, added to the scores; −∞ forbids."""
    open: int = 0
    """The number of keys, the first, that every query may look at."""

    def forbid(self, scores: Tensor, *, own: bool = False) -> Tensor:
        """Return the masked scores: the bias added, and −∞ where a query may not look, even if the score is NaN.

        ``own``: the scores are nobody else's, and are changed in place.
        """
        if self.bias is not None:
            forbidden = self.bias == -torch.inf
            scores, own = (scores + self.bias.to(scores.dtype)).masked_fill_(forbidden, -torch.inf), True
        if self.allowed is None:
            return scores
        some, allowed = scores, self.allowed
        if own and self.open:
            some, allowed = scores[..., self.open :], allowed[..., self.open :]
        if self.bias is None and _may_be_added(some, allowed):
            nothing = torch.zeros((), dtype=scores.dtype, device=scores.device)
            hidden = torch.where(allowed, nothing, -torch.inf)
            hidden = some.add_(hidden) if own else some + hidden
        else:
            hidden = some.masked_fill_(~allowed, -torch.inf) if own else some.masked_fill(~allowed, -torch.inf)
        return scores if own else hidden


def _may_be_added(scores: Tensor, allowed: Tensor) -> bool:
    """True if adding −∞ hides as well: a sum takes a CPU a third of the time or less, but keeps NaN."""
    if not scores.numel() or 4 * allowed.numel() > scores.numel() or scores.requires_grad:
        return False
    return not scores.is_cuda and bool(scores.amax() < torch.inf)  # a GPU is not waited for


def visibility(problem: Problem, selection: Selection = EVERYTHING, request_mask: Tensor | None = None) -> Visibility:
    """The masks of a problem, for the selection. ``request_mask`` is used in place of ``narrow_mask``."""
    spec_masks = _of_positions(problem, selection)
    if spec_masks is not None:
        spec_masks = _with_added(spec_masks, problem)
    real = real_keys(problem, selection)
    request_mask = narrow_mask(problem, selection) if request_mask is None else request_mask
    request_mask = None if request_mask is None else _with_added(request_mask, problem, selection)
    bias = request_mask if request_mask is not None and request_mask.dtype != torch.bool else None
    yes = [spec_masks, None if real is None else real[:, None, None, :], request_mask if bias is None else None]
    together: Tensor | None = None
    for mask in yes:
        if mask is not None:
            together = mask if together is None else together & mask
    opened = 0
    if selection.keys and not selection.keys[0].masked and real is None and request_mask is None:
        opened = len(selection.keys[0])
    return Visibility(together, bias, opened)


def _of_positions(problem: Problem, selection: Selection) -> Tensor | None:
    """Combine the masks of positions: bool ``[1 or B, 1, Q, K]``; None if they hide nothing."""
    device, queries, keys, offsets = problem.q.device, problem.q.shape[2], problem.keys, problem.offsets
    chosen, spans = selection.queries, selection.keys
    rows = None if chosen is None else constant(chosen, device, torch.int64)
    if spans is not None and not any(span.masked for span in spans):
        return None
    if problem.sequence_masks is None:
        own = problem.spec.masks
        return allowed(own, queries, keys, past=problem.past, offsets=offsets, rows=rows, spans=spans, device=device)
    batch = problem.q.shape[0]
    visible: Tensor | None = None
    for index, masks in enumerate(problem.sequence_masks):
        offset = offsets if offsets is None or offsets.ndim == 0 else offsets[index]
        mine = allowed(masks, queries, keys, past=problem.past, offsets=offset, rows=rows, spans=spans, device=device)
        if mine is not None:
            visible = mine.new_empty(batch, *mine.shape[1:]) if visible is None else visible
            visible[index] = mine[0]
    return visible


def real_keys(problem: Problem, selection: Selection = EVERYTHING) -> Tensor | None:
    """Return bool ``[B, K]``, true for a key of the selection that is no padding; None if all are real."""
    spans = selection.keys
    real = None if problem.key_mask is None else problem.key_mask.bool()
    real = real if real is None or spans is None else pick_spans(real, 1, spans)
    if problem.key_lengths is not None:
        device = problem.k.device
        index = torch.arange(problem.keys, device=device) if spans is None else places(spans, device)
        real = real_at(index, real, problem.key_lengths)
    return real if real is None or not problem.added_keys else pad(real, (0, problem.added_keys), value=True)


def real_at(index: Tensor, real: Tensor | None, key_lengths: Tensor | None) -> Tensor | None:
    """Return bool ``[B, K]``, true for the keys of ``real`` at places ``index`` within the lengths; None if all are."""
    if key_lengths is None:
        return real
    within = index < key_lengths[:, None]
    return within if real is None else real & within


def without_padding(problem: Problem) -> Problem:
    """Put zeros in place of padded keys and values. They may hold anything, and 0 · NaN would be NaN."""
    real = real_keys(problem)
    if real is None:
        return problem
    padded = ~real[:, None, :, None]  # [B, 1, K, 1]
    return replace(problem, k=problem.k.masked_fill(padded, 0), v=problem.v.masked_fill(padded, 0))


def fit(mask: Tensor, keys: int) -> Tensor:
    """Give a request's mask rank 4, as numpy broadcasts, and hide keys beyond its last dimension."""
    mask = mask.view((1,) * (4 - mask.ndim) + mask.shape)
    if mask.shape[-1] in (1, keys):
        return mask
    hidden = False if mask.dtype == torch.bool else -torch.inf
    return pad(mask, (0, keys - mask.shape[-1]), value=hidden)


def _with_added(mask: Tensor, problem: Problem, selection: Selection = EVERYTHING) -> Tensor:
    """A mask of rank 4 that lets every query look at the keys that the spec added."""
    if not problem.added_keys:
        return mask
    if mask.shape[-1] == 1:  # one column stands for all keys
        keys = problem.keys if selection.keys is None else sum(len(span) for span in selection.keys)
        mask = mask.expand(*mask.shape[:3], keys)
    return pad(mask, (0, problem.added_keys), value=True if mask.dtype == torch.bool else 0)


def narrow_mask(problem: Problem, selection: Selection) -> Tensor | None:
    """Return the selection of a request's mask, as it is where it tells heads, queries or keys not apart."""
    if problem.mask is None:
        return None
    mask = problem.mask.view((1,) * (4 - problem.mask.ndim) + problem.mask.shape)
    for dim, index in ((1, selection.heads), (2, selection.queries)):
        if index is not None and mask.shape[dim] != 1:
            mask = pick(mask, dim, index)
    mask = fit(mask, problem.keys)
    return (
        mask if selection.keys is None or mask.shape[-1] == 1 != problem.keys else pick_spans(mask, 3, selection.keys)
    )
