"""The names of what a reply has numbers of, as its request states them."""

from typing import Any

from attention_contract.reply_names import Names
from attention_contract.schemas.analyses.attribution import AttributionRequest
from attention_contract.schemas.analyses.rollout import RolloutOptions, RolloutRequest
from attention_contract.schemas.attention import ForwardRequest, RawInputs, Select, token_counts
from attention_contract.schemas.costs.complexity import ComplexityRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.sessions import SessionWeightsRequest
from attention_contract.schemas.weights import WeightsRequest


def names_of(request: Any, title: str = "", past: int | None = None) -> Names:
    """The names in a request for the numbers in its reply. ``past``: the tokens of its session, if they are known."""
    if isinstance(request, ComplexityRequest):
        return Names(title, sweep=request.sweep)
    if isinstance(request, RolloutOptions):
        labels = request.labels if isinstance(request, RolloutRequest) else None
        rows = request.queries
        traced = labels if rows is None else [str(row) if labels is None else labels[row] for row in rows]
        return Names(title, labels, traced, method=request.method)
    if isinstance(request, ModelWeightsRequest | ModelForwardRequest | ModelGradientsRequest):
        chosen = request.select or Select()
        numbers = None if chosen.queries is None else [str(row) for row in chosen.queries]
        images = [each.base64 for each in request.all_images]
        averaged = not isinstance(request, ModelGradientsRequest) and request.average_heads
        pool = request.pool or 1 if isinstance(request, ModelWeightsRequest) else 1
        return Names(title, None, numbers, chosen.heads, averaged, images=images, pool=pool)
    if not isinstance(request, ForwardRequest | WeightsRequest | AttributionRequest):
        return Names(title)
    selected = request.select
    rows = None if selected is None else selected.queries
    heads = None if selected is None else selected.heads
    if isinstance(request, ForwardRequest):
        by_head = isinstance(request, RawInputs) and request.num_heads is None and request.query.ndim > 2
        queries = None if rows is None else [str(row) for row in rows]
        return Names(title, None, queries, heads, request.average_heads, by_head)
    queries = request.query_labels
    if queries is None and request.labels is not None and request.key is None:
        queries = request.labels[-token_counts(request)[0] :]
    if rows is not None:
        queries = [str(row) if queries is None else queries[row] for row in rows]
    method = request.methods[0] if isinstance(request, AttributionRequest) else None
    averaged = isinstance(request, WeightsRequest) and request.average_heads
    pool, sizes = 1, None
    if isinstance(request, WeightsRequest) and request.pool is not None and not request.return_weights:
        pool, (every, keys) = request.pool, token_counts(request, past or 0)
        known = past is not None or not isinstance(request, SessionWeightsRequest)
        sizes = (every if rows is None else len(rows), keys) if known else None
    return Names(title, request.labels, queries, heads, averaged, method=method, pool=pool, sizes=sizes)
