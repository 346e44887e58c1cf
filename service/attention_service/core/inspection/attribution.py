"""Attributions: the share of each weight and head in a number L that depends on the output.

Behind its weights A, attention is linear: context = A·v. So ∂L/∂A = ∂L/∂context · vᵀ needs no graph over the pairs, and
the context of α·A is α times that of A. Beside the results, only the tile of one block of queries is in memory.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import torch
from torch import Tensor

from attention_service.core.blocks import placed_tiles, some_of
from attention_service.core.cancellation import checkpoint
from attention_service.core.edits import BoundEdit
from attention_service.core.inspection.effects import context_after
from attention_service.core.inspection.loss_path import Path
from attention_service.core.inspection.weights import Weights, weights_of
from attention_service.core.masks.global_projections import global_rows
from attention_service.core.problem import Problem, Selection
from attention_service.core.stages import narrow
from attention_service.core.tensors import constant, one_for_each_query_head, pick, product

T = TypeVar("T")
GRADIENTS: Final = frozenset({"gradient_attention", "integrated", "relevance", "head_importance"})
"""The methods that need gradients of L."""
_AT_ONE: Final = frozenset({"gradient_attention", "relevance"})
_BY_HEAD: Final = ("gradient_attention", "integrated", "norm")
_OVER_HEADS: Final = {"relevance": "relevance", "norm": "norm_of_sum"}
"""The methods with a result that has no heads, and its name."""
_BEHIND_WEIGHTS: Final = frozenset({"context", "output"})


def weights_and_context(
    problem: Problem, edits: Sequence[BoundEdit] = (), *, wanted: bool = True
) -> tuple[Weights, Tensor]:
    """Compute the context ``[B, H, Q, V]`` before its own edits, and make the function that gives the weights.

    wanted: False leaves the numbers of the context out.
    """
    before = [edit for edit in edits if edit.tap not in _BEHIND_WEIGHTS]
    context = (
        context_after(problem, before) if wanted else problem.q.new_zeros(*problem.q.shape[:3], problem.v.shape[3])
    )
    return partial(weights_of, problem, edits=before), context


def head_importance(context: Tensor, upstream: Tensor) -> Tensor:
    """|∂L/∂ξ| ``[B, H]`` at ξ = 1 of a gate ξ of each head, from context ``[B, H, Q, V]`` and ∂L/∂context.

    Source: Michel et al. 2019, eq. 2, of one sequence.
    """
    dtype = torch.promote_types(context.dtype, torch.float32)
    return (context.to(dtype) * upstream).sum((2, 3)).abs()


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


@dataclass(frozen=True)
class Attribution:
    """Everything that attributions of one block of queries are made from."""

    problem: Problem
    methods: Collection[str]
    weights: Weights
    values: tuple[Tensor, Tensor | None]
    """The values ``[B, H', K, V]`` that the weights multiply, and those of global projections."""
    path: Path | None = None
    """None if no method needs gradients."""
    lengths: tuple[ValueLengths, ValueLengths | None] | None = None
    """The lengths that belong to each kind of values, for ``norm``."""

    def of(self, selection: Selection) -> dict[str, Tensor]:
        """Attribute to the weights of the selected heads and queries, whose values these are.

        Returns ``[B, H', Q', K]``, and without H' for ``relevance`` and ``norm_of_sum``.
        """
        problem = self.problem
        batch, heads, queries, _ = problem.q.shape
        heads = heads if selection.heads is None else len(selection.heads)
        queries = queries if selection.queries is None else len(selection.queries)
        shape = batch, heads, queries, problem.k.shape[2]
        attributions = {name: problem.q.new_empty(shape) for name in _BY_HEAD if name in self.methods}
        for method, name in _OVER_HEADS.items():
            if method in self.methods:
                attributions[name] = problem.q.new_empty(batch, *shape[2:])
        if attributions:
            for block, _, rows in some_of(problem.q, placed_tiles(problem, selection, all_heads=True)):
                for name, x in self._of_block(block):
                    attributions[name][..., rows, :] = x
                    del x
        return attributions

    def _of_block(self, block: Selection) -> Iterator[tuple[str, Tensor]]:
        a = self.weights(block)
        path, lengths, methods = self.path, self.lengths, self.methods
        if path is not None and not _AT_ONE.isdisjoint(methods):
            share = self._gradient(path.gradient, block).mul_(a)
            if "gradient_attention" in methods:
                yield "gradient_attention", share
            if "relevance" in methods:
                yield "relevance", share.clamp_(min=0).mean(1)
            del share
        if path is not None and "integrated" in methods:
            yield "integrated", self._gradient(path.mean, block).mul_(a)
        if lengths is not None:
            yield "norm", self._by_row(block, *lengths, lambda of, x: of.of_heads(x), a)
            yield "norm_of_sum", self._by_row(block, *lengths, lambda of, x: of.of_sum(x)[:, None], a)[:, 0]

    def _gradient(self, upstream: Tensor, block: Selection) -> Tensor:
        """∂L/∂A ``[B, H', R, K]`` of a block, from ∂L/∂context of all heads and queries."""
        rows = narrow(upstream, "context", self.problem, block)
        return self._by_row(block, *self.values, lambda v, x: product(x, v.mT), rows)

    def _by_row(
        self, block: Selection, near: T, far: T | None, compute: Callable[[T, Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Compute from x ``[B, H', R, ...]`` and ``near``; its rows with global projections from ``far``."""
        rows_near = compute(near, x)
        apart = None if far is None else global_rows(self.problem, block)
        if apart is None or far is None:
            return rows_near
        return apart.put(rows_near, compute(far, pick(x, 2, apart.rows)))


def lengths_of(
    values: tuple[Tensor, Tensor | None], projection: Tensor | None, heads: Sequence[int] | None, of: int
) -> tuple[ValueLengths, ValueLengths | None]:
    """Compute what ``norm`` needs of both kinds of values, of these heads of all ``of`` heads."""
    near, far = values
    chosen = range(of) if heads is None else heads
    return value_lengths(near, projection, chosen, of), far if far is None else value_lengths(
        far, projection, chosen, of
    )


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
    products_by_head = by_key.new_empty(*by_key.shape[:3], len(heads))
    for at in range(len(heads)):
        checkpoint()
        metric = columns[:, at].mT @ columns.flatten(1)  # [V, H·V]
        products_by_head[:, :, at] = ((by_key[:, :, at] @ metric).view_as(by_key) * by_key).sum(-1)
    return ValueLengths(products_by_head)
