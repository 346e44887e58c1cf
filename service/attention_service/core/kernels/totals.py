"""Gradients summed over tiles."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attention_service.core.cancellation import checkpoint
from attention_service.core.kernels.tiles import Group, Leaves, scatter_add
from attention_service.core.kernels.tiling import Block, Strip
from attention_service.core.kernels.ways import Upstream, Way
from attention_service.core.problem import Problem
from attention_service.core.pullback import pullback_where_used


class Totals:
    """The gradients of q, k, v, the added mask and the learned tensors: those that are wanted, by name."""

    def __init__(self, problem: Problem, wanted: Mapping[str, bool], sums_in: torch.dtype) -> None:
        self._wanted = wanted
        mask = problem.mask
        parts = {"q": problem.q, "k": problem.k, "v": problem.v} | ({} if mask is None else {"mask": mask})
        self._like = parts | dict(problem.learned)
        self._sums_in = sums_in
        # What a tile does not read of the learned tensors is given no sum.
        self._sums = {name: self._zeros(x) for name, x in parts.items() if wanted[name]}

    def add(self, group: Group, block: Block, strip: Strip, way: Way, upstream: Upstream) -> None:
        """The gradients of one tile, by going through it again."""
        checkpoint()
        leaves = self._tracked(group.leaves(block, strip))
        learned = {name: x for name, x in group.problem.learned.items() if x.requires_grad}
        with torch.enable_grad():
            scores = group.scores(leaves, block, strip)
        x = group.hide(scores.detach().clone(), leaves, block, strip)
        of_scores, of_v = way.backward(group, block, strip, x, leaves.v, upstream)
        if self._wanted["v"]:
            scatter_add(self._sums["v"][group.sequences], of_v, strip)
        named = {"q": leaves.q, "k": leaves.k, "mask": leaves.told, **learned}
        asked = {name: x for name, x in named.items() if x is not None and x.requires_grad}
        if not scores.requires_grad:
            return
        found = pullback_where_used([scores], [*asked.values()], [of_scores.to(scores.dtype)])
        for name, gradient in zip(asked, found, strict=True):
            if gradient is not None:
                self._put(name, gradient, group, block, strip)

    def add_learned(self, name: str, gradient: Tensor) -> None:
        """A gradient of a learned tensor that was found elsewhere."""
        self._total(name).add_(gradient)

    def gradients(self) -> list[Tensor | None]:
        """In the order of q, k, v, mask and the learned tensors, as autograd takes them."""
        return [
            self._sums.pop(name).to(self._like[name].dtype) if name in self._sums else None for name in self._wanted
        ]

    def _put(self, name: str, gradient: Tensor, group: Group, block: Block, strip: Strip) -> None:
        total = self._total(name)
        if name == "q":
            total[group.sequences, :, block.start : block.stop] += gradient
        elif name == "k":
            scatter_add(total[group.sequences], gradient, strip)
        elif name == "mask":
            whole = total.view((1,) * (4 - total.ndim) + total.shape)
            group.add_mask_gradient(whole, gradient, block, strip)
        else:
            total += gradient

    def _total(self, name: str) -> Tensor:
        if name not in self._sums:
            self._sums[name] = self._zeros(self._like[name])
        return self._sums[name]

    def _zeros(self, x: Tensor) -> Tensor:
        """Half types are summed in float32: a key's gradient is a sum over all blocks of queries."""
        return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, self._sums_in), device=x.device)

    def _tracked(self, leaves: Leaves) -> Leaves:
        def leaf(x: Tensor, name: str) -> Tensor:
            return x.detach().requires_grad_(self._wanted[name])

        told = None if leaves.told is None else leaf(leaves.told, "mask")
        return replace(leaves, q=leaf(leaves.q, "q"), k=leaf(leaves.k, "k"), told=told)
