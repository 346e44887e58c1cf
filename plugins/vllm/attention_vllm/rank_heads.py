"""The heads of one rank among those of the model, under tensor parallelism.

Requests count the heads of the model. Each rank computes its own heads and their statistics, which need no other rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from attention_service.core.edits import BoundEdit, narrowed
from attention_service.core.problem import Selection
from attention_vllm.layer_facts import LayerFacts


@dataclass(frozen=True)
class RankHeads:
    """The part of each layer's heads that is on one rank: as many on each, in the order of the ranks."""

    rank: int = 0
    ranks: int = 1
    copies: int = 1
    """The ranks that have the same key/value head: more than one where there are more ranks than such heads."""

    @classmethod
    def of(cls, rank: int, ranks: int, kv_heads: int) -> "RankHeads":
        """Return the share of a rank. ``kv_heads``: the key/value heads of the model."""
        return cls(rank, ranks, max(1, ranks // kv_heads))

    @property
    def named(self) -> dict[str, int]:
        """The fields of a result that name the rank; none of the only one."""
        return {} if self.ranks == 1 else {"rank": self.rank, "ranks": self.ranks}

    def whole(self, facts: LayerFacts) -> LayerFacts:
        """Return the facts of a layer with the heads of all ranks. ``facts``: of this rank."""
        return replace(facts, heads=facts.heads * self.ranks, kv_heads=facts.kv_heads * self.ranks // self.copies)

    def own_edits(self, edits: Sequence[BoundEdit], facts: LayerFacts) -> list[BoundEdit]:
        """Return the edits of a layer's taps as they apply to the heads of this rank."""
        own = []
        for edit in edits:
            of_keys = edit.tap in ("k", "v")
            count = facts.kv_heads if of_keys else facts.heads
            first = (self.rank // self.copies if of_keys else self.rank) * count
            # Key/value heads are chosen as heads of an attention that has no other ones.
            own += narrowed([edit], Selection(heads=range(first, first + count)), 1, 1)
        return own

    def own_heads(self, heads: Sequence[int] | None, facts: LayerFacts) -> "ToldHeads":
        """Return the part of the heads that a request asks for that is on this rank."""
        if self.ranks == 1:
            return ToldHeads(None if heads is None else tuple(heads), None)
        first = self.rank * facts.heads
        here = range(first, first + facts.heads)
        if heads is None:
            return ToldHeads(None, tuple(here))
        places = [at for at, head in enumerate(heads) if head in here]
        return ToldHeads(tuple(heads[at] - first for at in places), tuple(places))


@dataclass(frozen=True)
class ToldHeads:
    """The heads of one rank and layer to tell of."""

    heads: tuple[int, ...] | None
    """Counted on the rank; None for all."""
    places: tuple[int, ...] | None
    """Their places among those of the reply; None if the rank has all of them."""


WHOLE: Final = RankHeads()
"""The share of the only rank."""
