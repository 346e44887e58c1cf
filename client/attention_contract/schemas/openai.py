"""Requests and replies of OpenAI's API, as its ``openai`` package writes and reads them.

The field ``attention`` is more, and those that vLLM adds have its names. Source: the types of ``openai`` 3.57. Fields
that change nothing here are accepted. A field that would change the answer and cannot is refused, unless it has the
value that changes nothing.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.analyses.probes import StopReason, Watch
from attention_contract.schemas.attention import MAX_INDICES, VectorId
from attention_contract.schemas.model_requests import TokenStatisticOptions, check_spans
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.openai_api.token_rows import table_of_tokens
from attention_contract.schemas.prompts import (
    MAX_TEXT,
    MAX_TEXTS,
    ChatTemplateFields,
    EditsByLayer,
    ImageUrlPart,
    InputAudioPart,
    LayersInOrder,
    Text,
    TextPart,
    TokenIds,
    ToolCall,
    kind_of_content,
)
from attention_contract.schemas.recordings import RecordingId
from attention_contract.schemas.text_similarity import Pooling
from attention_contract.schemas.weights import HeadStatistics, StatisticName, TopKeys
from attention_contract.tensors import AnyNumber, FloatArray

MAX_NEW_TOKENS: Final = 1_048_576
MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_NAMED: Final = 256
"""Tokens that a request names at each position."""
Ignored = Any
"""A field that is accepted and changes nothing."""
Refused = Any
"""A field that is accepted with its neutral values alone (``neutral``)."""
TokenText = Annotated[str, Field(pattern=r"^\d{1,10}$")]
"""A token id as the key of an object."""
FinishReason = Literal["stop", "length"]
"""``stop``: the model ended, or a stop text came. ``length``: as many tokens as asked for, or as the caller's deadline
left time for."""


class Steering(WireModel):
    """A steering vector that is added to the states behind layers."""

    vector: VectorId | None = None
    id: VectorId | None = None
    """The same as ``vector``."""
    scale: float = Field(default=1.0, allow_inf_nan=False)
    """The number by which it is multiplied."""
    layers: Annotated[list[LayerRef], Field(min_length=1, max_length=4096)] | None = None
    """The layers behind which it is added; default: all that it has directions of."""
    layer: LayerRef | None = None
    """The only one of them."""

    @model_validator(mode="after")
    def _one_spelling(self) -> "Steering":
        if (self.vector is None) == (self.id is None):
            raise at_fault("vector", "expected the id of a vector, once: as vector, or as id")
        if self.layers is not None and self.layer is not None:
            raise at_fault("layer", "it takes the place of layers; leave one of the two out")
        return self

    @property
    def named(self) -> str:
        """The id of the vector."""
        return self.vector or self.id or ""

    @property
    def behind(self) -> list[LayerRef] | None:
        """The layers behind which it is added; None for all."""
        return self.layers if self.layer is None else [self.layer]


class AttentionOfTokens(WireModel):
    """The attention that comes with each generated token, and edits that apply to the whole generation."""

    layers: LayersInOrder = "all"
    """The layers in the reply, in this order."""
    heads: Listed[Index] | None = Field(default=None, min_length=1, max_length=MAX_INDICES)
    """The heads of each of these layers; default: all."""
    statistics: Listed[StatisticName] | None = Field(default=None, max_length=64)
    """The statistics of each head. Default: entropy, max_weight, mean_distance, first_key and own_position."""
    statistic_options: TokenStatisticOptions = Field(default_factory=TokenStatisticOptions)
    top_k: int = Field(default=0, ge=0, le=1024)
    """The number of most attended keys to name for each head; 0 for none."""
    weights: bool = False
    """Return the weights themselves: a number for each head and key."""
    edits: EditsByLayer = Field(default_factory=dict)
    """Edits by layer, each in the form of edits of a module. ``queries`` and ``keys`` are positions of tokens."""
    steer: Listed[Steering] = Field(default_factory=list, max_length=64)
    """Steering vectors that are added to ``hidden``, the state behind each of their layers, after other edits."""
    from_: Literal["prompt", "answer"] = Field(default="prompt", alias="from")
    """The first tokens that are edited: those of the prompt, or the first generated one. ``answer`` leaves the prompt
    as it is, with its keys and values."""
    keep: bool = False
    """Store the whole run as a recording. Needs one choice of one prompt."""
    watch: Listed[Watch] = Field(default_factory=list, max_length=16)
    """Linear probes that score each token, and may end the text. Beside them, no statistics are the default, nor beside
    edits of a model without attention."""

    @model_validator(mode="after")
    def _begins_something(self) -> "AttentionOfTokens":
        if self.from_ == "answer" and not any(self.edits.values()) and not self.steer:
            raise at_fault(
                "from", "it goes with edits or steer, whose first tokens it names; send some, or leave it out"
            )
        check_spans(self.statistic_options, self.statistics)
        return self


class StreamOptions(WireModel):
    """Options of a stream."""

    include_usage: bool | None = None
    """Send ``usage`` in a last chunk without choices."""
    include_obfuscation: Ignored = None


class OpenAIRequest(WireModel):
    """The fields of every request."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """The values, besides null, of fields that are refused with any other."""
    reasons: ClassVar[dict[str, str]] = {}
    """The reason to refuse such a field, if it is another one than that it changes the answer."""

    model: str = Field(min_length=1, max_length=1024)
    """The name of a model: ``GET /v1/models`` lists them. ``base:adapter`` is a model with an adapter."""
    adapter: str | None = Field(default=None, min_length=1, max_length=1024)
    """The name or path of an adapter that answers beside the model, as the model ``base:adapter`` does."""
    alone: bool | None = None
    """Share no pass with other requests: the same numbers to the last bit, whoever asks at the same time."""
    user: Ignored = None

    @model_validator(mode="after")
    def _only_neutral(self) -> "OpenAIRequest":
        for name, values in self.neutral.items():
            if (given := getattr(self, name)) is not None and given not in values:
                reason = "it would change the answer, and cannot here; leave it out"
                raise at_fault(name, self.reasons.get(name, reason))
        return self


class DrawOptions(WireModel):
    """The settings by which the tokens of a text are drawn, and by which it ends."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the most likely tokens that together have this probability. Default: that of the checkpoint, or 1."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """The seed of the draws: choice i is drawn as after ``torch.manual_seed(seed + i)``. Default: another each time."""
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    """Texts before which a choice ends."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from the logit of each token that was generated before."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from the logit of each token once for each time that it was generated before."""
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    """Sample from this number of the most likely tokens; 0 or -1 for all. Default: that of the checkpoint, or all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from the tokens that are at least this times as likely as the most likely one."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=1000, allow_inf_nan=False)
    """Divides positive logits, and multiplies negative ones, of the tokens of prompt and answer. Default: that of the
    checkpoint, or 1."""
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_NEW_TOKENS)
    """The number of tokens of a choice before which it ends neither by a token nor by a text in ``stop`` or a probe."""
    stop_token_ids: Annotated[list[Index], Field(max_length=1024)] | None = None
    """Token ids that end a choice, besides those of the checkpoint."""
    ignore_eos: bool | None = None
    """Go on after the checkpoint's tokens that end a text."""
    logit_bias: dict[TokenText, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=1024)
    """Added to the logits of these token ids."""


class SamplingOptions(OpenAIRequest, DrawOptions):
    """The fields of every request for generated text."""

    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    """Divides the logits before sampling; 0 takes the most likely token. Default: that of the checkpoint, or 1."""
    forced_bos_token_id: Index | Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The first token that the decoder of an encoder-decoder generates, by its id or its text: the language of a
    translation, as in ``"deu_Latn"``."""
    stream: bool | None = None
    """Send each token as a server-sent event as soon as it is generated."""
    attention: AttentionOfTokens | None = None
    """Return the attention of each token, and edit attention."""


class GenerationOptions(SamplingOptions):
    """The fields of requests whose replies have choices."""

    max_tokens: int | None = Field(default=None, ge=1, le=MAX_NEW_TOKENS)
    """The largest number of tokens to generate for each choice. Default: 16 for a completion; for a chat the number of
    positions that the model has left, at most 4,096."""
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    """The choices for each prompt; default: 1."""
    logprob_tokens: (
        Annotated[
            list[Index | Annotated[str, Field(min_length=1, max_length=256)]], Field(min_length=1, max_length=MAX_NAMED)
        ]
        | None
    ) = None
    """Tokens whose log-probabilities each position has behind those of the most likely tokens, with ``logprobs``: ids,
    or texts that are one token."""
    logprob_token_ids: Annotated[list[Index], Field(min_length=1, max_length=MAX_NAMED)] | None = None
    """The same by vLLM's name, as ids alone."""
    stream_options: StreamOptions | None = None

    @property
    def named_tokens(self) -> list[int | str]:
        """The tokens whose log-probabilities are asked for by name."""
        return [*(self.logprob_tokens or ()), *(self.logprob_token_ids or ())]

    @model_validator(mode="after")
    def _fits_together(self) -> "GenerationOptions":
        named = [name for name in ("logprob_tokens", "logprob_token_ids") if getattr(self, name) is not None]
        if len(named) > 1:
            raise at_fault(named[0], f"expected one of {' and '.join(named)}")
        wanted = getattr(self, "logprobs", None)
        if named and (wanted is None or wanted is False):
            raise at_fault(named[0], "it needs logprobs")
        if self.stream_options is not None and not self.stream:
            raise at_fault("stream_options", "it applies to streams only; set stream")
        return self


ChatPart = Annotated[TextPart | ImageUrlPart | InputAudioPart, Field(discriminator="type")]


class ChatMessage(WireModel):
    """One message of a conversation. A message from a reply may be sent back unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Field(max_length=MAX_TEXT), Tag("text")]
            | Annotated[list[ChatPart], Field(max_length=1024), Tag("parts")],
            Discriminator(kind_of_content),
        ]
        | None
    ) = None
    """A text, or parts: texts, images as data URLs, and sounds as ``input_audio``, for models that take them. May be
    null beside ``tool_calls``."""
    name: Annotated[str, Field(max_length=256)] | None = None
    refusal: None = None
    annotations: Ignored = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=256)] | None = None
    """The calls of tools that an answer of the past made."""
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Annotated[str, Field(max_length=MAX_TEXT)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "ChatMessage":
        if self.content is None and not self.tool_calls:
            raise at_fault("content", "expected a text or parts; only a message with tool_calls may have none")
        return self


class ChatCompletionRequest(GenerationOptions, ChatTemplateFields):
    """Answer a conversation."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "audio": (), "function_call": ("none", "auto"), "functions": ([],), "modalities": (["text"],),
        "moderation": (), "reasoning_effort": ("none",), "response_format": ({"type": "text"},),
        "tool_choice": ("none", "auto"), "tools": ([],), "verbosity": ("medium",), "web_search_options": (),
    }  # fmt: skip

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1024)]
    """The conversation. The checkpoint's chat template formats it."""
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_NEW_TOKENS)
    """The newer name of ``max_tokens``."""
    logprobs: bool | None = None
    """Return the log-probability of each token, before temperature, penalties and biases."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """The number of most likely tokens to return at each position, with ``logprobs``."""
    add_special_tokens: bool | None = None
    """True: the tokenizer adds its special tokens to those that the chat template writes."""
    audio: Refused = None
    function_call: Refused = None
    functions: Refused = None
    metadata: Ignored = None
    modalities: Refused = None
    moderation: Refused = None
    parallel_tool_calls: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    reasoning_effort: Refused = None
    response_format: Refused = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    tool_choice: Refused = None
    tools: Refused = None
    verbosity: Refused = None
    web_search_options: Refused = None

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise at_fault("top_logprobs", "it needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in {None, self.max_tokens}:
            raise at_fault("max_tokens", "it differs from max_completion_tokens; send one of them")
        return self


class CompletionRequest(GenerationOptions):
    """Continue a text."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"best_of": (1,), "suffix": ("",)}

    max_tokens: int | None = Field(default=None, ge=0, le=MAX_NEW_TOKENS)
    """The largest number of tokens to generate for each choice; 0 with ``echo`` alone. Default: 16."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS)]
    )
    """One text or its token ids, or several as one batch, padded at the left."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """Return the log-probability of each token, and this number of most likely tokens at each position."""
    echo: bool | None = None
    """Begin each choice with its prompt; with ``logprobs``, with the log-probabilities of its tokens too, but for the
    first, which has none."""
    add_special_tokens: bool | None = None
    """False: the prompt has no special tokens, such as the one that begins a text, but those that it writes itself.
    Default: the tokenizer adds its own. Token ids are taken as they are."""
    best_of: Refused = None
    suffix: Refused = None

    @model_validator(mode="after")
    def _tells_something(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise at_fault("max_tokens", "expected 1 or more; 0 goes with echo alone")
        if self.max_tokens == 0 and self.attention is not None:
            self._check_echoed(self.attention)
        first = self.prompt[0] if isinstance(self.prompt, list) else self.prompt
        if self.add_special_tokens and not isinstance(first, str):
            raise at_fault("add_special_tokens", "token ids are taken as they are; send texts, or leave it out")
        return self

    @staticmethod
    def _check_echoed(attention: AttentionOfTokens) -> None:
        """Raise an error of validation for what is about generated tokens, of which there are none."""
        for name, field in AttentionOfTokens.model_fields.items():
            neutral: tuple[Any, ...] = (field.get_default(call_default_factory=True), [])
            if name not in {"edits", "steer"} and getattr(attention, name) not in neutral:
                raise at_fault(
                    f"attention.{field.alias or name}",
                    "it is about generated tokens, and max_tokens is 0; ask for more, or leave it out",
                )


class EmbeddingRequest(OpenAIRequest):
    """Ask for one vector for each text."""

    input: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS)]
    )
    """One text or its token ids, or several as one batch."""
    encoding_format: Literal["float", "base64"] | None = None
    """``base64``: little-endian float32."""
    dimensions: int | None = Field(default=None, ge=1, lt=2**31)
    """Keep the first numbers of each vector, scaled to length 1: for models that were trained for it."""
    normalize: bool | None = None
    """False: vectors as they are before they are scaled to length 1; true: scaled. Default: as the checkpoint says, and
    scaled with ``dimensions``."""
    pooling: Pooling | None = None
    """The way from the states of tokens to a vector, in place of the checkpoint's."""
    prompt_name: str | None = Field(default=None, max_length=256)
    """The prompt of a sentence-transformers checkpoint to put before each text; default: the checkpoint's own default
    prompt, if it has one. An empty name stands for no prompt."""


class TokensAttention(WireModel):
    """The attention of one layer from which a token was chosen."""

    layer: LayerRef
    statistics: IfRequested[HeadStatistics] = ABSENT
    """``[H]`` each."""
    top_keys: IfRequested[TopKeys] = ABSENT
    """``[H, k]``: positions of tokens and their weights. In a layer with other keys (``keys`` in the model's layers),
    these have the positions after the tokens: spans in their order, or the prompt of the encoder."""
    weights: IfRequested[FloatArray] = ABSENT
    """``[H, position]``: the weights of all tokens before this one."""


class GeneratedToken(WireModel):
    """One generated token with its attention: that of the token before it, whose output chose it."""

    position: int
    """Its position among the tokens of prompt and answer, without padding. The query is at the previous position."""
    token: str
    id: int
    seconds: IfRequested[tuple[float, float] | None] = ABSENT
    """The seconds of the frame that the alignment heads looked at most, in the mean, when they chose the token, if
    the text is written down from a sound."""
    layers: list[TokensAttention]
    scores: IfRequested[dict[str, float]] = ABSENT
    """The score of the state that chose the token, at the previous position, by each probe of ``watch``."""


class TokenLogprob(WireModel):
    """One token and its log-probability."""

    token: str
    r"""The text that the token adds to that of the tokens before it, with a part of a character as ``\xe2``; a special
    token by its name."""
    bytes: list[int] | None = None
    """The bytes that the token adds to the text, none for a special one: joined, those of all tokens are the text."""
    logprob: AnyNumber


class ChosenLogprob(TokenLogprob):
    """The log-probability of a chosen token, and the most likely tokens at its position."""

    top_logprobs: list[TokenLogprob]
    """The most likely tokens, and behind them those of ``logprob_tokens`` that are none of these."""


class ChatLogprobs(WireModel):
    """Log-probabilities of a choice, token by token."""

    content: list[ChosenLogprob] | None = None
    refusal: None = None


class CompletionLogprobs(WireModel):
    """Log-probabilities of a choice, in the form of completions."""

    text_offset: list[int]
    """The first character of each token in the text of the choice."""
    tokens: list[str]
    r"""The text that each token adds; a part of a character as ``bytes:\xe2``, and a special token by its name."""
    token_logprobs: list[AnyNumber | None]
    """Null for the first token of a prompt, with ``echo``."""
    top_logprobs: list[dict[str, AnyNumber] | None] | None = None
    """The most likely tokens of each place, those of ``logprob_tokens``, and the chosen one. A token that has the text
    of another is named as the vocabulary has it."""


class AssistantMessage(WireModel):
    """The answer, or a piece of it in a stream."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class _Choice(WireModel):
    index: int
    finish_reason: FinishReason | None = None
    """Null in all pieces of a stream but the last."""
    attention: IfRequested[list[GeneratedToken]] = ABSENT
    stop_reason: IfRequested[StopReason] = ABSENT
    """The probe of ``watch`` that ended the text; ``finish_reason`` is then ``stop``."""
    prompt_scores: IfRequested[dict[str, list[float]]] = ABSENT
    """The scores of the prompt's tokens by each probe of ``watch`` with ``prompt``, beside the first token."""


class ChatChoice(_Choice):
    """One answer."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None = None

    @property
    def text(self) -> str:
        """The text that was generated."""
        return self.message.content or ""


class ChatPiece(_Choice):
    """A piece of one answer."""

    delta: AssistantMessage
    logprobs: ChatLogprobs | None = None

    @property
    def text(self) -> str:
        """The text that was generated."""
        return self.delta.content or ""


class CompletionChoice(_Choice):
    """One continuation, or a piece of it in a stream."""

    text: str
    logprobs: CompletionLogprobs | None = None


class OpenAIRan(WireModel):
    """The run of a request."""

    joined: int = 1
    """The largest number of requests that shared one of its passes; 1 if it ran alone."""
    weights: str
    """The numbers that it computed with, as in ``ran`` of the other replies of a model."""
    predicted_ms: float | None = None
    """The predicted median of ``compute_ms``; null if other requests shared its passes."""
    predicted_low_ms: float | None = None
    predicted_high_ms: float | None = None
    """Nine of ten should take between ``predicted_low_ms`` and ``predicted_high_ms``."""
    compute_ms: float | None = None
    """Milliseconds of its passes; null if other requests shared them."""


class PromptTokensDetails(WireModel):
    """Numbers of tokens of the prompts."""

    cached_tokens: int = 0
    """Tokens whose keys and values were kept from an earlier text that begins alike."""


class Usage(WireModel):
    """Numbers of tokens."""

    prompt_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    """The tokens of a generation's prompts."""
    completion_tokens: int = 0
    total_tokens: int


class _Generated(WireModel):
    id: str
    created: int
    """Seconds since 1970."""
    model: str
    usage: Usage | None = None
    recording: IfRequested[RecordingId] = ABSENT
    """With ``keep``; in the last chunk of a stream."""
    ran: IfRequested[OpenAIRan] = ABSENT
    """Beside ``usage``."""

    def to_table(self, heads: Sequence[int] | None = None) -> Any:
        """Return the attention of the tokens, those of a piece too, as a ``pyarrow.Table``; see ``table_of_tokens``.

        ``heads``: the numbers of the heads, by default those of the request. Needs the extra ``tables``. Raises
        ImportError.
        """
        choices: list[_Choice | ChatPiece] = getattr(self, "choices")  # noqa: B009 - each kind has its own
        named = heads or self.request_names.heads
        return table_of_tokens(((choice.index, choice.attention) for choice in choices), named)


class ChatCompletion(_Generated):
    """The answers to a conversation."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatCompletionChunk(_Generated):
    """A piece of a streamed answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatPiece]


class Completion(_Generated):
    """The continuations of prompts, or a piece of them in a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class Embedding(WireModel):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[AnyNumber] | str
    """Numbers, or their float32 as base64."""


class Embeddings(WireModel):
    """A vector for each text."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage
    ran: IfRequested[OpenAIRan] = ABSENT


_LOOK: Final[dict[str, Any]] = {"max_tokens": 4, "temperature": 0, "attention": {"layers": [0], "top_k": 2}}
EXAMPLE_COMPLETION: Final[dict[str, Any]] = {"model": "tiny", "prompt": "the cat sat on the", **_LOOK}
EXAMPLE_CHAT: Final[dict[str, Any]] = {
    "model": "tiny", "messages": [{"role": "user", "content": "Who sat on the mat?"}], **_LOOK,
}  # fmt: skip
