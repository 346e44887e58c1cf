"""Conversations as a chat template writes them, and the messages that its characters come from."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.openai import ChatMessage
from attention_contract.schemas.prompts import ChatTemplateFields, Message, ModelInput

ANSWER: Final = "answer"
"""The part of an input whose log-probability can be asked for."""
_MARK: Final = re.compile("\ue000(\\d+)\ue001")
"""The place of a text in a conversation that is written to find these places."""
_RESERVED: Final = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens", "tokenize",
    "tokenizer_kwargs", "truncation",
})  # fmt: skip
"""Arguments of ``apply_chat_template`` that are no variables of a template, or have fields of their own."""
TemplateMessage = dict[str, Any]
"""A message as a template reads it."""


@dataclass(frozen=True)
class ChatForm:
    """The form in which a conversation is written."""

    prompt: bool = True
    """True to end with the beginning of an answer."""
    continues: bool = False
    """True to leave the last message open, so that a generation continues it."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""

    @classmethod
    def of(cls, request: ChatTemplateFields) -> Self:
        """The form that a request asks for.

        The last message of a question about a conversation is a given answer, if it is the assistant's. Raises
        InvalidRequest.
        """
        messages = request.messages if isinstance(request, ModelInput) else None
        answered = messages is not None and messages[-1].role == "assistant"
        variables = request.chat_template_kwargs or {}
        if reserved := sorted(_RESERVED.intersection(variables)):
            raise InvalidRequest.at(
                f"chat_template_kwargs.{reserved[0][:64]}",
                "it is no variable of the chat template; add_generation_prompt and continue_final_message are fields "
                "of the request",
            )
        continues, prompt = bool(request.continue_final_message), request.add_generation_prompt
        return cls((not (continues or answered)) if prompt is None else prompt, continues, variables)


class Conversation(NamedTuple):
    """A conversation as one text."""

    text: str
    parts: list[tuple[int, int, str]]
    """First and last (exclusive) character of the content of each message that is found in it, and its role: of an
    answer that ends it, ``answer``."""
    numbers: Sequence[int] = ()
    """The index of the message of each of these parts."""


def messages_of(messages: Sequence[ChatMessage]) -> list[Message]:
    """The messages of OpenAI's API as those of a question."""
    known = set(Message.model_fields)
    return [Message.model_validate(message.model_dump(include=known)) for message in messages]


def as_template_reads(message: Message, content: Any) -> TemplateMessage:
    """A message with the fields that it has; arguments of tools are objects, as templates expect."""
    turn: TemplateMessage = {"role": message.role, "content": content}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [_called(call.model_dump(exclude_none=True)) for call in message.tool_calls]
    return turn


def write_conversation(
    tokenizer: Any, template: Any, messages: Sequence[TemplateMessage], form: ChatForm, *, parted: bool = False
) -> Conversation:
    """Have the template of a tokenizer write a conversation. ``parted``: find the messages in it.

    Raises InvalidRequest.
    """

    def write(turns: Sequence[TemplateMessage]) -> str:
        return str(tokenizer.apply_chat_template(
            list(turns), add_generation_prompt=form.prompt, continue_final_message=form.continues, tokenize=False,
            chat_template=template, **form.variables,
        ))  # fmt: skip

    try:
        text = write(messages)
    except Exception as fault:  # a template computes: it may recurse, or fill the memory
        reason = str(fault)[:400] or type(fault).__name__
        raise InvalidRequest.at("messages", f"the checkpoint's chat template refuses them: {reason}") from None
    parts = _parts(text, messages, form, write) if parted else []
    return Conversation(text, [(begin, end, role) for begin, end, role, _ in parts], [part[-1] for part in parts])


def token_parts(spans: Sequence[tuple[int, int] | None], parts: Sequence[tuple[int, int, str]]) -> list[str | None]:
    """The part that each token begins or ends in, by its characters; None for one that is in none."""
    parts_of_tokens: list[str | None] = []
    at = 0
    for span in spans:
        if span is None:
            parts_of_tokens.append(None)
            continue
        while at < len(parts) and parts[at][1] <= span[0]:
            at += 1
        parts_of_tokens.append(parts[at][2] if at < len(parts) and parts[at][0] < span[1] else None)
    return parts_of_tokens


def _parts(
    text: str, messages: Sequence[TemplateMessage], form: ChatForm, write: Callable[[Sequence[TemplateMessage]], str]
) -> list[tuple[int, int, str, int]]:
    """The places of the messages' texts, with role and index.

    They are where the template puts others in their place, or one after another as they are found.
    """
    texts = [piece for message in messages for piece in _texts(message)]
    roles = [str(message["role"]) for message in messages for _ in _texts(message)]
    if not form.prompt and messages[-1]["role"] == "assistant":
        last = len(_texts(messages[-1]))
        roles[len(roles) - last :] = [ANSWER] * last
    try:
        placed = _placed(text, texts, write(_marked(messages)))
    except Exception:  # of the template, which may look into the texts
        placed = None
    places = _searched(text, texts) if placed is None else placed
    numbers = [number for number, message in enumerate(messages) for _ in _texts(message)]
    return [
        (*place, role, number)
        for place, role, number in zip(places, roles, numbers, strict=True)
        if place is not None and place[0] < place[1]
    ]


def _texts(message: TemplateMessage) -> list[str]:
    """The texts of a message."""
    content = message["content"]
    if isinstance(content, list):
        return [part["text"] for part in content if part["type"] == "text"]
    return [] if content is None else [content]


def _marked(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The messages with a mark in the place of each text."""
    marked_messages, number = [], 0
    for message in messages:
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        marked = []
        for part in parts:
            takes = part["type"] == "text" and part["text"] is not None
            marked.append(part | {"text": f"\ue000{number}\ue001"} if takes else part)
            number += takes
        marked_messages.append(message | {"content": marked if isinstance(content, list) else marked[0]["text"]})
    return marked_messages


def _placed(text: str, texts: Sequence[str], marked: str) -> list[tuple[int, int] | None] | None:
    """The places of texts by the marks in their places; None if the template changes more than their ends."""
    placed: list[tuple[int, int] | None] = [None] * len(texts)
    pieces = _MARK.split(marked)
    at = len(pieces[0])
    if not text.startswith(pieces[0]):
        return None
    for number, literal in zip(pieces[1::2], pieces[2::2], strict=True):
        own = texts[int(number)]
        forms = (own, own.strip(), own.lstrip(), own.rstrip())
        end = next((at + len(form) for form in forms if text.startswith(form + literal, at)), None)
        if end is None:
            return None
        placed[int(number)] = at, end
        at = end + len(literal)
    return placed if at == len(text) else None


def _searched(text: str, texts: Sequence[str]) -> list[tuple[int, int] | None]:
    """The places of texts, one after another; None for one that is not found."""
    places: list[tuple[int, int] | None] = []
    at = 0
    for content in map(str.strip, texts):
        place = text.find(content, at)
        places.append(None if place < 0 else (place, place + len(content)))
        at = at if place < 0 else place + len(content)
    return places


def _called(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool whose arguments are an object. OpenAI's API has its JSON text."""
    function = call["function"]
    arguments = function.get("arguments")
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return call | {"function": function | {"arguments": arguments}}
