"""Generated tokens as the objects of the Responses API: events of a stream, or one object of all."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from attention_contract.schemas.openai_api.responses import TEXT_FORMAT, ResponseRequest
from attention_service.models.generation.decoding.sampling import Sampling
from attention_service.models.generation.objects.completion_objects import Token, watched
from attention_service.models.generation.objects.token_logprobs import Json

_OF_CALLER: Final = "user", "safety_identifier", "prompt_cache_key"
"""Texts of a request that its answer repeats."""


@dataclass(eq=False)
class ResponseObjects:
    """Writes the objects of one request."""

    request: ResponseRequest
    prompt_tokens: int
    sampling: Sampling
    generated: int = 0
    """The number of tokens so far."""
    cached: int = 0
    """The tokens of the prompt that had been read before."""
    _collected: list[Token] = field(default_factory=list)
    _sent: int = 0
    """The number of events."""

    def __post_init__(self) -> None:
        self._message = f"msg_{uuid.uuid4().hex}"
        given, sampling = self.request, self.sampling
        self._head: Json = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
            "model": given.model, "previous_response_id": None, "error": None, "instructions": given.instructions,
            "temperature": sampling.temperature, "top_p": sampling.top_p,
            "presence_penalty": given.presence_penalty or 0.0, "frequency_penalty": given.frequency_penalty or 0.0,
            "top_logprobs": given.top_logprobs or 0, "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata if isinstance(given.metadata, dict) else {}, "tools": [],
            "tool_choice": given.tool_choice or "auto", "parallel_tool_calls": True, "max_tool_calls": None,
            "truncation": "disabled", "text": TEXT_FORMAT | (given.text or {}), "reasoning": None, "store": False,
            "background": False, "service_tier": "default",
        } | {
            name: value if isinstance(value := getattr(given, name), str) else None for name in _OF_CALLER
        }  # fmt: skip

    def begin(self) -> list[Json]:
        """The events before the first token."""
        if not self.request.stream:
            return []
        return [
            self._event("response.created", response=self._response("in_progress", [])),
            self._event("response.in_progress", response=self._response("in_progress", [])),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
            self._event("response.content_part.added", **self._place(), part=_part([])),
        ]

    def add(self, tokens: list[Token]) -> list[Json]:
        """The events of a step, over one choice."""
        self.generated += len(tokens)
        self._collected += tokens
        if not self.request.stream:
            return []
        shown = (token for token in tokens if token.text or token.logprob or token.attention)
        return [
            self._event(
                "response.output_text.delta", **self._place(), delta=token.text, logprobs=_logprobs([token]),
                **_attention([token]),
            )
            for token in shown
        ]  # fmt: skip

    def end(self, ran: Json, *, keeps: bool = False) -> list[Json]:
        """The last events of a stream, or the whole object; with a place for the id of a recording."""
        tokens, more = self._collected, {"recording": None} if keeps else {}
        whole = not tokens or tokens[-1].finish == "stop"
        status, part = "completed" if whole else "incomplete", _part(tokens)
        item = self._item(status, [part])
        response = self._response(status, [item]) | {"ran": ran}
        if not self.request.stream:
            return [response | more]
        text, logprobs = part["text"], part["logprobs"]
        return [
            self._event("response.output_text.done", **self._place(), text=text, logprobs=logprobs),
            self._event("response.content_part.done", **self._place(), part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{status}", response=response) | more,
        ]

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._sent} | fields
        self._sent += 1
        return event

    def _place(self) -> Json:
        return {"item_id": self._message, "output_index": 0, "content_index": 0}

    def _item(self, status: str, content: list[Json]) -> Json:
        return {
            "type": "message",
            "id": self._message,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _response(self, status: str, output: list[Json]) -> Json:
        ended = status != "in_progress"
        return self._head | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> Json:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.generated,
        }


def _part(tokens: Sequence[Token]) -> Json:
    text = "".join(token.text for token in tokens)
    part: Json = {"type": "output_text", "text": text, "annotations": [], "logprobs": _logprobs(tokens)}
    return part | _attention(tokens)


def _logprobs(tokens: Sequence[Token]) -> list[Json]:
    return [token.logprob.entry for token in tokens if token.logprob is not None]


def _attention(tokens: Sequence[Token]) -> Json:
    looks = [token.attention for token in tokens if token.attention is not None]
    return ({"attention": looks} if looks else {}) | watched(tokens)
