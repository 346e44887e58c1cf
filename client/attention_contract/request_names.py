"""The names of what a reply has numbers of, as its request states them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from attention_contract.reply_names import OF_REPLY, Names
from attention_contract.schemas.analyses.attribution import AttributionRequest
from attention_contract.schemas.analyses.lenses import ModelLensRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.schemas.analyses.rollout import RolloutOptions, RolloutRequest
from attention_contract.schemas.attention import ForwardRequest, RawInputs, Select, WeightsSelect, token_counts
from attention_contract.schemas.costs.complexity import ComplexityRequest
from attention_contract.schemas.model_requests import (
    GivenAnswer,
    GivenUpstream,
    ModelForwardRequest,
    ModelGradientsRequest,
    ModelWeightsRequest,
)
from attention_contract.schemas.openai import ChatCompletionRequest, CompletionRequest
from attention_contract.schemas.openai_api.responses import ResponseRequest
from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_contract.schemas.prompts import ModelInput
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
    if isinstance(request, ChatCompletionRequest | CompletionRequest | ResponseRequest | TranscriptionRequest):
        return Names(title, heads=None if request.attention is None else request.attention.heads)
    if isinstance(request, ModelInput):
        return _names_of_model(request, title)
    if not isinstance(request, ForwardRequest | WeightsRequest | AttributionRequest):
        return Names(title)
    return _names_of_module(request, title, past)


def _names_of_model(request: ModelInput, title: str) -> Names:
    if isinstance(request, ModelEffectsRequest):
        return Names(title, request.labels, measured=_measured(request))
    if isinstance(request, ModelLensRequest):
        return Names(title, request.labels)
    if not isinstance(request, ModelWeightsRequest | ModelForwardRequest | ModelGradientsRequest):
        return Names(title)
    chosen = request.select or Select()
    images = [image.base64 for image in request.all_images]
    averaged = not isinstance(request, ModelGradientsRequest) and request.average_heads
    names = Names(title, rows=chosen.queries, heads=chosen.heads, averaged=averaged, images=images)
    if not isinstance(request, ModelWeightsRequest):
        return names
    return replace(
        names, keys=request.labels, queries=request.query_labels, columns=_keys_of(chosen), pool=request.pool or 1
    )


def _names_of_module(
    request: ForwardRequest | WeightsRequest | AttributionRequest, title: str, past: int | None
) -> Names:
    selected = request.select
    rows = None if selected is None else selected.queries
    heads = None if selected is None else selected.heads
    if isinstance(request, ForwardRequest):
        by_head = isinstance(request, RawInputs) and request.num_heads is None and request.query.ndim > 2
        return Names(title, rows=rows, heads=heads, averaged=request.average_heads, by_head=by_head)
    queries = request.query_labels
    if queries is None and request.labels is not None and request.key is None:
        queries = request.labels[-token_counts(request)[0] :]
    method = request.methods[0] if isinstance(request, AttributionRequest) else None
    averaged = isinstance(request, WeightsRequest) and request.average_heads
    pool, sizes = 1, None
    if isinstance(request, WeightsRequest) and request.pool is not None and not request.return_weights:
        pool, (every, keys) = request.pool, token_counts(request, past or 0)
        known = past is not None or not isinstance(request, SessionWeightsRequest)
        sizes = (every if rows is None else len(rows), keys) if known else None
    return Names(
        title, request.labels, queries, rows, _keys_of(selected), heads, averaged,
        method=method, pool=pool, sizes=sizes,
    )  # fmt: skip


def _measured(request: ModelEffectsRequest) -> str:
    """The number of the prediction that the effects of a request are changes of."""
    of = request.of
    if isinstance(of, GivenUpstream):
        return "Σ upstream · logits"
    if isinstance(of, GivenAnswer):
        return "log p of the answer" if of.answer == "sum" else "log p of the answer, mean of its tokens"
    if of is None:
        return f"log p({OF_REPLY})"
    number = "logit({})" if of.logit else "log p({})"
    return number.format(OF_REPLY) + ("" if of.against is None else f" − {number.format(str(of.against).strip())}")


def _keys_of(select: Select | None) -> Sequence[int] | None:
    """The keys that a request selects; None for all, and of requests that have no such field."""
    return select.keys if isinstance(select, WeightsSelect) else None
