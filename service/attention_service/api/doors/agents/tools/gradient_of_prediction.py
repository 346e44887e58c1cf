"""``gradient_of_prediction``: the tokens and heads on which a prediction depends, by exact gradients."""

from typing import Any, Final

import numpy as np
from pydantic import Field

from attention_contract.base import WireModel
from attention_contract.operations import model_gradients
from attention_contract.schemas.model_requests import PredictedLogit
from attention_service.api.doors.agents.agent_tool import (
    MAX_LISTED,
    AgentTool,
    HeadPlace,
    InputArguments,
    ToolAnswer,
    ToolContext,
    ToolResult,
    number,
    token_at,
)

_LISTED_TOKENS: Final = {"concise": 5, "detailed": 256}


class GradientArguments(InputArguments):
    """An input, and the prediction whose gradient is asked for."""

    of: PredictedLogit = Field(default_factory=PredictedLogit)
    """The number: ln p(token) after a position, or with against ln p(token) − ln p(against). Default: of the likeliest
    token after the last one. A token is an id, or a text that is one token, space included, as in " met"."""
    count: int = Field(default=5, ge=1, le=MAX_LISTED)
    """Heads to list."""


class TokenShare(WireModel):
    """The share of one input token."""

    position: int
    token: str
    value: float
    """∂L/∂embedding · embedding: above 0 if the token speaks for the prediction."""


class HeadShare(HeadPlace):
    """The share of one head."""

    value: float
    """Σ ∂L/∂context · context: how much L falls, to first order, if the head is knocked out."""


class GradientAnswer(ToolAnswer):
    """The tokens and heads on which a prediction depends."""

    value: float
    """L, the number that was differentiated."""
    token_id: int | None = None
    """The id of the token of which L is the log-probability."""
    tokens: list[TokenShare]
    """The tokens with the largest shares, either sign; in a detailed answer all of up to 256, by position."""
    heads: list[HeadShare]
    """The heads with the largest shares, either sign."""


async def gradient_of_prediction(call: ToolContext, arguments: GradientArguments) -> ToolResult:
    """Differentiate one prediction exactly: the tokens and the heads that speak for it or against it.

    The shares of heads are first-order estimates; confirm the largest with effect_of_edit. Detailed: every token.
    """
    opened = call.input(arguments.input)
    of = arguments.of.model_dump(exclude_none=True)
    question = opened.fields | {"of": of, "wrt": ["tokens"], "by_head": True}
    reply = await call.requests.ask(model_gradients, question, model=opened.model)
    names = reply.labels_of().tokens
    shares = np.asarray(reply.tokens, np.float64).reshape(-1)
    order = np.argsort(-np.abs(shares))[: _LISTED_TOKENS[arguments.detail]]
    if arguments.detail == "detailed":
        order = np.sort(order)
    tokens = [TokenShare(position=at, token=token_at(names, at), value=number(shares[at])) for at in order.tolist()]
    heads = sorted(
        (
            HeadShare(layer=layer.layer, head=head, value=number(value))
            for layer in reply.layers
            if layer.heads is not None
            for head, value in enumerate(np.asarray(layer.heads).reshape(-1, np.shape(layer.heads)[-1]).sum(0))
        ),
        key=lambda token: -abs(token.value),
    )[: arguments.count]
    value = number(np.sum(reply.value), 6)
    answer = GradientAnswer(
        summary=_summary(value, tokens, heads),
        value=value,
        token_id=reply.token[0] if reply.token else None,
        tokens=tokens,
        heads=heads,
    )
    return ToolResult(answer)


def _summary(value: float, tokens: list[TokenShare], heads: list[HeadShare]) -> str:
    largest: Any = max(tokens, key=lambda token: abs(token.value), default=None)
    sentence = f"L = {value:g}"
    if largest is not None:
        sentence += f"; token {largest.position} {largest.token!r} has the largest share, {largest.value:g}"
    if heads:
        sentence += f"; head {heads[0]} has the largest share of a head, {heads[0].value:g}"
    return sentence + "."


TOOL: Final = AgentTool("Gradient of a prediction", GradientArguments, GradientAnswer, gradient_of_prediction)
