"""The tokens of the parts of a prompt that a request names by messages or characters.

vLLM's tokenizer and chat template write the prompt here as vLLM does. The worker compares the tokens with those that it
was given, and refuses the parts if they differ.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.openai import AttentionOfTokens
from attention_contract.schemas.prompts import ChatTemplateFields, Message
from attention_contract.validation import validate
from attention_service.prompts.conversations import ChatForm, Conversation, as_template_reads, write_conversation
from attention_service.prompts.named_spans import span_tokens
from attention_vllm.asks import SpanTokens, prompt_digest


def named_tokens(given: Mapping[str, Any], wanted: AttentionOfTokens, tokenizer: Any) -> SpanTokens | None:
    """Return the tokens of each span of a request; None if all of them name tokens. Raises InvalidRequest.

    ``tokenizer``: vLLM's; None without one.
    """
    spans = wanted.statistic_options.spans
    if all(span.tokens is not None for span in spans):
        return None
    params = [f"attention.statistic_options.spans.{index}" for index in range(len(spans))]
    at = next(index for index, span in enumerate(spans) if span.tokens is None)
    field = f"{params[at]}.{'characters' if spans[at].messages is None else 'messages'}"
    if not getattr(tokenizer, "is_fast", False):
        raise InvalidRequest.at(field, "vLLM's tokenizer does not tell the characters of tokens; name tokens")
    text = _written(given, tokenizer, field)
    special = given.get("add_special_tokens")
    encoding = tokenizer(
        text if isinstance(text, str) else text.text,
        add_special_tokens=isinstance(text, str) if special is None else bool(special),
    ).encodings[0]
    places = [encoding.token_to_chars(token) for token in range(len(encoding))]
    real = range(len(places))
    tokens = [span_tokens(span, param, real, places, text) for span, param in zip(spans, params, strict=True)]
    return SpanTokens(prompt=prompt_digest(encoding.ids), tokens=tokens)


def _written(given: Mapping[str, Any], tokenizer: Any, field: str) -> str | Conversation:
    """The text of a prompt, or its conversation."""
    if "messages" not in given:
        if not isinstance(text := given.get("prompt"), str):
            raise InvalidRequest.at(field, "the prompt came as tokens, whose characters are not known; name tokens")
        return text
    messages = []
    known = Message.model_fields.keys()
    for index, message in enumerate(given["messages"] if isinstance(given["messages"], list) else ()):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise InvalidRequest.at(f"messages.{index}.content", "parts are named of messages that are texts")
        own = validate(Message, {name: value for name, value in message.items() if name in known}, by_name=False)
        messages.append(as_template_reads(own, own.content))
    fields = {name: value for name in ChatTemplateFields.model_fields if (value := given.get(name)) is not None}
    form = ChatForm.of(validate(ChatTemplateFields, fields, by_name=False))
    # vLLM begins an answer if nothing is said.
    if given.get("add_generation_prompt") is None and not form.continues:
        form = replace(form, prompt=True)
    return write_conversation(tokenizer, given.get("chat_template"), messages, form, parted=True)
