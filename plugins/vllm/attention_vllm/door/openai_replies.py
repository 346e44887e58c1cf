"""Requests and replies of vLLM's completions and chats as attention-service has them. No vLLM in here."""

import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from hashlib import sha256
from typing import Any, Final

from attention_contract.errors import InvalidRequest
from attention_contract.json_writing import to_json
from attention_contract.schemas.openai import AttentionOfTokens
from attention_contract.validation import validate
from attention_vllm.asks import AttentionAsk, SpanTokens, check_answered
from attention_vllm.door.named_prompts import named_tokens
from attention_vllm.door.result_inbox import AwaitedResults

Json = dict[str, Any]
_ONE: Final = "the attention is of one text; leave it out"
_NEUTRAL: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "n": ((1,), _ONE),
    "best_of": ((1,), _ONE),
    "use_beam_search": ((False,), _ONE),
    "echo": ((False,), "the attention is of generated tokens; leave it out"),
    "tools": (([],), "their calls are no text of the reply; leave them out"),
    "alone": ((False,), "vLLM's requests share passes; leave it out"),
    "adapter": ((), "name an adapter as vLLM does, as the model; leave it out"),
}
"""Fields that are refused beside ``attention``, but for these values."""
_REPLY: Final = ("id", "object", "created", "model", "usage", "choices")
_CHOICE: Final = ("index", "finish_reason", "text", "message", "delta", "logprobs")
_USAGE: Final = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
Layers = Callable[[int], Awaitable[list[Json]]]
"""Returns the fields of the layers of the token at a position."""
Tokenizer = Any
"""vLLM's; None without one."""


class AttentionRoute:
    """Completions and chats with ``attention``."""

    def scope(self, scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Return the scope as it is."""
        return scope

    def asks(self, body: bytes, _: str) -> Json | None:
        """Return the request of a body that has the field; None for another, which vLLM reads itself."""
        given = object_of(body) if b'"attention"' in body else None
        return None if given is None or given.get("attention") is None else given

    def prepare(
        self, given: Json, awaited: AwaitedResults, reply_to: str, tokenizer: Tokenizer, model: str
    ) -> tuple[Json, "AttentionWriter"]:
        """Return vLLM's request, and the writer of its replies. Raises InvalidRequest. The request names the model."""
        wanted = _validated(given)
        request = prepared_request(given, wanted, awaited.id, reply_to, named_tokens(given, wanted, tokenizer))

        def names(ids: Sequence[int]) -> list[str]:
            return [str(token) if tokenizer is None else tokenizer.decode([token]) for token in ids]

        return request, AttentionWriter(awaited.take, names)


def object_of(body: bytes) -> Json | None:
    """Return the object whose JSON text a body is; None for another body."""
    try:
        given = json.loads(body)
    except ValueError:
        return None
    return given if isinstance(given, dict) else None


def _validated(given: Json) -> AttentionOfTokens:
    try:
        return validate(AttentionOfTokens, given["attention"], by_name=False)
    except InvalidRequest as fault:
        param = "attention" if fault.param is None else f"attention.{fault.param}"
        detail = fault.detail.removeprefix(f"{fault.param}: ")
        raise type(fault).at(param, detail) from None


def prepared_request(
    given: Json, wanted: AttentionOfTokens, name: str, reply_to: str, spans: SpanTokens | None = None
) -> Json:
    """Return a request with ``attention`` as vLLM is to read it. Raises InvalidRequest.

    ``wanted``: its ``attention``, validated; ``name``: an id for its results; ``spans``: the tokens of its spans.
    """
    check_answered(wanted)
    for field, (neutral, reason) in _NEUTRAL.items():
        if (value := given.get(field)) is not None and value not in neutral:
            raise InvalidRequest.at(field, reason)
    if isinstance(prompt := given.get("prompt"), list) and prompt and not isinstance(prompt[0], int):
        raise InvalidRequest.at("prompt", "the attention is of one text; send one prompt")
    if "attention" in (xargs := given.get("vllm_xargs") or {}):
        raise InvalidRequest.at("vllm_xargs", "its entry attention is taken; leave it out")
    body = {name: value for name, value in given.items() if name != "attention"}
    salt = given.get("cache_salt")
    if any(wanted.edits.values()):
        edits = wanted.model_dump_json(include={"edits", "from_"})
        salt = sha256(f"{salt or ''}\n{edits}".encode()).hexdigest()
        body["cache_salt"] = salt
    ask = AttentionAsk(id=name, attention=wanted, cache_salt=salt, reply_to=reply_to, spans=spans)
    body["vllm_xargs"] = {**xargs, "attention": to_json(ask).decode()}
    body["return_token_ids"] = True
    return body


class AttentionWriter:
    """Adds the attention to the choices of one request, whole or chunk by chunk."""

    def __init__(self, layers: Layers, names: Callable[[Sequence[int]], list[str]]) -> None:
        """``names``: the texts of tokens."""
        self._layers, self._names = layers, names
        self._prompt: int | None = None
        """The tokens of the prompt, once they are known."""
        self._sent = 0

    async def write(self, reply: Json) -> bytes:
        """Return a reply of vLLM's, or a chunk, as attention-service has it. Raises what ``layers`` raises."""
        answer = {name: reply[name] for name in _REPLY if reply.get(name) is not None}
        if "usage" in answer:
            answer["usage"] = _only(answer["usage"], _USAGE)
            details = answer["usage"].get("prompt_tokens_details")
            if details is not None:
                answer["usage"]["prompt_tokens_details"] = _only(details, ("cached_tokens",))
        answer["choices"] = [await self._choice(choice, reply) for choice in reply["choices"]]
        return to_json(answer)

    async def _choice(self, choice: Json, reply: Json) -> Json:
        given = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        if self._prompt is None and given is not None:
            self._prompt = len(given)
        fields = _only(choice, _CHOICE)
        for name in ("message", "delta"):
            if name in fields:
                fields[name] = _only(fields[name], ("role", "content"))
        fields["finish_reason"] = choice.get("finish_reason")
        ids = choice.get("token_ids") or []
        if ids and self._prompt is None:
            raise InvalidRequest.at("prompt", "vLLM did not say its tokens")
        tokens = []
        for token, text in zip(ids, self._names(ids), strict=True):
            position = (self._prompt or 0) + self._sent
            layers = await self._layers(position)
            tokens.append({"position": position, "token": text, "id": token, "layers": layers})
            self._sent += 1
        return fields | {"attention": tokens}


def _only(given: Json, names: Sequence[str]) -> Json:
    return {name: given[name] for name in names if given.get(name) is not None}
