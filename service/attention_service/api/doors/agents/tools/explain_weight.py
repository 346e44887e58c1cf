"""``explain_weight``: the attention of one token in one head, step by step in numbers."""

from typing import Final

import numpy as np
from pydantic import Field

from attention_contract.base import WireModel
from attention_contract.operations import model_forward
from attention_contract.schemas.model_requests import LayerTaps
from attention_contract.tensors import Array
from attention_service.api.doors.agents.agent_tool import (
    AgentTool,
    HeadArguments,
    HeadPlace,
    ToolAnswer,
    ToolContext,
    ToolResult,
    has_own_tokens,
    number,
    rounded,
    token_at,
    tokens_of,
)
from attention_service.api.doors.agents.array_addresses import ArrayAddress

_TAPS: Final = ("q", "k", "v", "scores", "weights", "context")
_KEYS: Final = {"concise": 4, "detailed": 32}
_FIELDS: Final = {"layers": "layer", "select.heads": "head", "select.queries": "position"}
_FORMULAS: Final = {
    "dot": "q · k: how well the query of the token fits the key of the other, after any rotation by position",
    "score": "dot / √d, with d the width of a head, and any bias by position; what masks forbid counts as −∞",
    "weight": "the normalizer, usually exp(score) / Σ exp(score): the share of this key; the row adds up to 1",
    "share": "‖weight · v‖ / Σ ‖weight · v‖: the part of the head's output that this token's value makes",
    "context": "Σ weight · v: what the head hands on for this token",
}


class ExplainArguments(HeadArguments):
    """An input, a head, and the token that looks."""

    position: int | None = Field(default=None, ge=0, lt=2**31)
    """The position of the token that looks; default: the last of the text, in layers of other tokens the first."""


class KeyStep(WireModel):
    """One token that is looked at, from its dot product to its share of the output."""

    position: int
    token: str
    dot: float
    score: float
    weight: float
    share: float


class ExplainAnswer(ToolAnswer):
    """One token's attention in one head."""

    model: str
    position: int
    token: str
    head_width: int
    """d, the width of queries and keys."""
    formulas: dict[str, str]
    """The meaning of each number, in the order of the computation."""
    keys: list[KeyStep]
    """The keys with the largest weights."""
    other_weight: float
    """The weight of all keys that are not listed."""
    context_norm: float
    """‖Σ weight · v‖"""
    error: float | None
    """‖context − Σ weight · v‖ / ‖context‖ of the numbers as they were answered: rounding alone, if all is well."""


async def explain_weight(call: ToolContext, arguments: ExplainArguments) -> ToolResult:
    """Explain one token's attention in one head step by step, in numbers.

    For the keys with the largest weights: the dot product of query and key, the score, the weight, and the share of the
    head's output, each with its formula. Use it when look_at_head shows a weight that surprises. Detailed: 32 keys in
    place of 4. Whole arrays are resource links.
    """
    opened = call.input(arguments.input)
    place = arguments.place
    position = arguments.position
    if position is None:
        position = len(opened.tokens) - 1 if has_own_tokens(place.layer) else 0
    select = {"heads": [place.head], "queries": [position]}
    question = opened.fields | {"layers": [place.layer], "return": list(_TAPS), "select": select, "top_k": 0}
    reply = await call.requests.ask(model_forward, question, model=opened.model)
    q, k, v, scores, weights, context = _arrays(reply.layers[0])
    query_tokens, key_tokens = tokens_of(reply, place.layer)
    norms = weights * np.linalg.norm(v, axis=-1)
    shares = norms / norms.sum() if norms.sum() else norms
    order = np.argsort(-weights, kind="stable")[: _KEYS[arguments.detail]]
    keys = [
        KeyStep(
            position=at,
            token=token_at(key_tokens, at),
            dot=number(q @ k[at]),
            score=number(scores[at]),
            weight=number(weights[at]),
            share=number(shares[at]),
        )
        for at in order.tolist()
        if weights[at] > 0
    ]
    length = np.linalg.norm(context)
    error = np.linalg.norm(context - weights @ v)
    token = token_at(query_tokens, position)
    answer = ExplainAnswer(
        summary=_summary(place, position, token, keys),
        model=opened.model,
        position=position,
        token=token,
        head_width=len(q),
        formulas=_FORMULAS,
        keys=keys,
        other_weight=number(max(0.0, weights.sum() - sum(weights[key.position] for key in keys))),
        context_norm=number(length),
        error=rounded(error / length if length else error, 2),
    )
    links = [ArrayAddress(arguments.input, place.layer, place.head, tap).link() for tap in _TAPS]
    return ToolResult(answer, links)


def _arrays(taps: LayerTaps) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Return q ``[D]``, k ``[Lk, D]``, v ``[Lk, Dv]``, scores and weights ``[Lk]`` and context ``[Dv]`` of one query.

    Layers that see images beside a text have a batch dimension, of which the first entry counts.
    """
    arrays = [np.asarray(getattr(taps, name), np.float64) for name in _TAPS]
    q, k, v, scores, weights, context = (x.reshape(-1, *x.shape[-2:])[0] for x in arrays)
    return q[0], k, v, scores[0], weights[0], context[0]


def _summary(place: HeadPlace, position: int, token: str, keys: list[KeyStep]) -> str:
    sentence = f"In head {place}, token {position} {token!r} "
    if not keys:
        return sentence + "looks at nothing."
    first = keys[0]
    return sentence + (
        f"gives most weight to token {first.position} {first.token!r}: dot {first.dot:g}, score {first.score:g}, "
        f"weight {first.weight:g}, {first.share:.0%} of the head's output."
    )


TOOL: Final = AgentTool("Explain a token's attention", ExplainArguments, ExplainAnswer, explain_weight, _FIELDS)
