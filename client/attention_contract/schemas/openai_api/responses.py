"""The request and the replies of OpenAI's Responses API, which is also Open Responses: text and images in, text out.

Fields more than there: ``attention``, and those of sampling that vLLM adds. Nothing is stored. Source: the types of
``openai`` 3.57, and the specification of Open Responses of April 2026.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Field, Tag

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel
from attention_contract.schemas.analyses.probes import StopReason
from attention_contract.schemas.openai import (
    EXAMPLE_CHAT,
    MAX_NEW_TOKENS,
    ChosenLogprob,
    GeneratedToken,
    Ignored,
    OpenAIRan,
    Refused,
    SamplingOptions,
)
from attention_contract.schemas.openai_api.token_rows import table_of_tokens
from attention_contract.schemas.prompts import MAX_TEXT, ChatTemplateFields, ImageAddress, Text, kind_of_content
from attention_contract.schemas.recordings import RecordingId

_STATELESS: Final = "no answer is stored; send the conversation so far as input"
TEXT_FORMAT: Final[dict[str, Any]] = {"format": {"type": "text"}}


class InputText(WireModel):
    """A part of a message that is text. A part of an answer may be sent back unchanged."""

    type: Literal["input_text", "output_text"]
    text: str = Field(max_length=MAX_TEXT)
    annotations: Ignored = None
    logprobs: Ignored = None
    attention: Ignored = None


class InputImage(WireModel):
    """A part of a message that is an image."""

    type: Literal["input_image"]
    image_url: ImageAddress
    """``data:image/png;base64,…``; jpeg, webp and gif too. Nothing is fetched."""
    detail: Ignored = None


InputPart = Annotated[InputText | InputImage, Field(discriminator="type")]


class InputMessage(WireModel):
    """A message of the conversation. One of a reply may be sent back unchanged."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Field(max_length=MAX_TEXT), Tag("text")]
        | Annotated[list[InputPart], Field(max_length=1024), Tag("parts")],
        Discriminator(kind_of_content),
    ]
    """A text, or parts: texts, and images as data URLs for models that take them."""
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class ResponseStreamOptions(WireModel):
    """Options of a stream."""

    include_obfuscation: Ignored = None


class ResponseRequest(SamplingOptions, ChatTemplateFields):
    """Answer a text or a conversation."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,), "context_management": ([],), "conversation": (), "moderation": (),
        "previous_response_id": (), "prompt": (), "reasoning": ({}, {"effort": "none"}), "store": (False,),
        "text": ({}, TEXT_FORMAT, {"verbosity": "medium"}, TEXT_FORMAT | {"verbosity": "medium"}),
        "tool_choice": ("none", "auto"), "tools": ([],), "truncation": ("disabled",),
    }  # fmt: skip
    reasons: ClassVar[dict[str, str]] = {
        "conversation": _STATELESS, "previous_response_id": _STATELESS,
        "store": "no answer is stored; leave it out, or send false",
        "background": "the answer comes with this request; leave it out, and stream it",
    }  # fmt: skip

    input: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[Listed[InputMessage], Field(min_length=1, max_length=1024), Tag("parts")],
        Discriminator(kind_of_content),
    ]
    """One text, as a message of the user, or a conversation. The checkpoint's chat template formats it."""
    instructions: Text | None = None
    """A message of the system before the conversation."""
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_NEW_TOKENS)
    """The largest number of tokens to generate. Default: the number of positions that the model has left, at most
    4,096."""
    include: Listed[Literal["message.output_text.logprobs"]] | None = Field(default=None, max_length=1)
    """``message.output_text.logprobs``: return the log-probability of each token, before temperature, penalties and
    biases."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """The number of most likely tokens to return at each position; with more than 0, log-probabilities come too."""
    stream_options: ResponseStreamOptions | None = None
    background: Refused = None
    context_management: Refused = None
    conversation: Refused = None
    max_tool_calls: Ignored = None
    metadata: Ignored = None
    moderation: Refused = None
    parallel_tool_calls: Ignored = None
    previous_response_id: Refused = None
    prompt: Refused = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    reasoning: Refused = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Refused = None
    text: Refused = None
    tool_choice: Refused = None
    tools: Refused = None
    truncation: Refused = None


class OutputText(WireModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]] = Field(default_factory=list)
    logprobs: list[ChosenLogprob] = Field(default_factory=list)
    attention: IfRequested[list[GeneratedToken]] = ABSENT
    """One entry a token, with ``attention`` in the request."""
    stop_reason: IfRequested[StopReason] = ABSENT
    prompt_scores: IfRequested[dict[str, list[float]]] = ABSENT


class OutputMessage(WireModel):
    """The message that answers."""

    type: Literal["message"] = "message"
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class IncompleteDetails(WireModel):
    """The reason for which an answer did not come to its end."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"
    """The largest number of tokens was reached, or the caller's deadline."""


class InputTokensDetails(WireModel):
    """Numbers of tokens of the prompt."""

    cached_tokens: int = 0
    """Tokens whose keys and values were kept from an earlier text that begins alike."""


class OutputTokensDetails(WireModel):
    """Numbers of tokens of the answer."""

    reasoning_tokens: Literal[0] = 0
    """Always 0: reasoning counts as a part of the answer."""


class ResponseUsage(WireModel):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ModelResponse(WireModel):
    """The answer, with the settings of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Seconds since 1970."""
    completed_at: int | None = None
    """The same of its end; null of an answer that has not come to it."""
    status: Literal["in_progress", "completed", "incomplete"]
    """``completed``: the model ended, or a stop text came."""
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputMessage]
    usage: ResponseUsage | None = None
    instructions: str | None = None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    max_output_tokens: int | None = None
    metadata: dict[str, Any]
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    previous_response_id: None = None
    error: None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: None = None
    truncation: Literal["disabled"] = "disabled"
    text: dict[str, Any] = Field(default_factory=lambda: {**TEXT_FORMAT})
    reasoning: None = None
    store: Literal[False] = False
    """Nothing is stored."""
    background: Literal[False] = False
    service_tier: str = "default"
    recording: IfRequested[RecordingId] = ABSENT
    """With ``keep``; in a stream beside the answer in its last event."""
    ran: IfRequested[OpenAIRan] = ABSENT

    @property
    def output_text(self) -> str:
        """The text that was generated."""
        return "".join(part.text for message in self.output for part in message.content)

    def to_table(self, heads: Sequence[int] | None = None) -> Any:
        """Return the attention of the tokens as a ``pyarrow.Table``; see ``table_of_tokens``.

        ``heads``: the numbers of the heads, by default those of the request. Needs the extra ``tables``. Raises
        ImportError.
        """
        parts = (part for message in self.output for part in message.content)
        return table_of_tokens(((0, part.attention) for part in parts), heads or self.request_names.heads)


class ResponseEvent(WireModel):
    """An event of a streamed answer."""

    type: Literal[
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed", "response.incomplete",
    ]  # fmt: skip
    sequence_number: int
    response: IfRequested[ModelResponse] = ABSENT
    """The answer: first without output, and whole in the last event."""
    output_index: IfRequested[int] = ABSENT
    content_index: IfRequested[int] = ABSENT
    item_id: IfRequested[str] = ABSENT
    item: IfRequested[OutputMessage] = ABSENT
    part: IfRequested[OutputText] = ABSENT
    delta: IfRequested[str] = ABSENT
    """The text of a token."""
    text: IfRequested[str] = ABSENT
    logprobs: IfRequested[list[ChosenLogprob]] = ABSENT
    attention: IfRequested[list[GeneratedToken]] = ABSENT
    """The entry of the token of ``delta``."""
    stop_reason: IfRequested[StopReason] = ABSENT
    prompt_scores: IfRequested[dict[str, list[float]]] = ABSENT
    recording: IfRequested[RecordingId] = ABSENT


EXAMPLE_RESPONSE: Final[dict[str, Any]] = {
    "model": "tiny", "input": "Who sat on the mat?", "max_output_tokens": 4, "temperature": 0,
    "attention": EXAMPLE_CHAT["attention"],
}  # fmt: skip
