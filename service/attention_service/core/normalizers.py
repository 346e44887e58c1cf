"""Normalizers: from scores to weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core import steps
from attention_service.core.projections import entmax15_roots, sketched_roots, sketched_sparsemax, sparsemax
from attention_service.core.registry import Registry
from attention_service.core.tape import BOOL, INTEGER, Sketch, Tape
from attention_service.core.types import Learned, Widths

_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class PairCost:
    """What a normalizer costs for each query-key pair of each head, the division by the temperature left out."""

    flops: int
    backward_flops: int
    held: int
    """Bytes at the peak of the forward pass, beside the masked scores."""
    held_backward: int
    """Bytes at the peak of the backward pass, what the forward pass kept for it included."""
    apart: bool
    """Whether the forward pass keeps another tensor than the weights for the backward pass."""
    second: int
    """Bytes beyond those of the first backward pass when that is differentiated again."""
    fills: bool = False
    """Whether the backward pass begins with a copy of the gradient of the weights, which ``held_backward`` counts."""


class Normalizer(Protocol):
    """How the masked scores of one query become its weights. A query whose scores are all −∞ gets zeros."""

    separable: bool
    """Whether each weight depends on its own score alone."""

    def runs_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the computation for inputs of this dtype."""

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Its learned tensors by name."""

    def weights(
        self, masked_scores: Tensor, lengths: Tensor | None = None, learned: Mapping[str, Tensor] = _NOTHING
    ) -> Tensor:
        """``[B, H, Q, K]`` to ``[B, H, Q, K]``, in the dtype of the computation.

        lengths ``[B]``: how many keys of each sequence are no padding; None where all are.
        """

    def cost(self, keys: int, itemsize: int) -> PairCost:
        """For rows of so many keys, computed in a dtype of so many bytes."""

    def sketched(self, tape: Tape, x: Sketch, itemsize: int, learned: Mapping[str, Sketch], *, padded: bool) -> Sketch:
        """``weights``, step by step, in a dtype of so many bytes; ``padded``: sequences differ in length."""


@runtime_checkable
class Exponential(Protocol):
    """A normalizer whose weights are exponentials divided by their sum, so that the logarithm of the sum tells all."""

    def lse(self, masked_scores: Tensor, learned: Mapping[str, Tensor] = _NOTHING) -> Tensor:
        """``[B, H, Q, K]`` to ``[B, H, Q]``: the logarithm of what the weights are divided by."""

    def sketched_lse(self, tape: Tape, x: Sketch, itemsize: int, learned: Mapping[str, Sketch]) -> Sketch:
        """The same, step by step."""


NORMALIZERS = Registry[Normalizer]("normalizer")


def has_lse(options: spec.Normalizer) -> bool:
    """Whether the tap ``lse`` has a meaning."""
    return hasattr(NORMALIZERS.of(options), "lse")  # as Exponential asks, and tenfold as fast


class _Plain:
    """A normalizer that learns nothing."""

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """None."""
        return {}


def _tempered(masked_scores: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    x = masked_scores.to(dtype)
    return x if temperature == 1 else x / temperature


def _tempered_sketch(tape: Tape, x: Sketch, temperature: float, itemsize: int) -> Sketch:
    x = steps.cast(tape, x, itemsize)
    return x if temperature == 1 else steps.scale(tape, x)


@NORMALIZERS.register(
    spec.Softmax,
    formula="w_j = exp(s_j/T) / (Σ_k exp(s_k/T) + exp(sink/T)), T = temperature, the sink only where asked for",
    gradient="∂s_j = w_j (∂w_j − Σ_k w_k ∂w_k)/T, ∂sink = −w_sink Σ_k w_k ∂w_k / T",
    cost="O(n²)",
    source="Vaswani et al. 2017, eq. 1; temperature: Hinton et al. 2015, eq. 1; sinks: Agarwal et al. 2025, 2.2",
)
@dataclass(frozen=True)
class Softmax:
    """softmax(s / T) over the keys."""

    options: spec.Softmax
    separable = False

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """A sink's score for each head, where there are sinks."""
        return {"sinks": Learned((widths.heads,), fill=0.0)} if self.options.sinks else {}

    def runs_in(self, dtype: torch.dtype) -> torch.dtype:
        """The wider of the inputs' dtype and the one asked for; a half type is taken as asked."""
        return _widened(dtype, self.options.dtype)

    def weights(
        self, masked_scores: Tensor, lengths: Tensor | None = None, learned: Mapping[str, Tensor] = _NOTHING
    ) -> Tensor:
        """exp(s/T − lse)."""
        if self.options.sinks:
            return self._with_sinks(masked_scores, learned).softmax(-1)[..., :-1]
        seeing, blind = self._seeing(masked_scores)
        weights = seeing.softmax(-1)
        del seeing  # one tensor of this size fewer in memory at the peak
        return weights.masked_fill(blind, 0)

    def lse(self, masked_scores: Tensor, learned: Mapping[str, Tensor] = _NOTHING) -> Tensor:
        """The logarithm of Σ exp(s/T), a sink's score among them; −∞ for a query that may look nowhere."""
        if self.options.sinks:
            return self._with_sinks(masked_scores, learned).logsumexp(-1)
        seeing, blind = self._seeing(masked_scores)
        return seeing.logsumexp(-1).masked_fill(blind.squeeze(-1), -torch.inf)

    def cost(self, keys: int, itemsize: int) -> PairCost:
        """Forward: maximum, subtract, exp, sum, divide. Backward: w·∂w, its sum, subtract, multiply by w.

        Its input made finite and the exponentials are held at once, then these and the weights; backward, the
        exponentials, their gradient and that of the scores.
        """
        sinks = self.options.sinks
        second = (8 if sinks else 9) * itemsize
        return PairCost(5, 4, 2 * itemsize, 3 * itemsize, apart=not sinks, second=second, fills=True)

    def sketched(self, tape: Tape, x: Sketch, itemsize: int, learned: Mapping[str, Sketch], *, padded: bool) -> Sketch:
        """Blind queries found and made finite, the softmax, and their zeros; or sinks beside the scores."""
        if self.options.sinks:
            return steps.part(tape, steps.saved(tape, self._sketched_sinks(tape, x, itemsize, learned)), x.dims)
        seeing, blind = self._sketched_seeing(tape, x, itemsize)
        return steps.hide(tape, steps.saved(tape, seeing), blind)

    def sketched_lse(self, tape: Tape, x: Sketch, itemsize: int, learned: Mapping[str, Sketch]) -> Sketch:
        """An exponential for each pair and a logarithm for each query."""
        if self.options.sinks:
            return _log_sum(tape, self._sketched_sinks(tape, x, itemsize, learned))
        seeing, blind = self._sketched_seeing(tape, x, itemsize)
        return steps.plain(tape, _log_sum(tape, seeing), Sketch(blind.dims[:3], BOOL))

    def _sketched_sinks(self, tape: Tape, x: Sketch, itemsize: int, learned: Mapping[str, Sketch]) -> Sketch:
        sinks = steps.cast(tape, learned["sinks"], x.itemsize)
        x = _tempered_sketch(tape, x, self.options.temperature, itemsize)
        sinks = steps.clamped(tape, _tempered_sketch(tape, sinks, self.options.temperature, itemsize))
        column = steps.expanded(tape, sinks, (*x.dims[:3], 1))
        return steps.cat(tape, [x, column], 3, reads=x.bytes + sinks.bytes)

    def _sketched_seeing(self, tape: Tape, x: Sketch, itemsize: int) -> tuple[Sketch, Sketch]:
        x = _tempered_sketch(tape, x, self.options.temperature, itemsize)
        nowhere = steps.plain(tape, x, itemsize=BOOL)
        blind = steps.reduced(tape, nowhere, (*x.dims[:3], 1))
        return steps.hide(tape, x, blind), blind

    def _with_sinks(self, masked_scores: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        """s/T with the score of its head's sink after those of the keys: a query always looks there at least."""
        dtype = self.runs_in(masked_scores.dtype)
        x = _tempered(masked_scores, self.options.temperature, dtype)
        sinks = _tempered(learned["sinks"].to(masked_scores.dtype), self.options.temperature, dtype)
        sinks = sinks.clamp(min=torch.finfo(dtype).min).view(1, -1, 1, 1)
        return torch.cat([x, sinks.expand(*x.shape[:3], 1)], -1)

    def _seeing(self, masked_scores: Tensor) -> tuple[Tensor, Tensor]:
        """s/T with the rows of blind queries made finite, and which rows those are.

        Both ends of the softmax must be filled: a row of −∞ is 0/0 forward, and its NaN would come back through the
        gradient of anything that only covers it afterwards.
        """
        tempered = _tempered(masked_scores, self.options.temperature, self.runs_in(masked_scores.dtype))
        blind = (tempered == -torch.inf).all(-1, keepdim=True)  # [..., 1]
        return tempered.masked_fill(blind, 0), blind


@NORMALIZERS.register(
    spec.Sigmoid,
    formula="w_j = 1 / (1 + exp(−s_j/T − b)), b = −ln n by default, T = temperature",
    gradient="∂s_j = w_j (1 − w_j) ∂w_j / T",
    cost="O(n²)",
    source="Ramapuram et al. 2024, section 3",
)
@dataclass(frozen=True)
class Sigmoid(_Plain):
    """sigmoid(s / T + b), each key for itself. What is forbidden has −∞ and so exactly 0, forward and backward."""

    options: spec.Sigmoid
    separable = True

    def runs_in(self, dtype: torch.dtype) -> torch.dtype:
        """The wider of the inputs' dtype and the one asked for; a half type is taken as asked."""
        return _widened(dtype, self.options.dtype)

    def weights(
        self, masked_scores: Tensor, lengths: Tensor | None = None, learned: Mapping[str, Tensor] = _NOTHING
    ) -> Tensor:
        """σ(s/T + b)."""
        x = _tempered(masked_scores, self.options.temperature, self.runs_in(masked_scores.dtype))
        x = x + self._bias(x, lengths)
        return x.sigmoid()

    def cost(self, keys: int, itemsize: int) -> PairCost:
        """Forward: add the bias, exp, add 1, divide. Backward: 1 − w, times w, times ∂w.

        Held: the biased scores and the weights; backward, the weights and both gradients.
        """
        return PairCost(4, 3, 2 * itemsize, 3 * itemsize, apart=False, second=5 * itemsize)

    def sketched(self, tape: Tape, x: Sketch, itemsize: int, learned: Mapping[str, Sketch], *, padded: bool) -> Sketch:
        """The bias added, and one function; the bias of sequences that differ is found first."""
        x = _tempered_sketch(tape, x, self.options.temperature, itemsize)
        if not padded or self.options.bias is not None:
            return steps.saved(tape, steps.shift(tape, x))
        lengths = Sketch((x.dims[0],), INTEGER)
        for functions in (0, 0, 1, 0):  # at least 1, in float64, its logarithm, negated
            lengths = steps.plain(tape, lengths, functions=functions)
        bias = steps.cast(tape, lengths, itemsize)
        return steps.saved(tape, steps.add(tape, x, Sketch((x.dims[0], 1, 1, 1), bias.itemsize)))

    def _bias(self, x: Tensor, lengths: Tensor | None) -> Tensor | float:
        """One number, or ``[B, 1, 1, 1]`` where sequences differ in length; a sequence without a key counts as one."""
        if self.options.bias is not None:
            return self.options.bias
        if lengths is None:
            return -log(max(x.shape[-1], 1))
        # Found in float64: a half type cannot count every length.
        return lengths.clamp(min=1).double().log().neg().to(x.dtype)[:, None, None, None]


@NORMALIZERS.register(
    spec.Sparsemax,
    formula="w_j = max(s_j/T − τ, 0), τ such that Σ w = 1, T = temperature",
    gradient="∂s_j = (∂w_j − mean of ∂w over the support)/T in the support {w > 0}, 0 outside",
    cost="O(n² log n)",
    source="Martins & Astudillo 2016, eq. 3 and algorithm 1; gradient: eq. 14",
)
@dataclass(frozen=True)
class Sparsemax(_Plain):
    """The point of the simplex nearest to s / T."""

    options: spec.Sparsemax
    separable = False

    def runs_in(self, dtype: torch.dtype) -> torch.dtype:
        """The wider of the inputs' dtype and the one asked for."""
        return _widened(dtype, self.options.dtype)

    def weights(
        self, masked_scores: Tensor, lengths: Tensor | None = None, learned: Mapping[str, Tensor] = _NOTHING
    ) -> Tensor:
        """max(s/T − τ, 0)."""
        return sparsemax(masked_scores.to(self.runs_in(masked_scores.dtype)), self.options.temperature)

    def cost(self, keys: int, itemsize: int) -> PairCost:
        """Nine operations and the sort; four of the gradient.

        Forward: maximum and subtract; ⌈log₂ K⌉ comparisons to sort; running sum, times the rank, plus 1, compare,
        count; subtract τ, maximum with 0. Backward: in the support?, select, sum, subtract.

        Held: the shifted scores, and them sorted with their places (8 bytes each) or with their running sum.
        """
        held = max(2 * itemsize + 8, 3 * itemsize)
        return PairCost(9 + _levels(keys), 4, held, 4 * itemsize + 1, apart=False, second=0)

    def sketched(self, tape: Tape, x: Sketch, itemsize: int, learned: Mapping[str, Sketch], *, padded: bool) -> Sketch:
        """As the projection has it."""
        return sketched_sparsemax(tape, steps.cast(tape, x, itemsize), self.options.temperature)


@NORMALIZERS.register(
    spec.Entmax15,
    formula="w_j = max(s_j/(2T) − τ, 0)², τ such that Σ w = 1, T = temperature",
    gradient="∂s_j = r_j (∂w_j − Σ_k r_k ∂w_k / Σ_k r_k)/T, r = √w",
    cost="O(n² log n)",
    source="Peters et al. 2019, section 3.2",
)
@dataclass(frozen=True)
class Entmax15(_Plain):
    """1.5-entmax of s / T: what is to softmax (α = 1) and sparsemax (α = 2) their middle."""

    options: spec.Entmax15
    separable = False

    def runs_in(self, dtype: torch.dtype) -> torch.dtype:
        """The wider of the inputs' dtype and the one asked for."""
        return _widened(dtype, self.options.dtype)

    def weights(
        self, masked_scores: Tensor, lengths: Tensor | None = None, learned: Mapping[str, Tensor] = _NOTHING
    ) -> Tensor:
        """max(s/2T − τ, 0)²."""
        x = masked_scores.to(self.runs_in(masked_scores.dtype))
        return entmax15_roots(x, self.options.temperature).square()

    def cost(self, keys: int, itemsize: int) -> PairCost:
        """Nineteen operations and the sort; nine of the gradient.

        Forward: maximum, subtract, halve; ⌈log₂ K⌉ comparisons to sort; two running sums and a square; two means;
        variance (multiply, subtract), τ (subtract, maximum with 0, root, subtract), compare, count; subtract τ, maximum
        with 0, square. Backward: the square's 2, then of its roots: in the support?, select, two sums, multiply,
        subtract, halve.

        Held: the shifted scores, and them sorted with their places (8 bytes each) or with two running sums; backward
        five tensors, in the gradient of the square.
        """
        held = max(2 * itemsize + 8, 4 * itemsize)
        return PairCost(19 + _levels(keys), 9, held, 5 * itemsize, apart=True, second=3 * itemsize)

    def sketched(self, tape: Tape, x: Sketch, itemsize: int, learned: Mapping[str, Sketch], *, padded: bool) -> Sketch:
        """The projection's roots, squared."""
        return steps.square(tape, sketched_roots(tape, steps.cast(tape, x, itemsize), self.options.temperature))


def _widened(dtype: torch.dtype, name: str) -> torch.dtype:
    asked: torch.dtype = getattr(torch, name)
    return asked if asked.itemsize < torch.float32.itemsize else torch.promote_types(dtype, asked)


def _log_sum(tape: Tape, x: Sketch) -> Sketch:
    y = Sketch(x.dims[:3], x.itemsize)
    tape.does(x.bytes, y.bytes, x.size + y.size)
    return y


def _levels(keys: int) -> int:
    """⌈log₂ K⌉: by how many comparisons for each element K of them are sorted."""
    return max(keys - 1, 0).bit_length()
