"""The tokens of a text or a conversation, as the model reads them, without a pass."""

from typing import Any

from attention_contract.base import valid
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.openai_api.tokenization import Tokenization, TokenizeRequest
from attention_contract.schemas.prompts import TextPart
from attention_service.models.inputs.field_names import fields_named
from attention_service.models.inputs.input_stacks import Stack
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.prompts.conversations import ChatForm, messages_of

_CHARACTER = 512
"""Bytes that a character may take: as a token of its own with its labels, and as text of the reply."""


def tokenizing_bytes(request: TokenizeRequest) -> int:
    """Estimate the memory of the tokens of an input."""
    return _CHARACTER * characters(request)


def characters(request: TokenizeRequest) -> int:
    """The characters of an input."""
    texts = [request.prompt, request.text_pair, request.answer]
    for message in request.messages or ():
        if isinstance(message.content, str):
            texts.append(message.content)
        else:
            texts += [part.text for part in message.content or () if isinstance(part, TextPart)]
    return sum(len(text) for text in texts if text)


def tokenize(loaded: LoadedModel, request: TokenizeRequest) -> Tokenization:
    """The tokens of an input. Raises InvalidRequest that names the field at fault."""
    reader = loaded.reader
    stack, text = _read(loaded, request)
    (labels,) = reader.labels(stack)
    fields: dict[str, Any] = {
        "count": len(labels.ids), "max_model_len": reader.max_length, "tokens": labels.ids, "text": text,
        "labels": labels,
    }  # fmt: skip
    if request.return_token_strs and reader.tokenizer is not None:
        fields["token_strs"] = reader.tokenizer.convert_ids_to_tokens(labels.ids)
    return valid(Tokenization, fields)


def _read(loaded: LoadedModel, request: TokenizeRequest) -> tuple[Stack, str]:
    """The tokens, and the text whose characters they are."""
    reader = loaded.reader
    if request.messages is not None:
        messages, form = messages_of(request.messages), ChatForm.of(request)
        given = ModelForwardRequest(
            messages=messages, chat_template_kwargs=request.chat_template_kwargs, add_generation_prompt=form.prompt,
            continue_final_message=form.continues,
        )  # fmt: skip
        with fields_named(images="messages", audio="messages"):
            stack = (
                reader.read(given).text if given.all_images or given.all_audio else reader.batch(reader.texts(given)[0])
            )
            return stack, reader.conversation(messages, form).text
    prompt = request.prompt or ""
    if request.add_special_tokens is False:
        return reader.batch([reader.tokens(prompt, "prompt", special=False)]), prompt
    given = ModelForwardRequest(text=prompt, text_pair=request.text_pair, answer=request.answer)
    with fields_named(text="prompt"):
        stack = reader.batch(reader.texts(given)[0])
        return stack, prompt + (request.answer or "") if stack.answers is None else prompt
