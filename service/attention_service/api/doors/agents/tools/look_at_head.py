"""``look_at_head``: the tokens that one head looks at, and a picture of it."""

from typing import Any, Final

import numpy as np
from pydantic import Field

from attention_contract.base import Listed, WireModel
from attention_contract.exact_types import Index
from attention_contract.operations import model_weights
from attention_contract.schemas.weights import TopKeys
from attention_service.api.doors.agents.agent_tool import (
    PNG,
    AgentTool,
    HeadArguments,
    HeadPlace,
    TokenWeight,
    ToolAnswer,
    ToolContext,
    ToolResult,
    number,
    rounded,
    token_at,
    tokens_of,
)
from attention_service.api.doors.agents.array_addresses import ArrayAddress
from attention_service.api.doors.agents.tools.rank_heads import BESIDE

MAX_ROWS: Final = 32
"""Tokens whose rows an answer tells at most."""
_ROWS: Final = {"concise": 12, "detailed": MAX_ROWS}
_STATISTICS: Final = [*BESIDE, "previous_token", "duplicate_token", "induction"]
_SHARES: Final = ("first_key", "own_position", "previous_token", "duplicate_token", "induction")
"""Statistics that the summary tells."""
_FIELDS: Final = {"layers": "layer", "select.heads": "head", "select.queries": "queries"}
_PICTURE: Final = {"view": "head", "width": 800}


class LookAtHeadArguments(HeadArguments):
    """An input, a head, and the tokens whose rows are told."""

    queries: Listed[Index] | None = Field(default=None, min_length=1, max_length=MAX_ROWS)
    """Positions of the tokens that look; default: the last 12, or in a detailed answer 32."""
    top_k: int = Field(default=3, ge=1, le=10)
    """Keys to name for each of them."""
    picture: bool = False
    """Add a heat map of the head as a PNG."""


class QueryRow(WireModel):
    """One token that looks, and what it looks at most."""

    position: int
    token: str
    keys: list[TokenWeight]


class HeadAnswer(ToolAnswer):
    """The tokens that one head looks at."""

    model: str
    layer: int | str
    head: int
    statistics: dict[str, float | None]
    """Means over all tokens of the input."""
    rows: list[QueryRow]


async def look_at_head(call: ToolContext, arguments: LookAtHeadArguments) -> ToolResult:
    """Look at one head over an input: the tokens that each token attends to most, with weights, and statistics.

    With `picture` a heat map comes too. The whole array of weights is a resource link.
    """
    opened = call.input(arguments.input)
    place = arguments.place
    of_head: dict[str, Any] = {"layers": [place.layer], "select": {"heads": [place.head]}}
    question = opened.fields | of_head | {"return_weights": False, "statistics": _STATISTICS, "top_k": arguments.top_k}
    if arguments.queries is not None:
        question["select"] = {"heads": [place.head], "queries": arguments.queries}
    reply = await call.requests.ask(model_weights, question, model=opened.model)
    layer = reply.layers[0]
    query_tokens, key_tokens = tokens_of(reply, place.layer)
    rows = _rows(layer.top, arguments.queries, query_tokens, key_tokens)[-_ROWS[arguments.detail] :]
    pictures = []
    if arguments.picture:
        pictures = [
            await call.requests.fetch(model_weights, opened.fields | of_head, PNG, _PICTURE, model=opened.model)
        ]
    means = {name: np.asarray(getattr(layer.statistics, name)) for name in _STATISTICS}
    statistics: dict[str, float | None] = {
        name: rounded(x.reshape(-1, x.shape[-1]).mean(0)[place.head]) for name, x in means.items()
    }
    answer = HeadAnswer(
        summary=_summary(place, rows, statistics),
        model=opened.model,
        layer=place.layer,
        head=place.head,
        statistics=statistics,
        rows=rows,
    )
    return ToolResult(answer, [ArrayAddress(arguments.input, place.layer, place.head, "weights").link()], pictures)


def _rows(top: TopKeys, queries: list[int] | None, query_tokens: list[str], key_tokens: list[str]) -> list[QueryRow]:
    """Return the keys of each query. ``top``: arrays ``[1, Lq, k]``, or ``[B, 1, Lq, k]`` of which the first counts."""
    keys, weights = (np.asarray(x).reshape(-1, *np.shape(x)[-2:])[0] for x in (top.keys, top.weights))  # [Lq, k]
    queries = list(range(len(keys))) if queries is None else queries
    return [
        QueryRow(
            position=query,
            token=token_at(query_tokens, query),
            keys=[
                TokenWeight(position=int(key), token=token_at(key_tokens, int(key)), weight=number(weight))
                for key, weight in zip(keys[at], weights[at], strict=True)
                if key >= 0
            ],
        )
        for at, query in enumerate(queries)
    ]


def _summary(place: HeadPlace, rows: list[QueryRow], statistics: dict[str, float | None]) -> str:
    named = {name: value for name, value in statistics.items() if value is not None and name in _SHARES}
    shares = ", ".join(f"{name} {value:g}" for name, value in named.items())
    last = rows[-1]
    looks = f"token {last.position} {last.token!r} looks most at " + (
        f"token {last.keys[0].position} {last.keys[0].token!r} ({last.keys[0].weight:g})" if last.keys else "nothing"
    )
    return f"In head {place}, {looks}. Shares over all tokens: {shares}."


TOOL: Final = AgentTool("Look at one head", LookAtHeadArguments, HeadAnswer, look_at_head, _FIELDS)
