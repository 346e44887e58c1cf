"""The plan of an answer of the Responses API: the chat that asks for the same."""

from typing import Any

from attention_contract.schemas.openai import ChatCompletionRequest, ChatMessage, SamplingOptions
from attention_contract.schemas.openai_api.responses import InputImage, InputMessage, ResponseRequest
from attention_contract.schemas.prompts import ChatTemplateFields, DataUrl, ImageUrlPart, TextPart
from attention_service.models.generation.plans.generation_plan import GenerationPlan, plan_generation
from attention_service.models.inputs.field_names import fields_named
from attention_service.models.loaded.loaded_model import LoadedModel


def chat_of(request: ResponseRequest) -> ChatCompletionRequest:
    """The chat that asks for the same answer."""
    given = [InputMessage(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    first = [] if request.instructions is None else [ChatMessage(role="system", content=request.instructions)]
    names = {*SamplingOptions.model_fields, *ChatTemplateFields.model_fields}
    same: dict[str, Any] = {name: getattr(request, name) for name in names if name != "stream"}
    return ChatCompletionRequest(
        messages=[*first, *map(_message, given)], max_completion_tokens=request.max_output_tokens,
        logprobs=bool(request.include or request.top_logprobs) or None,
        top_logprobs=request.top_logprobs or None, **same,
    )  # fmt: skip


def plan_response(loaded: LoadedModel, chat: ChatCompletionRequest) -> GenerationPlan:
    """Check a request by its chat. Raises InvalidRequest that names the field of the Responses API at fault."""
    with fields_named(messages="input", max_tokens="max_output_tokens"):
        return plan_generation(loaded, chat)


def _message(message: InputMessage) -> ChatMessage:
    if isinstance(message.content, str):
        return ChatMessage(role=message.role, content=message.content)
    parts = [
        ImageUrlPart(type="image_url", image_url=DataUrl(url=part.image_url))
        if isinstance(part, InputImage)
        else TextPart(type="text", text=part.text)
        for part in message.content
    ]
    return ChatMessage(role=message.role, content=parts)
