"""The masks of the spec and of the request combined: pairs of a query and a key that it may look at."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_service.core.masks.rules import allowed
from attention_service.core.problem import Problem, Selection
from attention_service.core.tensors import pick

EVERYTHING = Selection()
"""All heads and queries."""


@dataclass(frozen=True)
class Visibility:
    """All masks of a problem combined. Both tensors are broadcastable to ``[B, H, Q, K]``."""

    allowed: Tensor | None
    """Bool, true where a query may look; None if nothing is forbidden."""
    bias: Tensor | None
    """Float, added to the scores; −∞ forbids."""

    def forbid(self, scores: Tensor) -> Tensor:
        """Return the masked scores: the bias added, and −∞ where a query may not look, even if the score is NaN."""
        if self.bias is not None:
            forbidden = self.bias == -torch.inf
            scores = (scores + self.bias.to(scores.dtype)).masked_fill_(forbidden, -torch.inf)
        if self.allowed is not None:
            hide = scores.masked_fill if self.bias is None else scores.masked_fill_  # a sum is nobody else's
            scores = hide(~self.allowed, -torch.inf)
        return scores


def visibility(problem: Problem, selection: Selection = EVERYTHING) -> Visibility:
    """The masks of a problem, for the selected heads and queries."""
    device, keys = problem.q.device, problem.keys
    rows = None if selection.queries is None else torch.tensor(selection.queries, device=device)
    spec_masks = _of_positions(problem, rows)
    if spec_masks is not None:
        spec_masks = _with_added(spec_masks, problem)
    real = real_keys(problem)
    told = None if problem.mask is None else _with_added(_narrow(fit(problem.mask, keys), selection), problem)
    bias = told if told is not None and told.dtype != torch.bool else None
    yes = [spec_masks, None if real is None else real[:, None, None, :], told if bias is None else None]
    together: Tensor | None = None
    for mask in yes:
        if mask is not None:
            together = mask if together is None else together & mask
    return Visibility(together, bias)


def _of_positions(problem: Problem, rows: Tensor | None) -> Tensor | None:
    """Combine the masks of positions: bool ``[1 or B, 1, Q or len(rows), K]``; None without masks."""
    device, queries, keys, offsets = problem.q.device, problem.q.shape[2], problem.keys, problem.offsets
    if problem.sequence_masks is None:
        return allowed(problem.spec.masks, queries, keys, past=problem.past, offsets=offsets, rows=rows, device=device)
    batch = problem.q.shape[0]
    found: Tensor | None = None
    for index, masks in enumerate(problem.sequence_masks):
        offset = offsets if offsets is None or offsets.ndim == 0 else offsets[index]
        mine = allowed(masks, queries, keys, past=problem.past, offsets=offset, rows=rows, device=device)
        if mine is not None:
            found = mine.new_empty(batch, *mine.shape[1:]) if found is None else found
            found[index] = mine[0]
    return found


def real_keys(problem: Problem) -> Tensor | None:
    """Return bool ``[B, K]``, true for a key that is no padding; None if all are real."""
    real = None if problem.key_mask is None else problem.key_mask.bool()
    if problem.key_lengths is not None:
        index = torch.arange(problem.keys, device=problem.k.device)
        within = index < problem.key_lengths[:, None]  # [B, K]
        real = within if real is None else real & within
    return real if real is None or not problem.added_keys else pad(real, (0, problem.added_keys), value=True)


def is_padded(problem: Problem) -> bool:
    """True if the request says which keys are real."""
    return problem.key_mask is not None or problem.key_lengths is not None


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


def _with_added(mask: Tensor, problem: Problem) -> Tensor:
    """A mask of rank 4 that lets every query look at the keys that the spec added."""
    if not problem.added_keys:
        return mask
    wide = mask.expand(*mask.shape[:3], problem.keys)
    return pad(wide, (0, problem.added_keys), value=True if mask.dtype == torch.bool else 0)


def _narrow(mask: Tensor, selection: Selection) -> Tensor:
    """The selected heads and queries, where the mask tells them apart."""
    for dim, index in ((1, selection.heads), (2, selection.queries)):
        if index is not None and mask.shape[dim] != 1:
            mask = pick(mask, dim, index)
    return mask
