"""The tokens of a text or a conversation, in the form of vLLM's ``/tokenize``, with their places in the text."""

from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, WireModel, at_fault
from attention_contract.schemas.openai import ChatMessage, OpenAIRequest
from attention_contract.schemas.prompts import ChatTemplateFields, Text, TokenLabelsReply


class TokenizeRequest(OpenAIRequest, ChatTemplateFields):
    """Ask for the tokens of exactly one of ``prompt`` and ``messages``, as the model reads them."""

    prompt: Text | None = None
    """A text."""
    text_pair: Text | None = None
    """A second text that the tokenizer joins to ``prompt``."""
    answer: Text | None = None
    """A given continuation of ``prompt``, as in ``weights`` and ``gradients``."""
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1024)] | None = None
    """A conversation, with images as data URLs for models that take them. The checkpoint's chat template formats it."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's own tokens, such as the one that begins a text. Default: true for ``prompt``, and false for
    ``messages``, whose template writes them."""
    return_token_strs: bool | None = None
    """Return ``token_strs`` too."""

    @model_validator(mode="after")
    def _one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise at_fault("prompt", "expected one of prompt and messages")
        beside = {"text_pair": self.text_pair, "answer": self.answer}
        if given := [name for name, value in beside.items() if value is not None]:
            if self.prompt is None:
                raise at_fault(given[0], "it goes with prompt; leave it out")
            if len(given) > 1:
                raise at_fault("answer", "it continues one text; leave text_pair out")
            if self.add_special_tokens is False:
                raise at_fault("add_special_tokens", f"it goes with a prompt alone; leave it or {given[0]} out")
        if self.messages is None:
            for name in ChatTemplateFields.model_fields:
                if getattr(self, name) is not None:
                    raise at_fault(name, "it goes with messages")
        elif self.add_special_tokens:
            raise at_fault("add_special_tokens", "the chat template writes those of messages; leave it out")
        return self


class Tokenization(WireModel):
    """The tokens of an input. Their positions are those of edits, selections and attention."""

    count: int
    max_model_len: int | None = None
    """The number of positions of the model; missing for one without a limit."""
    tokens: list[int]
    """The token ids."""
    token_strs: IfRequested[list[str]] = ABSENT
    """The tokens as the tokenizer's vocabulary has them, with its own marks."""
    text: str
    """The text that ``spans`` count in: the prompt, with the answer after it, or the conversation as the chat template
    writes it."""
    labels: TokenLabelsReply
    """The tokens for reading, with their ids and their spans in the text."""


EXAMPLE_TOKENIZATION: Final[dict[str, Any]] = {
    "model": "tiny",
    "prompt": "the cat sat on the mat",
    "return_token_strs": True,
}
