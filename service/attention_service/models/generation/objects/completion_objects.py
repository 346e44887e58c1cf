"""Generated tokens in the forms of OpenAI's objects: a chunk for each token of a stream, or one object of all."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from attention_contract.schemas.openai import ChatCompletionRequest, CompletionRequest
from attention_service.models.generation.objects.token_logprobs import Json, TokenLogprobs

_USAGE_KEYS: Final = ("prompt_tokens", "completion_tokens", "total_tokens")


@dataclass(eq=False, slots=True)
class Token:
    """One generated token."""

    choice: int
    text: str
    """The characters that became certain with it."""
    at: int
    """The first character of the token in the text of the choice."""
    finish: str | None
    logprob: TokenLogprobs | None
    attention: Json | None
    """The fields of the schema ``GeneratedToken``."""
    raw: bytes = b""
    """The bytes that the token adds to the text."""
    watched: Json = field(default_factory=dict)
    """``stop_reason`` and ``prompt_scores``, if the text has them from this token on."""
    id: int = -1
    """The token itself; -1 for one of a prompt."""


@dataclass(eq=False)
class CompletionObjects:
    """Writes the objects of one request."""

    request: ChatCompletionRequest | CompletionRequest
    prompt_tokens: int
    choices: int
    generated: int = 0
    """The number of tokens so far."""
    cached: int = 0
    """The tokens of prompts that had been read before."""
    _collected: list[list[Token]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chat = isinstance(self.request, ChatCompletionRequest)
        self.streams = bool(self.request.stream)
        self._head = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": ("chat.completion.chunk" if self.streams else "chat.completion")
            if self.chat
            else "text_completion",
            "created": int(time.time()),
            "model": self.request.model,
        }
        self._collected = [[] for _ in range(self.choices)]

    def begin(self) -> list[Json]:
        """The chunks before the first token."""
        if not (self.streams and self.chat):
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": at, "delta": delta, "finish_reason": None, "logprobs": None})
            for at in range(self.choices)
        ]

    def echo(self, tokens: list[Token]) -> list[Json]:
        """The chunk of a prompt with which a choice begins."""
        if not self.streams:
            self._collected[tokens[0].choice] += tokens
            return []
        return [self._chunk(self._choice(tokens[0].choice, tokens))]

    def add(self, tokens: list[Token]) -> list[Json]:
        """The chunks of a step."""
        self.generated += len(tokens)
        if not self.streams:
            for token in tokens:
                self._collected[token.choice].append(token)
            return []
        shown = (token for token in tokens if token.text or token.finish or token.logprob or token.attention)
        return [self._chunk(self._choice(token.choice, [token])) for token in shown]

    def end(self, ran: Json, *, keeps: bool = False) -> list[Json]:
        """The last chunk of a stream, if it has one, or the whole object; with a place for the id of a recording.

        ``ran``: the fields of the schema ``OpenAIRan``.
        """
        more: Json = {"recording": None} if keeps else {}
        if not self.streams:
            choices = [self._choice(at, tokens) for at, tokens in enumerate(self._collected)]
            return [self._head | {"choices": choices, "usage": self._usage(), "ran": ran} | more]
        options = self.request.stream_options
        if options is not None and options.include_usage:
            more |= {"usage": self._usage(), "ran": ran}
        return [self._head | {"choices": []} | more] if more else []

    def _chunk(self, choice: Json) -> Json:
        return self._head | {"choices": [choice]}

    def _usage(self) -> Json:
        counts = (self.prompt_tokens, self.generated, self.prompt_tokens + self.generated)
        details = {"prompt_tokens_details": {"cached_tokens": self.cached}}
        return dict(zip(_USAGE_KEYS, counts, strict=True)) | details

    def _choice(self, index: int, tokens: list[Token]) -> Json:
        text = "".join([token.text for token in tokens])
        choice: Json = {"index": index}
        if not self.chat:
            choice["text"] = text
        elif self.streams:
            choice["delta"] = {"content": text}
        else:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        choice |= {"finish_reason": tokens[-1].finish, "logprobs": self._logprobs(tokens)}
        attention = [token.attention for token in tokens if token.attention is not None]
        return choice | ({"attention": attention} if attention else {}) | watched(tokens)

    def _logprobs(self, tokens: list[Token]) -> Json | None:
        scored = [(token.at, token.logprob) for token in tokens if token.logprob is not None]
        if not scored:
            return None
        if self.chat:
            return {"content": [token.entry for _, token in scored], "refusal": None}
        tops = [token.by_text for _, token in scored]
        return {
            "text_offset": [at for at, _ in scored],
            "tokens": [token.chosen.text for _, token in scored],
            "token_logprobs": [token.chosen.entry["logprob"] for _, token in scored],
            "top_logprobs": tops if any(tops) else None,
        }


def watched(tokens: Sequence[Token]) -> Json:
    """The further fields of a text that probes watch."""
    return {name: value for token in tokens for name, value in token.watched.items()}
