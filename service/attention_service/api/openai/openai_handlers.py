"""The handlers of OpenAI's operations. The process of the model writes their objects; here they are passed on."""

from contextlib import aclosing

from starlette.responses import Response

from attention_contract.schemas.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, Embeddings
from attention_contract.wire import JSON
from attention_service.api.endpoint import Call
from attention_service.api.openai.event_stream import EventStream


async def generate(call: Call, body: ChatCompletionRequest | CompletionRequest) -> Response:
    """Generate: one object, or a stream of them."""
    operation = "chat" if isinstance(body, ChatCompletionRequest) else "complete"
    objects = call.engine.models.stream(body.model, operation, body)
    if body.stream:
        first = await anext(objects)  # a fault before it has a status of its own
        return EventStream(first, objects, call.deadline)
    async with aclosing(objects):
        return Response(b"".join([bytes(each) async for each in objects]), media_type=JSON)


async def embed(call: Call, body: EmbeddingRequest) -> Embeddings:
    """A vector for each text."""
    return await call.engine.models.ask(body.model, "embed", body, Embeddings)
