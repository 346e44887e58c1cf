"""Linformer: softmax attention over a fixed number of projected keys."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core import steps
from attention_service.core.groups import product
from attention_service.core.methods.around import (
    OwnArithmetic,
    no_masks,
    no_softmax,
    nothing_between,
    scored,
    sketched_scored,
)
from attention_service.core.methods.base import METHODS, Extent, Given, MethodCost, PassCost, Refusal
from attention_service.core.tape import Sketch, Tape
from attention_service.core.types import Learned, Problem, Widths


@METHODS.register(
    spec.Linformer,
    formula="o = softmax(Q (E K)ᵀ · scale) (F V), E and F of rank × length, learned",
    gradient="that of softmax over the projected keys; ∂E = Σ ∂(E K) Kᵀ, ∂F = Σ ∂(F V) Vᵀ",
    cost="O(n·r·d), r rank",
    source="Wang et al. 2020, eq. 7",
)
@dataclass(frozen=True)
class Linformer(OwnArithmetic):
    """Keys and values mixed along the sequence before any query meets them."""

    options: spec.Linformer

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """One matrix for keys and one for values, of all heads."""
        matrix = Learned((self.options.rank, self.options.length), heads=None)
        names = ("key_projection",) if self.options.shared else ("key_projection", "value_projection")
        return {f"method.{name}": matrix for name in names}

    def refuses(self, spec: spec.AttentionSpec) -> Iterator[Refusal]:
        """What is no softmax over dot products, and masks."""
        yield from no_softmax(spec)
        yield from no_masks(spec)
        yield from nothing_between(spec)

    def implied_width(self, head_dim: int) -> int:
        """0: there are none."""
        return 0

    def implied(self, problem: Problem, rows: Sequence[int]) -> None:
        """None: softmax(…) F may be negative, and need not sum to 1."""
        return

    def cost(self, extent: Extent) -> MethodCost:
        """Two products that mix, two as in exact attention with r keys; scale 1, softmax 5 and 4 backward."""
        x, rank = extent, self.options.rank
        mixing, pairs = x.batch * x.kv_heads * rank * x.keys, x.batch * x.heads * x.queries * rank
        scores, values = 2 * (mixing + pairs) * x.head_dim, 2 * (mixing + pairs) * x.value_dim
        k, v = x.batch * x.kv_heads * x.keys * x.head_dim, x.batch * x.kv_heads * x.keys * x.value_dim
        projection = rank * min(x.keys, self.options.length)
        memory = _Memory(
            x,
            rank,
            projection,
            (1 if self.options.shared else 2) * rank * self.options.length * x.itemsize,
            self.options.shared,
        )
        return MethodCost(
            PassCost(scores, values, pairs * 6),
            PassCost(2 * scores, 2 * values, pairs * 5),
            held=memory.forward,
            held_backward=memory.backward,
            kept=memory.kept,
            keeps=frozenset(),
            closing=(k + v) * x.itemsize if x.padded else 0,
            inner=2 * mixing * (x.head_dim + x.value_dim),
        )

    def letters(self) -> Mapping[str, str]:
        """R projected keys."""
        return {"r": "rank"}

    def orders(self) -> tuple[str, str]:
        """With the keys, and of what stands between."""
        return "n·r·d", "n·r"

    def sketched(self, tape: Tape, given: Given) -> Sketch:
        """Mixed, and attended to."""
        q, k, _ = sketched_scored(tape, given)
        a, keys = max(q.itemsize, 4), k.dims[2]
        e = given.learned["method.key_projection"]
        f = e if self.options.shared else given.learned["method.value_projection"]
        mixed = []
        for whole, x in ((e, k), (f, given.v)):
            w = whole if keys == self.options.length else steps.part(tape, whole, (self.options.rank, keys))
            mixed.append(steps.mixed(tape, steps.cast(tape, w, a), steps.cast(tape, x, a)))
        x = steps.product(tape, steps.scale(tape, steps.cast(tape, q, a)), mixed[0], turned=True)
        context = steps.product(tape, steps.saved(tape, x), mixed[1])
        return steps.cast(tape, context, given.q.itemsize)

    def _context(self, problem: Problem) -> dict[str, Tensor]:
        q, k, factor = scored(problem)
        dtype = torch.promote_types(q.dtype, torch.float32)
        keys = k.shape[2]
        if keys > self.options.length:
            raise ValueError(f"{keys} keys are more than the length {self.options.length}")
        e = problem.learned["method.key_projection"]
        f = e if self.options.shared else problem.learned["method.value_projection"]
        mixed_k, mixed_v = (
            w[:, :keys].to(dtype) @ x.to(dtype) for w, x in ((e, k), (f, problem.v))
        )  # [B, Hkv, rank, D] and [B, Hkv, rank, V]
        weights = product(q.to(dtype) * factor, mixed_k.mT).softmax(-1)  # [B, H, Q, rank]
        return {"context": product(weights, mixed_v).to(problem.q.dtype)}


@dataclass(frozen=True)
class _Memory:
    """Bytes of the steps beside q, k, v, the context and its gradient."""

    x: Extent
    rank: int
    projection: int
    """Elements of one of the matrices, cut to the keys."""
    learned: int
    """Bytes of the gradients of all of them."""
    shared: bool
    """Whether there is one for keys and values: both its gradients and their sum are held."""

    @property
    def _q(self) -> int:
        return self.x.batch * self.x.heads * self.x.queries * self.x.head_dim

    @property
    def _k(self) -> int:
        return self.x.batch * self.x.kv_heads * self.x.keys * self.x.head_dim

    @property
    def _v(self) -> int:
        return self.x.batch * self.x.kv_heads * self.x.keys * self.x.value_dim

    @property
    def _pairs(self) -> int:
        return self.x.batch * self.x.heads * self.x.queries * self.rank * self.x.accumulated

    @property
    def _mixed(self) -> int:
        x = self.x
        return x.batch * x.kv_heads * self.rank * (x.head_dim + x.value_dim) * x.accumulated

    @property
    def _widened(self) -> int:
        """Bytes of both matrices, where they are widened."""
        return 2 * self.projection * self.x.accumulated * (self.x.accumulated != self.x.itemsize)

    @property
    def forward(self) -> int:
        """The context included."""
        x, a, half = self.x, self.x.accumulated, self.x.accumulated != self.x.itemsize
        padding = (self._k + self._v) * x.itemsize if x.padded else 0
        mix = max(self._k, self._v) * half * a + self._widened // 2
        context = x.context * (a // x.itemsize + half)
        attending = self._q * a + max(self._q * half * a, self._pairs), 2 * self._pairs, self._pairs + context
        return padding + self._mixed + max(mix - self._mixed, *attending)

    @property
    def kept(self) -> int:
        """Keys and values are copied, one beside the other, to be mixed; the queries are scaled."""
        a = self.x.accumulated
        return (self._k + self._v + self._q) * a + self._widened + self._mixed + self._pairs

    @property
    def backward(self) -> int:
        """The softmax; from there to the queries; from what was mixed to values and then to keys."""
        x, a = self.x, self.x.accumulated
        laid = (self._k + self._v) * a + self._widened
        wide = x.context // x.itemsize * a if a != x.itemsize else 0
        weights = self.kept + self._mixed // 2 + self._pairs + max(self._pairs, wide, x.flowing)
        queries = laid + self._mixed + self._q * a + max(self._pairs, self._q * a) + self._q * a
        one = self.learned // (1 if self.shared else 2)
        values = laid + self._q * x.itemsize + self._v * a + one
        found = self._k * a + (self._q + self._v) * x.itemsize + one
        keys = found + self._widened // 2 + max(self._k * a, one + self.projection * a, 2 * one * self.shared)
        return max(weights, queries, values, keys)
