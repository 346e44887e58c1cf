"""Common base of the approximations: edits, taps and limits around their own arithmetic."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec, Softmax
from attention_service.core import edits as interventions
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.base import Kernel
from attention_service.core.masks import reach_of
from attention_service.core.methods.base import APPROXIMATE_TAPS, Refusal
from attention_service.core.positions import POSITIONS
from attention_service.core.scores import SCORES, Product
from attention_service.core.types import Learned, Problem, Widths
from attention_service.core.visibility import without_padding


class OwnArithmetic(ABC):
    """Approximation defined by its own arithmetic on queries, keys and values."""

    def taps(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Return the taps without weights."""
        return APPROXIMATE_TAPS

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return no learned tensors."""
        return {}

    def letters(self) -> Mapping[str, str]:
        """Return no letters of its own."""
        return {}

    def carried(self, *, module: bool) -> frozenset[str] | None:
        """Return an empty set: a step takes past keys and values."""
        return frozenset()

    def attend(
        self, problem: Problem, kernel: Kernel, taps: Collection[str], edits: Sequence[BoundEdit]
    ) -> dict[str, Tensor]:
        """Return every tap, and any additional results."""
        return passed(problem, edits, self._context)

    @abstractmethod
    def _context(self, problem: Problem) -> dict[str, Tensor]:
        """Compute ``context`` and any additional results; padded keys and values are zeros."""


def passed(
    problem: Problem, edits: Sequence[BoundEdit], context: Callable[[Problem], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return every tap of an approximation as a node of the graph to the context, and any additional results.

    ``context`` takes the problem with edits applied and zeros for padded keys and values.
    """
    roles = (("q", problem.q), ("k", problem.k), ("v", problem.v))
    taps = {tap: interventions.apply(edits, tap, x) for tap, x in roles}
    found = context(without_padding(replace(problem, q=taps["q"], k=taps["k"], v=taps["v"])))
    return taps | found | {"context": interventions.apply(edits, "context", found["context"])}


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
    if spec.masks and reach_of(spec.masks, 1, 1) is None:
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
    reach = reach_of(problem.spec.masks, queries, keys, problem.past)
    if reach is None:
        raise ValueError("the masks are not those of a running state; ask `refuses` first")
    if problem.offsets is None:
        return reach + problem.past
    offset = int(problem.offsets.flatten()[0]) if problem.offsets.numel() else 0
    return reach + max(-keys - queries - abs(reach), min(offset, keys + queries + abs(reach)))


def _described(spec: AttentionSpec) -> str:
    options = {name: value for name, value in spec.normalizer if name != "name" and value is not None}
    return f"{spec.normalizer.name} with {options}"
