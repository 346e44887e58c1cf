"""From the scores of one tile to weights and a part of the context, and the way back."""

from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
from torch import Tensor

from attention_service.core.dropout import dropped
from attention_service.core.kernels.tiles import Group, Leaves
from attention_service.core.kernels.tiling import Block, Strip
from attention_service.core.normalizers import NORMALIZERS, Exponential, Normalizer
from attention_service.core.problem import Problem
from attention_service.core.pullback import pullback
from attention_service.core.tensors import product, product_backward

_LOG2_E = 1 / log(2)


@dataclass(frozen=True)
class Upstream:
    """The state of a block in its backward pass."""

    gradient: Tensor
    """∂L/∂context, ``[B, H, q, V]``."""
    along: Tensor
    """Σ context · ∂L/∂context, ``[B, H, q, 1]``."""
    lse: Tensor
    """``[B, H, q, 1]``; +∞ for queries that look nowhere."""


class Way(Protocol):
    """One way from the hidden scores of tiles to a block of the context."""

    @property
    def whole_rows(self) -> bool:
        """True if a query's weights need all its scores at once."""

    def forward(self, group: Group, block: Block) -> tuple[Tensor, Tensor | None]:
        """The context ``[B, H, q, V]`` of a block, and its log-sum-exp ``[B, H, q]`` where there is one."""

    def backward(
        self, group: Group, block: Block, strip: Strip, x: Tensor, v: Tensor, upstream: Upstream
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the hidden scores x ``[B, H, q, k]``, which it may use up, and of the values."""


def way(problem: Problem) -> Way:
    """The way of a problem's normalizer."""
    normalizer = NORMALIZERS.of(problem.spec.normalizer)
    if isinstance(normalizer, Exponential):
        return Streamed(problem.spec.normalizer.temperature)
    return Weighed(normalizer, whole_rows=not normalizer.separable)


def hidden(group: Group, leaves: Leaves, block: Block, strip: Strip) -> Tensor:
    """The masked scores of a tile."""
    return group.hide(group.scores(leaves, block, strip), leaves, block, strip)


@dataclass(frozen=True)
class Streamed:
    """Softmax with a running maximum and sum. Source: Milakov & Gimelshein 2018, algorithm 3."""

    temperature: float
    whole_rows: bool = False

    def forward(self, group: Group, block: Block) -> tuple[Tensor, Tensor]:
        """With maximum m' so far, o ← o·exp(m − m') + exp(s − m')·v, and the sum likewise; a sink is there at first."""
        top, total = self._start(group, block)
        context: Tensor | None = None
        for strip in block.strips:
            leaves = group.leaves(block, strip)
            x = self._tempered(hidden(group, leaves, block, strip).to(group.sums_in))
            highest = torch.maximum(top, x.amax(-1, keepdim=True))
            shift = highest.masked_fill(highest == -torch.inf, 0)
            weights = _exponentials(x.sub_(shift))
            decay = (top - shift).exp_()
            total = total * decay + weights.sum(-1, keepdim=True)
            part = product(_dropped(weights, group, block, strip), leaves.v)
            context = part if context is None else context.mul_(decay).add_(part)
            top = highest
            del leaves, x, weights, part  # else they would be held while the next tile is scored
        if context is None:
            context = torch.zeros(*top.shape[:3], group.problem.v.shape[3], dtype=top.dtype, device=top.device)
        lse = torch.where(top == torch.inf, top, top + total.log())  # the logarithm is known, though no weight is
        return context.div_(total.masked_fill(total == 0, 1)), lse.squeeze(-1)

    def backward(
        self, group: Group, block: Block, strip: Strip, x: Tensor, v: Tensor, upstream: Upstream
    ) -> tuple[Tensor, Tensor]:
        """With w = exp(s − lse): ∂s = w·(∂o·vᵀ − Σ o·∂o). Source: Dao et al. 2022, algorithm 4."""
        weights = _exponentials(self._tempered(x.to(group.sums_in)).sub_(upstream.lse))
        of_weights = _dropped(product(upstream.gradient, v.mT), group, block, strip)
        of_v = product_backward(_dropped(weights, group, block, strip), upstream.gradient, v.shape[1])
        return self._tempered(of_weights.sub_(upstream.along).mul_(weights)), of_v

    def of_sinks(self, group: Group, upstream: Upstream) -> Tensor:
        """The gradient of the sinks ``[H]``, which a block gives: a sink's weight has none of its own."""
        weights = (self._sinks(group) - upstream.lse).exp_()
        return self._tempered(-weights * upstream.along).sum((0, 2, 3))

    def _start(self, group: Group, block: Block) -> tuple[Tensor, Tensor]:
        """The maximum and the sum ``[B, H, q, 1]`` before the first key."""
        q = group.problem.q
        shape = (*q.shape[:2], block.stop - block.start, 1)
        if "sinks" in group.problem.learned:
            top = self._sinks(group).expand(shape)
            return top, torch.ones_like(top)
        top = torch.full(shape, -torch.inf, dtype=group.sums_in, device=q.device)
        return top, torch.zeros_like(top)

    def _sinks(self, group: Group) -> Tensor:
        sinks = group.problem.learned["sinks"].detach().to(group.dtype).view(1, -1, 1, 1)
        return sinks.clamp(min=torch.finfo(group.dtype).min).to(group.sums_in) / self.temperature

    def _tempered(self, x: Tensor) -> Tensor:
        return x if self.temperature == 1 else x.div_(self.temperature)


@dataclass(frozen=True)
class Weighed:
    """Weights that need no sum over other tiles: each score stands for itself, or its whole row is there."""

    normalizer: Normalizer
    whole_rows: bool

    def forward(self, group: Group, block: Block) -> tuple[Tensor, None]:
        """Σ w·v, tile by tile."""
        batch, heads = group.problem.q.shape[:2]
        shape = batch, heads, block.stop - block.start, group.problem.v.shape[3]
        context = torch.zeros(shape, dtype=group.sums_in, device=group.problem.q.device)
        for strip in block.strips:
            leaves = group.leaves(block, strip)
            weights = self._weights(group, hidden(group, leaves, block, strip))
            context += product(_dropped(weights, group, block, strip), leaves.v)
            del leaves, weights  # before the next tile is scored
        return context, None

    def backward(
        self, group: Group, block: Block, strip: Strip, x: Tensor, v: Tensor, upstream: Upstream
    ) -> tuple[Tensor, Tensor]:
        """Differentiate the weights; their product with the values is not computed again."""
        x = x.requires_grad_()
        with torch.enable_grad():
            weights = self._weights(group, x)
        of_v = product_backward(_dropped(weights.detach(), group, block, strip), upstream.gradient, v.shape[1])
        of_weights = _dropped(product(upstream.gradient, v.mT), group, block, strip)
        (of_x,) = pullback([weights], (x,), [of_weights])
        return of_x, of_v

    def _weights(self, group: Group, x: Tensor) -> Tensor:
        return self.normalizer.weights(x, group.lengths, group.problem.learned).to(group.sums_in)


def _exponentials(x: Tensor) -> Tensor:
    """Exponentiate x in place, as powers of two. On a CPU these are not slower for −∞ or tiny results."""
    return x.mul_(_LOG2_E).exp2_()


def _dropped(x: Tensor, group: Group, block: Block, strip: Strip) -> Tensor:
    keep = group.keep(block, strip)
    dropout = group.problem.dropout
    return x if keep is None or dropout is None else dropped(x, dropout, keep)


def upstreams(gradient: Tensor, context: Tensor, lse: Tensor, group: Group, block: Block) -> Upstream:
    """Return the upstream gradients of a block, from tensors over the whole batch and all queries."""
    at = group.sequences, slice(None), slice(block.start, block.stop)
    given = gradient[at].to(group.sums_in)
    if not lse.numel():  # only a softmax has one
        return Upstream(given, given[..., :1], given[..., :1])
    of_block = lse[at].unsqueeze(-1)
    along = (given * context[at].to(group.sums_in)).sum(-1, keepdim=True)
    of_block = of_block.masked_fill(of_block == torch.inf, torch.nan)  # its weights are unknown
    return Upstream(given, along, of_block.masked_fill_(of_block == -torch.inf, torch.inf))
