"""The part of a prompt that each sentence of an answer comes from: sources by attention, gradient and ablation.

Notation: S sources, A sentences of the answer, H heads.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.openai import MAX_NEW_TOKENS, DrawOptions
from attention_contract.schemas.prompts import Message, ModelReply, Text
from attention_contract.tensors import AnyNumber, Encoding, FloatArray

MAX_SOURCES: Final = 256
"""Sources of one request."""
MAX_SENTENCES: Final = 64
"""Sentences of an answer that are told apart: the last has all that follows."""
_HEADS: Final = 8
Measure = Literal["attention", "gradient", "hidden", "removed", "lookback"]


def _measures() -> list[Measure]:
    """The measures that a request returns by default."""
    return ["attention", "gradient", "hidden", "lookback"]


class ContextSource(WireModel):
    """One part of a prompt: its text, or the characters where it is."""

    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Default: ``source 1`` and so on."""
    text: Text | None = None
    """The text of the source. Beside ``text`` or ``messages`` it is looked for there, after the source before."""
    span: tuple[Index, Index] | None = None
    """Its first and last (exclusive) character in ``text``, or in the conversation as the chat template writes it."""

    @model_validator(mode="after")
    def _one_place(self) -> "ContextSource":
        if (self.text is None) == (self.span is None):
            raise at_fault("text" if self.span is None else "span", "expected one of text and span")
        if self.span is not None and self.span[0] >= self.span[1]:
            raise at_fault("span", f"expected a first character before the last; got {list(self.span)}")
        return self


class ContextFields(DrawOptions):
    """The fields of a request for sources, each of which may be left out; those of a draw are of a generated answer."""

    text: Text | None = None
    """The prompt, as a text."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=1024)] | None = None
    """The prompt, as a conversation that the checkpoint's chat template formats. If the last message is the
    assistant's, it is the answer."""
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=256)] | None = None
    """Variables of the checkpoint's chat template."""
    sources: Annotated[Listed[ContextSource], Field(min_length=1, max_length=MAX_SOURCES)] | None = None
    """The parts of the prompt to compare, in their order, without overlaps. Without ``text`` and ``messages``, their
    texts one after another are the prompt."""
    split: Literal["sentences", "messages"] | None = None
    """Cut the prompt into its sentences, or into its messages, in place of ``sources``; default: sentences."""
    answer: Text | None = None
    """A given answer. Default: a last message of the assistant, or what the model generates first."""
    return_: Listed[Measure] = Field(default_factory=_measures, alias="return", min_length=1, max_length=16)
    """``attention``, ``gradient``, ``hidden``, ``removed`` and ``lookback``, as the reply describes them."""
    heads: int = Field(default=_HEADS, ge=0, le=1024)
    """The number of heads that matter most to the answer whose attention is returned too; they are found by
    ``gradient``."""
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_NEW_TOKENS)
    """The largest number of tokens of a generated answer; default: 128, or what the model has positions for."""
    temperature: float = Field(default=0.0, ge=0, le=2, allow_inf_nan=False)
    """0 takes the most likely token."""
    adapter: str | None = Field(default=None, min_length=1, max_length=1024)
    """The name or path of an adapter that answers beside the model, as the model ``base:adapter`` does."""
    alone: bool = False
    """Share no pass: each prompt without a source has a pass of its own, for the same numbers to the last bit."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""

    @model_validator(mode="after")
    def _fits_together(self) -> "ContextFields":
        if self.text is not None and self.messages is not None:
            raise at_fault("messages", "expected one of text and messages; got text and messages")
        if self.split is not None and self.sources is not None:
            raise at_fault("split", "expected one of sources and split; got sources and split")
        if self.split == "messages" and self.messages is None:
            raise at_fault("split", "there are no messages to split; send messages, or split into sentences")
        if self.chat_template_kwargs is not None and self.messages is None:
            raise at_fault("chat_template_kwargs", "it goes with messages")
        answered = self.messages is not None and self.messages[-1].role == "assistant"
        if self.answer is not None and answered:
            raise at_fault("answer", "the last message is the assistant's, and is the answer; send one of them")
        if self.answer is not None or answered:
            of_draw = [name for name in (*DrawOptions.model_fields, "max_tokens") if getattr(self, name) is not None]
            if of_draw := of_draw or ["temperature"] * bool(self.temperature):
                raise at_fault(of_draw[0], "the answer is given, and nothing is generated; leave one of the two out")
        if self.chooses_heads and "gradient" not in self.return_:
            raise at_fault("heads", "they are found by the gradient; add gradient to return, or leave it out")
        if self.prompt is None:
            for index, source in enumerate(self.sources or ()):
                if source.text is None:
                    raise at_fault(f"sources.{index}.span", "it goes with text or messages; send the source's text")
        return self

    @property
    def prompt(self) -> Any:
        """The prompt that the sources are parts of; None if they are all of it."""
        return self.text if self.messages is None else self.messages

    @property
    def chooses_heads(self) -> bool:
        """True if it asks for another number of heads than by default, and not for none."""
        return self.heads not in {0, _HEADS}

    @property
    def has_prompt(self) -> bool:
        """True if any field gives a prompt."""
        return self.prompt is not None or self.sources is not None


class ContextRequest(ContextFields):
    """Ask which parts of a prompt made each sentence of an answer.

    The prompt is ``text``, ``messages``, or ``sources`` by themselves; the answer is given, or generated first.
    """

    @model_validator(mode="after")
    def _asks_something(self) -> "ContextRequest":
        if not self.has_prompt:
            raise at_fault("text", "expected text, messages or sources; got none")
        return self


class SourcePlace(WireModel):
    """One source, as it is in the prompt."""

    name: str
    text: str
    span: tuple[int, int]
    """First and last (exclusive) character in ``prompt``."""
    tokens: tuple[int, int]
    """First and last (exclusive) of its tokens. A token belongs to the source that its last character is in."""


class AnswerSentence(WireModel):
    """One sentence of the answer."""

    text: str
    span: tuple[int, int]
    """First and last (exclusive) character in ``answer_text``."""
    tokens: tuple[int, int]
    """First and last (exclusive) of its tokens, among those of the whole text."""
    logprob: AnyNumber
    """The sum of the log-probabilities of its tokens, after the whole prompt."""


class Ablation(WireModel):
    """The log-probability of each sentence without a source, minus that with it: negative for a source it needs."""

    hidden: IfRequested[FloatArray] = ABSENT
    """``[S, A]``: no query of any layer sees the keys of the source, and all other tokens keep their positions."""
    removed: IfRequested[FloatArray] = ABSENT
    """``[S, A]``: the tokens of the source are left out, and later ones move up."""


class HeadSources(WireModel):
    """The attention of one head to the sources."""

    layer: LayerRef
    head: int
    effect: AnyNumber
    """Σ gradient · context of the log-probability of the answer: the first-order effect of the head on it."""
    attention: FloatArray
    """``[S, A]``"""


class LayerLookback(WireModel):
    """The lookback ratios of one layer."""

    layer: LayerRef
    heads: FloatArray
    """``[H, A]``: the mean weight of a token of the prompt, divided by its sum with the mean weight of a token of the
    answer so far; averaged over the tokens of a sentence. Source: Chuang et al. 2024, section 2."""


class ContextReply(ModelReply):
    """The sources of each sentence of an answer."""

    prompt: str
    """The whole prompt, as the model reads it."""
    answer_text: str
    generated: bool
    """True if the model generated the answer for this request."""
    sources: list[SourcePlace]
    answer: list[AnswerSentence]
    attention: IfRequested[FloatArray] = ABSENT
    """``[S, A]``: the share of attention that the source has, averaged over all heads of all layers and over the tokens
    that predict those of the sentence. The rest goes to the answer itself, and to tokens in no source."""
    heads: IfRequested[list[HeadSources]] = ABSENT
    """The same of the heads that matter most, in descending order of the size of their effect."""
    gradient: IfRequested[FloatArray] = ABSENT
    """``[S, A]``: gradient · embedding of the log-probability of the sentence, summed over the tokens of the source."""
    ablation: IfRequested[Ablation] = ABSENT
    lookback: IfRequested[list[LayerLookback]] = ABSENT
    """The ratio of each head of each layer."""


EXAMPLE_CONTEXT: Final[dict[str, Any]] = {
    "text": "The cat sat on the mat. The dog ran to the river.", "answer": " The cat sat.",
}  # fmt: skip
