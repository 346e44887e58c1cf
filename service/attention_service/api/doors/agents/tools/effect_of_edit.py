"""``effect_of_edit``: the change of a prediction and of the loss when heads are knocked out or patched."""

from collections import defaultdict
from typing import Any, Final, Literal

import numpy as np
from pydantic import Field, model_validator

from attention_contract.base import Listed, WireModel, at_fault
from attention_contract.errors import InvalidRequest
from attention_contract.exact_types import Index
from attention_contract.operations import model_forward
from attention_contract.schemas.model_requests import Prediction
from attention_service.api.doors.agents.agent_tool import (
    MAX_LISTED,
    AgentTool,
    HeadPlace,
    InputArguments,
    ToolAnswer,
    ToolContext,
    ToolResult,
    has_own_tokens,
    log_probabilities,
    number,
    rounded,
)
from attention_service.api.doors.agents.opened_inputs import InputHandle, OpenedInput, listing

_TOKENS_OF_LOSS: Final = 64
"""Tokens of the input over which a loss is told: a row of logits has a number for each token of the vocabulary."""
_FIELDS: Final = {
    "layers": "heads",
    "edits": "heads",
    "edits.heads": "heads",
    "edits.queries": "positions",
    "edits.value": "source",
}
_LISTED_BY_DETAIL: Final = {"concise": 3, "detailed": 10}


class EffectArguments(InputArguments):
    """An input, heads of its model, and the edit."""

    heads: Listed[HeadPlace] = Field(min_length=1, max_length=MAX_LISTED)
    """The heads to edit together."""
    action: Literal["knock_out", "patch"] = "knock_out"
    """knock_out puts zeros in place of what the heads bring to the residual stream; patch puts there what they bring in
    the input `source`."""
    positions: Listed[Index] | None = Field(default=None, min_length=1, max_length=4096)
    """Tokens of the input where the edit holds; default: all."""
    source: InputHandle | None = None
    """Another open input of the same model, for patch."""
    source_positions: Listed[Index] | None = Field(default=None, min_length=1, max_length=4096)
    """Tokens of `source` for patch, as many as `positions`; default: the same positions."""

    @model_validator(mode="after")
    def _fits(self) -> "EffectArguments":
        if self.action == "patch" and self.source is None:
            raise at_fault("source", "patch needs one: call open_input with the other text, and give its handle here")
        if self.action == "knock_out" and (self.source or self.source_positions):
            raise at_fault("source", "knock_out takes none; use action patch")
        if self.source_positions is not None and len(self.source_positions) != len(self.positions or ()):
            raise at_fault("source_positions", "expected as many as positions")
        return self


class ChangedToken(WireModel):
    """One token of the prediction after the last token."""

    token: str
    before: float
    """Its probability without the edit."""
    after: float


class ChangedLoss(WireModel):
    """The loss of one token of the input, in nats."""

    position: int
    token: str
    before: float
    after: float


class EffectAnswer(ToolAnswer):
    """The change by the edit."""

    divergence: float | None = None
    """Σ p · ln(p / q) of the prediction p after the last token without the edit and q with it, in nats."""
    predicted: list[ChangedToken]
    """The likeliest tokens of either run."""
    loss_before: float | None = None
    """Mean of −ln p(token) over the input's last tokens, in nats, of a model that predicts the next token."""
    loss_after: float | None = None
    loss_change: float | None = None
    """Above 0 if the edit makes the text less likely: the model needs these heads for it."""
    loss_tokens: int = 0
    """The number of tokens in the means."""
    tokens: list[ChangedLoss] | None = None
    """In a detailed answer, the tokens whose loss changes most."""


async def effect_of_edit(call: ToolContext, arguments: EffectArguments) -> ToolResult:
    """Knock heads out, or patch them with what they compute in another input, and see what changes.

    The answer has the change of the prediction after the last token and of the loss over the text. A loss that rises
    means that the model uses these heads. To test one head give one, to test a circuit give all of its heads. Detailed:
    the tokens whose loss changes most.
    """
    opened = call.input(arguments.input)
    edits = await _edits(call, arguments, opened)
    compared = {} if opened.predicts is None else {"compare": "unedited"}
    question = (
        opened.fields | {"edits": edits} | compared | listing(opened.predicts, _LISTED_BY_DETAIL[arguments.detail])
    )
    reply = await call.requests.ask(model_forward, question, model=opened.model)
    prediction = reply.predictions[-1] if reply.predictions else None
    loss: dict[str, Any] = {}
    if opened.predicts == "next" and len(opened.tokens) > 1:
        loss = await _loss(call, opened, edits, detailed=arguments.detail == "detailed")
    answer = EffectAnswer(
        summary=_summary(arguments, prediction, loss),
        divergence=None if prediction is None else rounded(prediction.divergence),
        predicted=[] if prediction is None else _changed(prediction),
        **loss,
    )
    return ToolResult(answer)


async def _edits(call: ToolContext, arguments: EffectArguments, opened: OpenedInput) -> dict[str, list[dict[str, Any]]]:
    """Return the edits by layer."""
    heads: dict[str, list[int]] = defaultdict(list)
    for place in arguments.heads:
        heads[str(place.layer)].append(place.head)
    where = {} if arguments.positions is None else {"queries": arguments.positions}
    if arguments.source is None:
        return {
            layer: [{"tap": "context", "heads": chosen_heads, "set": 0, **where}]
            for layer, chosen_heads in heads.items()
        }
    source = call.input(arguments.source, "source", model=opened.model)
    layers = list({str(place.layer): place.layer for place in arguments.heads}.values())
    question = source.fields | {"layers": layers, "return": ["context"], "top_k": 0}
    reply = await call.requests.ask(model_forward, question, model=source.model)
    edits = {}
    for layer in reply.layers:
        chosen = heads[str(layer.layer)]
        context = np.asarray(layer.context)
        _check_index("heads", chosen, context.shape[-3])
        value = context[..., chosen, :, :]  # [heads, L, D]
        length = context.shape[-2]
        if arguments.positions is not None:
            taken = arguments.source_positions or arguments.positions
            _check_index("source_positions", taken, length)
            value = value[..., taken, :]
        elif has_own_tokens(layer.layer) and length != len(opened.tokens):
            raise InvalidRequest.at(
                "positions",
                f"the input has {len(opened.tokens)} tokens and source {length}. Give positions and source_positions, "
                "as many of each, or open a source with as many tokens",
            )
        edits[str(layer.layer)] = [{"tap": "context", "heads": chosen, "value": value, **where}]
    return edits


def _check_index(name: str, indices: list[int], size: int) -> None:
    """Raise InvalidRequest if an index is beyond a size."""
    if max(indices) >= size:
        raise InvalidRequest.at(name, f"{max(indices)} is out of range; there are {size}, numbered from 0")


async def _loss(call: ToolContext, opened: OpenedInput, edits: dict[str, Any], *, detailed: bool) -> dict[str, Any]:
    """Return the fields of the loss without the edits and with them."""
    last = len(opened.tokens) - 1
    positions = list(range(max(0, last - _TOKENS_OF_LOSS), last))
    next_ids = [opened.ids[position + 1] for position in positions]
    losses = []
    for kept in ({}, edits):
        question = opened.fields | {"positions": positions, "return": ["logits"], "top_k": 0, "edits": kept}
        reply = await call.requests.ask(model_forward, question, model=opened.model)
        losses.append(np.array([-log_probabilities(row)[at] for row, at in zip(reply.logits, next_ids, strict=True)]))
    before, after = losses
    loss: dict[str, Any] = {
        "loss_before": number(before.mean(), 6),
        "loss_after": number(after.mean(), 6),
        "loss_change": number((after - before).mean()),
        "loss_tokens": len(positions),
    }
    if detailed:
        order = np.argsort(-np.abs(after - before))[: _LISTED_BY_DETAIL["detailed"]].tolist()
        loss["tokens"] = [
            ChangedLoss(
                position=positions[at] + 1,
                token=opened.tokens[positions[at] + 1],
                before=number(before[at]),
                after=number(after[at]),
            )
            for at in order
        ]
    return loss


def _changed(prediction: Prediction) -> list[ChangedToken]:
    return [
        ChangedToken(token=top.token, before=number(top.unedited_probability), after=number(top.probability))
        for top in sorted(prediction.top, key=lambda top: -max(top.probability, top.unedited_probability))
    ]


def _summary(arguments: EffectArguments, prediction: Prediction | None, loss: dict[str, Any]) -> str:
    verb = "Knocking out" if arguments.action == "knock_out" else "Patching"
    effects = []
    if loss:
        change = loss["loss_change"]
        verdict = "raises" if change > 0 else "lowers" if change < 0 else "does not change"
        by = f" by {abs(change):g} nats a token, to {loss['loss_after']:g}" if change else ""
        effects.append(f"{verdict} the loss{by}")
    if prediction is not None and prediction.top:
        first = max(prediction.top, key=lambda top: top.unedited_probability)
        effects.append(f"takes {first.token!r} from {first.unedited_probability:.3g} to {first.probability:.3g}")
    named = ", ".join(map(str, arguments.heads[:8])) + (" and more" if len(arguments.heads) > 8 else "")
    return f"{verb} {named} {' and '.join(effects) or 'changes no prediction that this model makes'}."


TOOL: Final = AgentTool(
    "Effect of knocking out or patching heads", EffectArguments, EffectAnswer, effect_of_edit, _FIELDS
)
