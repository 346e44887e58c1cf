"""``AgentTool``: one tool, from arguments to answer; and the parts that arguments and answers share."""

import base64
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import numpy as np
from mcp_types import CallToolResult, ContentBlock, ImageContent, ResourceLink, TextContent
from pydantic import Field

from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest
from attention_contract.exact_types import Index
from attention_contract.reply_names import head_name
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.prompts import ModelReply
from attention_contract.tensors import Array
from attention_contract.wire import to_json
from attention_service.api.doors.agents.opened_inputs import InputHandle, OpenedInput, OpenedInputs
from attention_service.api.doors.agents.own_requests import OwnRequests

ArgumentsT = TypeVar("ArgumentsT", bound="ToolArguments")
PNG: Final = "image/png"
MAX_LISTED: Final = 64
"""Heads, tokens or rows that a list of an answer has at most."""


class ToolArguments(WireModel):
    """The arguments of every tool."""

    detail: Literal["concise", "detailed"] = "concise"
    """concise: the answer in as few numbers as it takes; detailed: more of them, for the same work."""


class InputArguments(ToolArguments):
    """The arguments of a tool that asks about an input."""

    input: InputHandle
    """The handle that open_input answered."""


HeadNumber = Annotated[Index, Field(description="The number of the head in its layer, from 0.")]
LayerName = Annotated[
    LayerRef,
    Field(
        description="The number of the layer, or in a model of several stacks its stack and number.",
        examples=[1, "decoder.1"],
    ),
]


class HeadPlace(WireModel):
    """One head of a model."""

    layer: LayerName
    head: HeadNumber

    def __str__(self) -> str:
        return head_name(self.layer, self.head)


class HeadArguments(InputArguments):
    """The arguments of a tool that asks about one head over an input."""

    layer: LayerName
    head: HeadNumber

    @property
    def place(self) -> HeadPlace:
        """The head."""
        return HeadPlace(layer=self.layer, head=self.head)


class ToolAnswer(WireModel):
    """The answer of every tool."""

    summary: str
    """The answer in a sentence or two."""


class TokenWeight(WireModel):
    """One token that a head looks at."""

    position: int
    token: str
    weight: float


@dataclass(frozen=True)
class ToolContext:
    """Everything that a tool may use to answer one call."""

    requests: OwnRequests
    inputs: OpenedInputs
    caller: str

    def input(self, handle: str, argument: str = "input", model: str | None = None) -> OpenedInput:
        """Return an open input of the caller. Raises InvalidRequest, also if ``model`` names another than its own."""
        opened = self.inputs.find(self.caller, handle, argument)
        if model not in {None, opened.model}:
            raise InvalidRequest.at(
                argument, f"it is of model {opened.model}; expected one of {model}. Call open_input with that model"
            )
        return opened


@dataclass(frozen=True)
class ToolResult:
    """The result of a call: an answer, and what comes beside it."""

    answer: ToolAnswer
    links: Sequence[ResourceLink] = ()
    pictures: Sequence[bytes] = field(default=(), repr=False)
    """Files of PNG."""

    def result(self) -> CallToolResult:
        """Return the result as the protocol has it: structured, the same as text for older clients, then the rest."""
        structured = self.answer.model_dump(mode="json", exclude_none=True)
        content: list[ContentBlock] = [TextContent(text=to_json(structured).decode())]
        content += [ImageContent(data=base64.b64encode(picture).decode(), mime_type=PNG) for picture in self.pictures]
        return CallToolResult(content=[*content, *self.links], structured_content=structured)


@dataclass(frozen=True)
class AgentTool(Generic[ArgumentsT]):
    """One tool: its name is that of its function, and its description the function's docstring."""

    title: str
    arguments: type[ArgumentsT]
    answer: type[ToolAnswer]
    run: Callable[[ToolContext, ArgumentsT], Awaitable[ToolResult]]
    arguments_of: Mapping[str, str] = field(default_factory=dict)
    """The argument that became each field of its requests, by which refusals name it."""

    @property
    def name(self) -> str:
        """The name by which an agent calls it."""
        return self.run.__name__

    @property
    def description(self) -> str:
        """The text by which an agent chooses it."""
        return " ".join((self.run.__doc__ or "").split())


def has_own_tokens(layer: LayerRef) -> bool:
    """Return True if the queries of a layer are the tokens with which its input was opened."""
    return not str(layer).startswith(("encoder.", "vision.", "audio."))


def rounded(value: Any, digits: int = 4) -> float | None:
    """Return a number with so many significant digits; None for none, and for one that is not finite."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def number(value: Any, digits: int = 4) -> float:
    """Return a number as ``rounded`` does. Raises InvalidRequest for one that is not finite."""
    finite = rounded(value, digits)
    if finite is None:
        raise InvalidRequest(f"the model computes {float(value)} here, which is no number to go on with")
    return finite


def log_probabilities(logits: Array) -> Array:
    """Return ln softmax of a row of logits ``[V]``, in float64."""
    shifted: Array = logits.astype(np.float64) - logits.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def token_at(tokens: Sequence[str], position: int) -> str:
    """Return a token of an input; an empty text for a position that has none."""
    return tokens[position] if 0 <= position < len(tokens) else ""


def tokens_of(reply: ModelReply, layer: LayerRef) -> tuple[list[str], list[str]]:
    """Return the tokens that are the queries and the keys of a layer."""
    queries, keys = reply.tokens_of(layer)
    return queries.tokens, keys.tokens
