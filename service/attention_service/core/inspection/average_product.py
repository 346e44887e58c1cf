"""Weights made symmetric, with the average product correction.

The correction takes from each pair of tokens the value that the sums of its row and its column lead one to expect.
Source: Dunn et al. 2008, average product correction; Rao et al. 2021, of attention weights.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec
from attention_service.core.masks.visibility import real_keys
from attention_service.core.problem import Problem


def average_product_corrected(weights: Tensor) -> Tensor:
    """Return A − (row sums · column sums) / Σ A of A = w + wᵀ, ``[..., L, L]``; 0 where Σ A is 0."""
    both = weights + weights.mT
    rows = both.sum(-1, keepdim=True)  # [..., L, 1], and of columns too
    total = rows.sum(-2, keepdim=True)
    return both - rows * rows.mT / total.masked_fill(total == 0, 1)


def with_correction(problem: Problem, weights: Tensor, real: Tensor) -> Problem:
    """Return the attention whose weights are these ``[B, H, L, L]``, corrected over the real tokens ``[B, L]``.

    It has no masks but those of padding: two tokens share a number if either may see the other. Rows and columns of
    padding are 0.
    """
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    keys = real_keys(problem)
    tokens = real if keys is None else real & keys
    pairs = tokens[:, None, :, None] & tokens[:, None, None]
    corrected = average_product_corrected(torch.where(pairs, weights, 0))
    return replace(
        problem, given=torch.where(pairs, corrected, 0), implicit=False, spec=AttentionSpec(), mask=None,
        sequence_masks=None, key_mask=tokens, key_lengths=None,
    )  # fmt: skip
