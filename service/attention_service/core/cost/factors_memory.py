"""Memory of what scores are a product of: queries and keys as the score makes them."""

from dataclasses import dataclass

from attention_service.core.additive import BLOCK
from attention_service.core.cost.pairs import (
    score_cost,
    score_itemsize,
)
from attention_service.core.cost.preparing_memory import Apart
from attention_service.core.cost.workload import Workload


@dataclass(frozen=True)
class Rows:
    """The heads and queries of each sequence for which the stages are gone through."""

    heads: int
    queries: int
    picked: bool = False
    """Whether the queries are a copy, row by row."""
    gathered: bool = False
    """Whether keys and values are: those that each of the heads reads."""

    def pairs(self, work: Workload) -> int:
        """Over the batch."""
        return work.batch * self.heads * self.queries * work.keys


@dataclass(frozen=True)
class Factors:
    """Bytes of what the scores are a product of."""

    wide: int
    """Queries and keys in the dtype of the scores, where that is another."""
    standing: int
    """Those of them that serve as they are: what is made of others takes their place."""
    query: int
    """Made of the queries by the score, and scaled."""
    scaling: int
    """While they are scaled: as they were before."""
    key: int
    laid_query: int
    """Copied, so that a head lies behind the other."""
    laid_key: int
    layers: int
    """Of a hidden layer for each pair."""

    @classmethod
    def of(cls, work: Workload, rows: Rows) -> "Factors":
        """As the materialized kernel makes them."""
        c, score, lying = score_itemsize(work), score_cost(work), Apart.of(work)
        grouped = rows.heads != kv_heads_of(work, rows)
        queries = work.batch * rows.heads * rows.queries
        keys = work.batch * kv_heads_of(work, rows) * work.keys
        each = work.head_dim * c if c != work.itemsize else 0
        wide = (queries + keys) * each
        width = score.query_width or work.head_dim
        made = queries * score.query_width * c
        scaled = queries * width * c if score.scaled else 0
        laid = lying.q and not rows.picked and (work.batch > 1 or grouped) and not score.query_width
        by_head = work.batch * rows.heads * work.keys if score.by_query_head else keys
        pairs = rows.pairs(work) * score.layer
        layers = (score.layers if pairs > BLOCK else score.layers - 1) * min(BLOCK, pairs) if score.layer else 0
        return cls(
            wide=wide,
            standing=(queries * (not score.query_width) + keys * (not score.key_width)) * each,
            query=scaled or made,
            scaling=made if scaled else 0,
            key=by_head * score.key_width * c,
            laid_query=queries * width * c if laid else 0,
            laid_key=keys * work.head_dim * c
            if lying.k and not rows.gathered and work.batch > 1 and not score.key_width
            else 0,
            layers=layers * c,
        )

    @property
    def held(self) -> int:
        """While the pairs are scored."""
        return self.standing + self.query + self.scaling + self.key + self.laid_query + self.laid_key + self.layers


def made_factors(work: Workload, rows: Rows, factors: Factors) -> int:
    """What autograd keeps of the factors beside q, k and v in the dtype of the scores."""
    score, e = score_cost(work), score_itemsize(work)
    kept = (
        work.batch * rows.heads * rows.queries * score.query_kept
        + work.batch * work.kv_heads * work.keys * score.key_kept
    )
    if score.query_products and Apart.of(work).q and work.batch > 1:  # laid out for the product with what is learned
        kept += work.batch * rows.heads * rows.queries * work.head_dim
    return kept * e + (factors.query or factors.laid_query) + (factors.key or factors.laid_key)


def kv_heads_of(work: Workload, rows: Rows) -> int:
    """Of selected heads, each reads a copy of its own."""
    return rows.heads if rows.gathered else work.kv_heads
