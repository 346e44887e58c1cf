"""``rank_heads``: the heads of a model by a statistic of their attention over an input."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from pydantic import Field

from attention_contract.base import Listed
from attention_contract.descriptions import described
from attention_contract.errors import InvalidRequest
from attention_contract.operations import model_weights
from attention_contract.schemas.model_requests import ModelWeightsReply
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.weights import BY_KEY, NEEDS_NEEDLE, NEEDS_PAIRS, HeadStatistics, StatisticName
from attention_service.api.doors.agents.agent_tool import (
    MAX_LISTED,
    AgentTool,
    HeadPlace,
    InputArguments,
    ToolAnswer,
    ToolContext,
    ToolResult,
    number,
    rounded,
)
from attention_service.api.doors.agents.opened_inputs import OpenedInput

BESIDE: Final[tuple[StatisticName, ...]] = ("entropy", "max_weight", "mean_distance", "first_key", "own_position")
"""Statistics that a detailed answer tells too."""


class RankHeadsArguments(InputArguments):
    """An input, a statistic, and how many heads to list."""

    statistic: StatisticName
    """The statistic to rank by. previous_token finds heads that copy the token before, induction those that repeat
    what followed before, first_key attention sinks, entropy diffuse heads, mean_distance those that look far away."""
    lowest: bool = False
    """Rank the lowest value first."""
    count: int = Field(default=5, ge=1, le=MAX_LISTED)
    """Heads to list."""
    layers: Listed[LayerRef] | None = Field(default=None, min_length=1, max_length=512)
    """Only these layers; default: all."""


class RankedHead(HeadPlace):
    """One head and its value."""

    value: float
    others: dict[str, float | None] | None = None
    """Other statistics of the head, in a detailed answer."""


class RankedAnswer(ToolAnswer):
    """The first heads of the ranking."""

    statistic: str
    meaning: str
    """The definition of the statistic, with its source."""
    mean: float
    """The mean over all heads."""
    head_count: int
    """Heads that were ranked."""
    heads: list[RankedHead]


async def rank_heads(call: ToolContext, arguments: RankHeadsArguments) -> ToolResult:
    """Rank all heads of a model by one statistic of what they look at over an input.

    Which head copies the previous token, which is an induction head, which is a sink? Values are means over the tokens
    of the input. Then call look_at_head for what a head looks at, or effect_of_edit for what depends on it. Detailed:
    five more statistics of each head.
    """
    statistic = arguments.statistic
    opened = call.input(arguments.input)
    beside = [] if arguments.detail == "concise" else [name for name in BESIDE if name != statistic]
    statistics = await head_statistics(call, opened, [statistic, *beside], arguments.layers)
    values = {place: rows[statistic] for place, rows in statistics.items() if rows[statistic] is not None}
    ranked = sorted(values, key=lambda place: values[place] or 0.0, reverse=not arguments.lowest)[: arguments.count]
    if not ranked:
        raise InvalidRequest.at(
            "statistic", f"no head has {statistic} over this input. Call rank_heads with another one"
        )
    heads = [
        RankedHead(
            layer=layer,
            head=head,
            value=number(values[layer, head]),
            others={name: rounded(statistics[layer, head][name]) for name in beside} if beside else None,
        )
        for layer, head in ranked
    ]
    first = f"head {heads[0]} has the {'lowest' if arguments.lowest else 'highest'} {statistic}, {heads[0].value:g}"
    mean = number(np.mean([value for value in values.values() if value is not None]))
    answer = RankedAnswer(
        summary=f"Of {len(values)} heads of {opened.model}, {first}; the mean is {mean:g}.",
        statistic=statistic,
        meaning=described(HeadStatistics)[statistic].description or "",
        mean=mean,
        head_count=len(values),
        heads=heads,
    )
    return ToolResult(answer)


async def head_statistics(
    call: ToolContext, opened: OpenedInput, statistics: list[StatisticName], layers: list[LayerRef] | None
) -> dict[tuple[LayerRef, int], dict[str, float | None]]:
    """Return statistics by layer and head, of every head of an input's model.

    Raises InvalidRequest for those of parts of a text.
    """
    if by_key := BY_KEY.intersection(statistics):
        raise InvalidRequest.at("statistic", f"{min(by_key)} is a number for each token; name another one")
    if parts := {"classes", *NEEDS_NEEDLE, *NEEDS_PAIRS}.intersection(statistics):
        name = min(parts)
        raise InvalidRequest.at("statistic", f"{name} needs parts of the text, which no tool takes; name another one")
    question: dict[str, Any] = {"statistics": statistics, "return_weights": False, "layers": layers or "all"}
    reply = await call.requests.ask(model_weights, opened.fields | question, model=opened.model)
    return dict(_by_head(reply, statistics))


def _by_head(
    reply: ModelWeightsReply, statistics: list[StatisticName]
) -> Iterator[tuple[tuple[LayerRef, int], dict[str, float | None]]]:
    for layer in reply.layers:
        arrays = {name: np.asarray(getattr(layer.statistics, name), np.float64) for name in statistics}
        # Layers that see images beside a text have a batch dimension of crops.
        heads = {name: array.reshape(-1, array.shape[-1]).mean(0) for name, array in arrays.items()}
        for head in range(len(heads[statistics[0]])):
            values = {name: float(array[head]) for name, array in heads.items()}
            yield (layer.layer, head), {name: x if np.isfinite(x) else None for name, x in values.items()}


TOOL: Final = AgentTool("Rank heads by a statistic", RankHeadsArguments, RankedAnswer, rank_heads)
