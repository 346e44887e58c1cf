"""Names of what a reply has numbers of, as its request states them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attention_contract.schemas.attention import token_counts
from attention_contract.schemas.attribution import AttributionRequest
from attention_contract.schemas.complexity import ComplexityRequest, Sweep
from attention_contract.schemas.rollout import RolloutOptions
from attention_contract.schemas.weights import WeightsRequest


@dataclass(frozen=True)
class Names:
    """The names of what a reply has numbers of."""

    title: str = ""
    """The module, recording or model."""
    keys: Sequence[str] | None = None
    """A label for each key."""
    queries: Sequence[str] | None = None
    """A label for each returned query."""
    heads: Sequence[int] | None = None
    """The index of each returned head; default: counted from 0."""
    averaged: bool = False
    """The weights are averaged over heads."""
    method: str | None = None
    """The attribution to draw, by default the first of the reply; or the way of a rollout."""
    pool: int = 1
    """The queries and keys of each cell of the reply's pooled weights."""
    sizes: tuple[int, int] | None = None
    """Queries and keys; default: the cells' number."""
    sweep: Sweep | None = None
    """The sizes that a reply about costs is along."""


def names_of(request: Any, title: str = "", past: int = 0) -> Names:
    """The names in a request for the numbers in its reply. ``past``: the tokens of its session."""
    if isinstance(request, ComplexityRequest):
        return Names(title, sweep=request.sweep)
    if isinstance(request, RolloutOptions):
        traced = None if request.queries is None else [str(row) for row in request.queries]
        return Names(title, queries=traced, method=request.method)
    if not isinstance(request, WeightsRequest | AttributionRequest):
        return Names(title)
    selected = request.select
    rows = None if selected is None else selected.queries
    queries = request.query_labels
    if queries is None and request.labels is not None and request.key is None:
        queries = request.labels[-token_counts(request)[0] :]
    if rows is not None:
        queries = [str(row) if queries is None else queries[row] for row in rows]
    heads = None if selected is None else selected.heads
    method = request.methods[0] if isinstance(request, AttributionRequest) else None
    averaged = isinstance(request, WeightsRequest) and request.average_heads
    pool, sizes = 1, None
    if isinstance(request, WeightsRequest) and request.pool is not None and not request.return_weights:
        pool, (every, keys) = request.pool, token_counts(request, past)
        sizes = every if rows is None else len(rows), keys
    return Names(title, request.labels, queries, heads, averaged, method, pool, sizes)


def heading(names: Names, *parts: str) -> str:
    """The heading of a picture: the title, and what is shown of it."""
    return " · ".join(part for part in (names.title, *parts) if part)
