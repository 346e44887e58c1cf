"""The lengths of what keys add to the output: ‖A v W_O‖ by head, and of its sum over the heads.

Source: Kobayashi et al. 2020, "Attention is Not Only a Weight", section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attention_service.core.cancellation import checkpoint
from attention_service.core.tensors import constant, one_for_each_query_head


@dataclass(frozen=True)
class ValueLengths:
    """Inner products of what the heads make of a key's value: u = v W_O, ⟨u of one head, u of another⟩."""

    products: Tensor
    """``[B, K, H, H]`` in float64."""

    def of_heads(self, weights: Tensor) -> Tensor:
        """‖A u‖ ``[B, H, R, K]`` of each head, from weights of that shape."""
        lengths = self.products.diagonal(dim1=2, dim2=3).clamp(min=0).sqrt()  # [B, K, H]
        return weights.abs() * lengths.permute(0, 2, 1)[:, :, None].to(weights.dtype)

    def of_sum(self, weights: Tensor) -> Tensor:
        """‖Σ A u‖ over the heads, ``[B, R, K]``, from weights ``[B, H, R, K]``."""
        by_key = weights.double().permute(0, 3, 2, 1)  # [B, K, R, H]
        squares = ((by_key @ self.products) * by_key).sum(-1)
        return squares.clamp_(min=0).sqrt_().mT


def value_lengths(v: Tensor, projection: Tensor | None, heads: Sequence[int], of: int) -> ValueLengths:
    """Compute the inner products from values ``[B, H', K, V]``, where H' divides the number of these heads.

    projection ``[width, H·V]``: the output projection of a module; None for raw attention, whose heads stay side by
    side. ``heads``: the ones to keep of all ``of`` heads.
    """
    by_key = one_for_each_query_head(v, len(heads)).transpose(1, 2).double()  # [B, K, H, V]
    if projection is None:
        return ValueLengths(by_key.square().sum(-1).diag_embed())
    kept = constant(heads, v.device)
    columns = projection.double().view(-1, of, v.shape[3]).index_select(1, kept)  # [width of the output, H, V]
    found = by_key.new_empty(*by_key.shape[:3], len(heads))
    for at in range(len(heads)):
        checkpoint()
        metric = columns[:, at].mT @ columns.flatten(1)  # [V, H·V]
        found[:, :, at] = ((by_key[:, :, at] @ metric).view_as(by_key) * by_key).sum(-1)
    return ValueLengths(found)
