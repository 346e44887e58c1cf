"""Common base of the approximations: edits, taps and limits around their own arithmetic."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec, Exact, Softmax
from attention_service.core import edits as interventions
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.extent import Extent
from attention_service.core.masks.rules import causal_offset
from attention_service.core.masks.visibility import without_padding
from attention_service.core.methods.base import METHODS, MethodCost, Refusal
from attention_service.core.positions import POSITIONS
from attention_service.core.problem import Learned, Problem, Widths
from attention_service.core.scores import SCORES, Product


class Approximation(ABC):
    """A method with arithmetic of its own: no kernel computes it, and weights are made only on request."""

    def taps(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Return the taps, without weights unless the method has implicit ones."""
        return "q", "k", "v", "context"

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return no learned tensors."""
        return {}

    @abstractmethod
    def cost(self, extent: Extent) -> MethodCost:
        """Return the cost."""

    @abstractmethod
    def orders(self) -> tuple[str, str]:
        """Return time and memory for one head and sequence of n tokens, as in ``n·d²`` and ``n·d``."""

    def letters(self) -> Mapping[str, str]:
        """Return the meaning of letters of ``orders`` that differ from ``cost.letters``."""
        return {}

    def carried(self, *, module: bool) -> frozenset[str] | None:
        """Return the tensors of a one-query step in place of past keys and values: names as in ``Extent.sent``.

        Empty if a step takes past keys and values, as exact attention does; None if no step continues earlier ones.
        """
        return frozenset()

    def implied(self, problem: Problem, rows: Sequence[int]) -> Tensor | None:
        """Return the weights ``[B, H, len(rows), K]`` that the context implies for these queries.

        None if they are not a distribution: single weights may be negative, or need not sum to 1.
        """
        return None

    def attend(
        self, problem: Problem, edits: Sequence[BoundEdit], taps: Collection[str] = (), *, traced: bool = False
    ) -> dict[str, Tensor]:
        """Return every tap as a node of the graph to the context, and any additional results.

        ``weights`` are among them if they are among ``taps`` or edited. If they are edited, or ``traced``, the context
        is computed from them.
        """
        roles = (("q", problem.q), ("k", problem.k), ("v", problem.v))
        q, k, v = (interventions.apply(edits, tap, x) for tap, x in roles)
        clean = without_padding(replace(problem, q=q, k=k, v=v))
        edited, weights = any(edit.tap == "weights" for edit in edits), dict[str, Tensor]()
        if edited or "weights" in taps:
            weights = {"weights": interventions.apply(edits, "weights", self.weights(clean))}
        through = edited or (traced and bool(weights))
        results = self._from_weights(clean, weights["weights"]) if through else self._context(clean)
        context = interventions.apply(edits, "context", results["context"])
        return {"q": q, "k": k, "v": v} | weights | results | {"context": context}

    def weights(self, problem: Problem) -> Tensor:
        """Compute the implicit weights ``[B, H, Q, K]`` of a problem without padding, in float32 or wider.

        They are the matrix M for which the context of an empty state is M·v. Raises ValueError for a method without.
        """
        raise ValueError("the method has no weights; ask `taps` first")

    def _from_weights(self, problem: Problem, weights: Tensor) -> dict[str, Tensor]:
        """Compute ``_context`` from weights that were edited."""
        raise ValueError("the method has no weights; ask `taps` first")

    @abstractmethod
    def _context(self, problem: Problem) -> dict[str, Tensor]:
        """Compute ``context`` and any additional results; edits are made, and padded keys and values are zeros."""


def approximation_of(spec: AttentionSpec) -> Approximation | None:
    """Return the approximation of a spec's method; None if the method is exact."""
    method = None if isinstance(spec.method, Exact) else METHODS.of(spec.method)
    return method if isinstance(method, Approximation) else None


def scored(problem: Problem) -> tuple[Tensor, Tensor, float]:
    """Return queries, keys and a factor whose product is the score over the temperature."""
    score = SCORES.of(problem.spec.score)
    if not isinstance(score, Product):
        raise ValueError(f"{problem.spec.score.name} is no product; ask `refuses` first")
    q, k = problem.q, problem.k
    if not score.plain:  # what they do to queries and keys is done in float32
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    q, k, factor = score.factors(q, k, problem.learned)
    return q, k, factor / problem.spec.normalizer.temperature


def no_softmax(spec: AttentionSpec) -> Iterator[Refusal]:
    """Yield the refusals of a method that replaces a softmax over dot products."""
    if not isinstance(SCORES.of(spec.score), Product) or spec.score.name == "gaussian":
        known = "dot, scaled_dot, bilinear or cosine"
        yield "spec.score", f"score {spec.score.name} is no product of a query and a key; take {known}, or method exact"
    if spec.softcap is not None:
        yield "spec.softcap", "scores are never there to be capped; leave softcap out, or take method exact"
    plain = Softmax(temperature=spec.normalizer.temperature)
    if spec.normalizer != plain:
        yield (
            "spec.normalizer",
            f"it stands for a plain softmax, and this is {_described(spec)}; take softmax with at most a temperature, "
            "or method exact",
        )


def nothing_between(spec: AttentionSpec) -> Iterator[Refusal]:
    """Yield the refusals of every approximation: a bias of positions, and keys that the spec adds."""
    if POSITIONS.of(spec.position).biased:
        yield (
            "spec.position",
            f"{spec.position.name} adds a bias to each pair, and pairs are never there; take a position that is added "
            "to tokens or turns queries and keys, as rope does, or method exact",
        )
    for field in ("add_bias_kv", "add_zero_attn"):
        if getattr(spec, field):
            yield f"spec.{field}", "keys beside the sequence have no place in it; leave it out, or take method exact"


def no_masks(spec: AttentionSpec) -> Iterator[Refusal]:
    """Yield the refusals of a method that mixes all keys."""
    if spec.masks:
        yield (
            "spec.masks",
            f"every query sees all real keys, so a mask {spec.masks[0].name} cannot be kept; leave masks out and give "
            "key_mask or key_lengths, or take method exact, linear or performer (causal)",
        )


def no_order(spec: AttentionSpec) -> Iterator[Refusal]:
    """Yield the refusals of a running state, which supports causal masks alone."""
    if spec.masks and causal_offset(spec.masks, 1, 1) is None:
        names = ", ".join(mask.name for mask in spec.masks)
        yield (
            "spec.masks",
            f"a running state keeps no masks but causal alone, and these are {names}; take causal, or method exact",
        )


def reach_in(problem: Problem) -> int:
    """Return the r for which query i sees the keys up to i + r; all rows of the batch must have the same offset."""
    queries, keys = problem.q.shape[2], problem.k.shape[2]
    if not problem.spec.masks:
        return queries + keys
    reach = causal_offset(problem.spec.masks, queries, keys, problem.past)
    if reach is None:
        raise ValueError("the masks are not those of a running state; ask `refuses` first")
    if problem.offsets is None:
        return reach + problem.past
    offset = int(problem.offsets.flatten()[0]) if problem.offsets.numel() else 0
    return reach + max(-keys - queries - abs(reach), min(offset, keys + queries + abs(reach)))


def _described(spec: AttentionSpec) -> str:
    options = {name: value for name, value in spec.normalizer if name != "name" and value is not None}
    return f"{spec.normalizer.name} with {options}"
