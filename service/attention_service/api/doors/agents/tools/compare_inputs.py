"""``compare_inputs``: two inputs of one model, by what it predicts and by what its heads look at."""

from typing import Final

import numpy as np
from pydantic import Field

from attention_contract.base import WireModel
from attention_contract.operations import model_forward
from attention_contract.schemas.model_requests import ModelForwardReply
from attention_contract.schemas.weights import StatisticName
from attention_contract.tensors import Array
from attention_service.api.doors.agents.agent_tool import (
    MAX_LISTED,
    AgentTool,
    HeadPlace,
    InputArguments,
    ToolAnswer,
    ToolContext,
    ToolResult,
    log_probabilities,
    number,
    rounded,
)
from attention_service.api.doors.agents.opened_inputs import InputHandle, OpenedInput, listing
from attention_service.api.doors.agents.tools.open_input import PredictedToken
from attention_service.api.doors.agents.tools.rank_heads import head_statistics

_LISTED_BY_DETAIL: Final = {"concise": 3, "detailed": 10}
_DIFFERING: Final = {"concise": 8, "detailed": MAX_LISTED}


class CompareArguments(InputArguments):
    """Two inputs of one model, and a statistic of its heads."""

    other: InputHandle
    """The handle of the input to compare with."""
    statistic: StatisticName = "entropy"
    """The statistic by which heads are compared; see rank_heads."""
    count: int = Field(default=5, ge=1, le=MAX_LISTED)
    """Heads to list."""


class DifferingToken(WireModel):
    """One position at which the two have different tokens."""

    position: int
    token: str
    other: str


class ComparedHead(HeadPlace):
    """One head in both inputs."""

    value: float
    other: float
    difference: float
    """other − value"""


class CompareAnswer(ToolAnswer):
    """The differences of two inputs."""

    token_counts: tuple[int, int]
    differing: list[DifferingToken]
    """Positions with different tokens, of as many as both have; the first ones."""
    predicted: list[PredictedToken]
    other_predicted: list[PredictedToken]
    divergence: float | None = None
    """Σ p · ln(p / q) of the prediction p after the last token of the input and q of the other, in nats."""
    statistic: str
    heads: list[ComparedHead]
    """The heads whose statistic differs most."""


async def compare_inputs(call: ToolContext, arguments: CompareArguments) -> ToolResult:
    """Compare two open inputs of one model, such as a text and the same with one name changed.

    Where their tokens differ, what the model predicts after each, and which heads look differently by a statistic.
    Heads that differ are candidates for effect_of_edit with action patch. Detailed: more predictions and tokens.
    """
    first = call.input(arguments.input)
    second = call.input(arguments.other, "other", model=first.model)
    replies, statistics = [], []
    for opened in (first, second):
        statistics.append(await head_statistics(call, opened, [arguments.statistic], None))
        logits = [] if opened.predicts is None else ["logits"]
        question = opened.fields | {"return": logits} | listing(opened.predicts, _LISTED_BY_DETAIL[arguments.detail])
        replies.append(await call.requests.ask(model_forward, question, model=opened.model))
    heads = _heads(statistics[0], statistics[1], arguments.statistic)[: arguments.count]
    differing = _differing(first, second)
    predicted, other = map(_predicted, replies)
    divergence = None if replies[0].logits is None else _divergence(*(np.asarray(reply.logits) for reply in replies))
    answer = CompareAnswer(
        summary=_summary(len(differing), predicted, other, heads, arguments.statistic),
        token_counts=(len(first.tokens), len(second.tokens)),
        differing=differing[: _DIFFERING[arguments.detail]],
        predicted=predicted,
        other_predicted=other,
        divergence=divergence,
        statistic=arguments.statistic,
        heads=heads,
    )
    return ToolResult(answer)


def _heads(
    first: dict[tuple[int | str, int], dict[str, float | None]],
    second: dict[tuple[int | str, int], dict[str, float | None]],
    statistic: str,
) -> list[ComparedHead]:
    """Return the heads that both have, the largest difference first."""
    compared = []
    for (layer, head), values in first.items():
        value, other = values[statistic], second.get((layer, head), {}).get(statistic)
        if value is not None and other is not None:
            known = {"value": number(value), "other": number(other), "difference": number(other - value)}
            compared.append(ComparedHead(layer=layer, head=head, **known))
    return sorted(compared, key=lambda head: -abs(head.difference))


def _differing(first: OpenedInput, second: OpenedInput) -> list[DifferingToken]:
    return [
        DifferingToken(position=position, token=token, other=other)
        for position, (token, other) in enumerate(zip(first.tokens, second.tokens, strict=False))
        if token != other
    ]


def _predicted(reply: ModelForwardReply) -> list[PredictedToken]:
    last = reply.predictions[-1].top if reply.predictions else []
    return [PredictedToken(token=top.token, probability=number(top.probability)) for top in last]


def _divergence(first: Array, second: Array) -> float | None:
    """Return Σ p · ln(p / q) of two predictions, of logits ``[1, V]``."""
    log_p, log_q = (log_probabilities(logits.reshape(-1)) for logits in (first, second))
    return rounded((np.exp(log_p) * (log_p - log_q)).sum())


def _summary(
    differing: int, first: list[PredictedToken], second: list[PredictedToken], heads: list[ComparedHead], statistic: str
) -> str:
    sentence = f"The inputs differ at {differing} positions"
    if first and second:
        sentence += (
            f"; the likeliest prediction is {first[0].token!r} after one and {second[0].token!r} after the other"
        )
    if heads:
        sentence += f"; by {statistic}, head {heads[0]} differs most, by {heads[0].difference:g}"
    return sentence + "."


TOOL: Final = AgentTool("Compare two inputs", CompareArguments, CompareAnswer, compare_inputs)
