"""Taps that the module of an attention makes beside its softmax: the scores of an indexer, and a gate of the context.

``index_scores`` ``[B, Q, T]`` are the scores of T candidates, of which an indexer chooses the largest for each query.
``gate`` ``[B, H, Q, V]`` or ``[B, H, Q, 1]`` is multiplied by the context before the projection. Both are found in a
short run of the model: scores as what the module passes to ``topk``, a gate as what it multiplies its context by.
Sources: DeepSeek-AI 2025 (DeepSeek-V3.2, the lightning indexer); Qiu et al. 2025 (gated attention). Notation as in
``core.problem``.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from attention_service.core.blocks import tiles
from attention_service.core.edits import BoundEdit
from attention_service.core.inspection.statistics import StatisticInputs
from attention_service.core.inspection.weights import TiledWeights, real_queries, totals
from attention_service.core.masks.visibility import visibility
from attention_service.core.problem import Problem, Selection
from attention_service.models.passes.layer_keys import Compression
from attention_service.models.passes.module_hooks import running_within
from attention_transformers.model_layers import LayerKey

GATE, INDEX_SCORES, CHOSEN = "gate", "index_scores", "chosen"
MODULE_TAPS: Final = frozenset({GATE, INDEX_SCORES, CHOSEN})
"""The taps that no attention function makes; ``chosen`` are the keys that a query may look at after the choice."""
CHOSEN_SHARE: Final = "chosen_share"
"""The statistic of the weights that there would be without the choice of keys."""
_BEFORE_MASKS: Final = frozenset({"q", "k", "v", "scores", "capped_scores"})
_CHOICES: Final = frozenset({torch.topk, Tensor.topk})
_PRODUCTS: Final = frozenset({torch.mul, Tensor.mul, Tensor.mul_})


@dataclass(frozen=True)
class GateProduct:
    """The product of the context and a gate in the code of a module."""

    at: int
    """Its number among the products of tensors after the attention."""
    argument: int
    """The argument of the function that is the gate."""
    width: int
    """V, or 1 for one number a head."""


@dataclass(frozen=True)
class ModuleTaps:
    """The taps that an attention's module has beside its softmax."""

    gate: GateProduct | None = None
    rate: int | None = None
    """The tokens of each candidate that its indexer scores; None without an indexer of its own."""
    shares: bool = False
    """True if its keys are those that the indexer of an earlier layer chose."""

    @cached_property
    def names(self) -> frozenset[str]:
        """The taps that can be asked for."""
        chooses = self.rate is not None or self.shares
        has_tap = {GATE: self.gate is not None, INDEX_SCORES: self.rate is not None, CHOSEN: chooses}
        return frozenset(tap for tap, has in has_tap.items() if has)


NOTHING_BESIDE: Final = ModuleTaps()


See = Callable[[LayerKey, str, Tensor], Tensor]
"""Takes ``index_scores`` or a ``gate`` that the module of a layer has made. Returns that to go on with."""


class ModuleRuns:
    """The attention modules of one model while they run: their taps are found first, and seen in later runs."""

    def __init__(self, modules: Mapping[nn.Module, tuple[LayerKey, ...]]) -> None:
        """``modules``: each with the keys of its layers."""
        self._keys = modules
        self.taps: dict[nn.Module, ModuleTaps] = {}
        """The taps of each module that has any."""
        self.scores: Tensor | None = None
        """The scores by which the last indexer chose, ``[B, Q, T]``, in a run that is watched."""
        self.running: list[_SeenRun] = []
        """The runs of modules that are seen, the innermost last."""

    def trying(self) -> AbstractContextManager[None]:
        """Find the taps of the modules that run until the block ends."""
        return running_within(self._keys, lambda module: _TapTrial(module, self), self.running)

    def watching(self, wanted: Collection[tuple[LayerKey, str]], see: See) -> AbstractContextManager[None]:
        """Show ``see`` the wanted taps of layers until the block ends; all scores of indexers if any are wanted."""
        scores = any(tap == INDEX_SCORES for _, tap in wanted)
        watched: dict[nn.Module, LayerKey] = {}
        for module, taps in self.taps.items():
            keys = self._keys[module]
            if (scores and taps.rate is not None) or any((key, GATE) in wanted for key in keys):
                watched[module] = keys[0]
        self.scores = None
        if not watched:
            return nullcontext()
        return running_within(watched, lambda module: _TapWatch(module, self, see, watched[module]), self.running)

    def attended(self, module: nn.Module, layer: LayerKey, context: Tensor) -> None:
        """Note, while a run is seen, that a module has its context ``[B, Q, H, V]``."""
        if self.running[-1].module is module:
            self.running[-1].attended(layer, context)


class _SeenRun(TorchFunctionMode):
    """One run of a module, whose choices and products are seen."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.context: Tensor | None = None
        self.products = -1

    def attended(self, layer: LayerKey, context: Tensor) -> None:
        """Note the context; products are counted from here."""
        self.context = context

    def chosen_by(self, scores: Tensor) -> Tensor:
        """Take the scores of a choice. Returns those to choose by."""
        return scores

    def multiplied(self, factors: Sequence[Any]) -> Sequence[Any]:
        """Take the factors of a product behind the attention. Returns those to multiply."""
        return factors

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _CHOICES and self.context is None:
            args = [self.chosen_by(args[0]), *args[1:]]
        elif function in _PRODUCTS and self.context is not None and all(isinstance(arg, Tensor) for arg in args):
            self.products += 1
            args = self.multiplied(args)
        return function(*args, **(kwargs or {}))


class _TapTrial(_SeenRun):
    """A run in which taps are found."""

    def __init__(self, module: nn.Module, runs: ModuleRuns) -> None:
        super().__init__(module)
        self._taps = runs.taps
        self._rate = _rate_of(module)
        self._candidates: list[torch.Size] = []

    def chosen_by(self, scores: Tensor) -> Tensor:
        """Note the sizes of a choice."""
        self._candidates.append(scores.shape)
        return scores

    def attended(self, layer: LayerKey, context: Tensor) -> None:
        """Note an indexer, if there was one choice for each query, among candidates of so many tokens."""
        self.context = context
        batch, queries = context.shape[:2]
        if self._candidates == [(batch, queries, queries // self._rate)]:
            self._taps[self.module] = ModuleTaps(rate=self._rate)
        elif getattr(self.module, "indexer", self) is None:
            self._taps[self.module] = ModuleTaps(shares=True)

    def multiplied(self, factors: Sequence[Any]) -> Sequence[Any]:
        """Note the first product of the context by as many numbers, or by one number a head."""
        beside = self._taps.get(self.module, NOTHING_BESIDE)
        if self.context is None or beside.gate is not None:
            return factors
        for argument, other in ((1, 0), (0, 1)):
            gate, x = factors[argument], factors[other]
            by_head = (*self.context.shape[:3], 1)
            width = self.context.shape[3] if gate.shape == x.shape else 1
            fits = gate.shape == x.shape or (x.shape == self.context.shape and gate.shape == by_head)
            if fits and _same(x, self.context):
                gated = GateProduct(self.products, argument, width)
                self._taps[self.module] = replace(beside, gate=gated)
                break
        return factors


class _TapWatch(_SeenRun):
    """A run whose taps are seen."""

    def __init__(self, module: nn.Module, runs: ModuleRuns, see: See, layer: LayerKey) -> None:
        super().__init__(module)
        self._taps, self._runs, self._see, self._layer = runs.taps[module], runs, see, layer

    def chosen_by(self, scores: Tensor) -> Tensor:
        """Show the scores of the indexer, −∞ for candidates that a query may not choose."""
        if self._taps.rate is None:
            return scores
        hidden = scores <= torch.finfo(scores.dtype).min
        seen = self._see(self._layer, INDEX_SCORES, scores.masked_fill(hidden, -torch.inf))
        self._runs.scores = seen.masked_fill(hidden, -torch.inf)
        return torch.where(hidden, scores, seen)

    def attended(self, layer: LayerKey, context: Tensor) -> None:
        """Note the layer of this run."""
        self.context, self._layer = context, layer

    def multiplied(self, factors: Sequence[Any]) -> Sequence[Any]:
        """Show the gate."""
        gate = self._taps.gate
        if gate is None or self.products != gate.at or self.context is None:
            return factors
        x = factors[gate.argument]
        by_head = x.reshape(*self.context.shape[:3], gate.width).transpose(1, 2)
        seen = self._see(self._layer, GATE, by_head)
        if seen is by_head:
            return factors
        changed = [*factors]
        changed[gate.argument] = seen.transpose(1, 2).reshape(x.shape)
        return changed


def _rate_of(module: nn.Module) -> int:
    """The tokens of each candidate of a module's indexer: one, unless it pools tokens or compresses them."""
    compression, indexer = Compression.of(module), getattr(module, "indexer", None)
    return int(getattr(indexer, "index_kpool", 1)) if compression is None else compression.rate


def _same(x: Tensor, context: Tensor) -> bool:
    return x.numel() == context.numel() and torch.equal(x.reshape(-1), context.reshape(-1).to(x.dtype))


def seen_keys(problem: Problem) -> Tensor:
    """Return the keys that a query may look at, bool ``[B, Q, K]``: the masks allow them, and a choice kept them.

    All heads see the same.
    """
    batch, _, queries, _ = problem.q.shape
    zeros = problem.q.new_zeros(batch, 1, queries, problem.k.shape[2])
    return visibility(problem).forbid(zeros, own=True)[:, 0] > -torch.inf


def dense_keys(problem: Problem, real: Tensor | None, scores: Tensor | None) -> Tensor:
    """Return the keys that a query could look at without the choice, bool ``[B, 1, Q, K]``.

    real: bool ``[B, Q]``, the tokens that are no padding; None if all are. scores: the indexer's, ``[B, Q, T]``, −∞ for
    candidates that cannot be chosen. If there are more keys than queries, the candidates are the last T of them; else
    they are the tokens up to the query's own.
    """
    queries, keys = problem.q.shape[2], problem.k.shape[2]
    if keys > queries and scores is not None:
        candidates = pad(scores > -torch.inf, (keys - scores.shape[-1], 0), value=False)
        return (seen_keys(problem) | candidates)[:, None]
    earlier = torch.ones(queries, keys, dtype=torch.bool, device=problem.q.device).tril(keys - queries)
    dense = earlier.expand(problem.q.shape[0], 1, -1, -1)
    return dense if real is None else dense & real.bool()[:, None, None]


def chosen_share(
    problem: Problem, dense: Tensor, real: Tensor | None = None, edits: Sequence[BoundEdit] = ()
) -> Tensor:
    """Return Σ p over the chosen keys ``[B, H]``, the mean over the real queries; p are the weights of dense attention.

    Edits act as they do on the attention itself, up to its masks.
    """
    spec = problem.spec.model_copy(update={"masks": []})
    whole = replace(problem, spec=spec, mask=dense, key_mask=None)
    edits = [edit for edit in edits if edit.tap in _BEFORE_MASKS]
    inputs = StatisticInputs(chosen=seen_keys(problem))
    every = tiles(whole, Selection())
    rows = real_queries(whole) if real is None else real.bool()
    class_totals = totals(whole, rows, every, TiledWeights(whole, edits).compute, (CHOSEN_SHARE,), inputs)
    share: Tensor = class_totals.means()[CHOSEN_SHARE]
    return share
