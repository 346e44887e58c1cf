"""One of several processes that serve together: its share of the limits, and what the others have stored."""

from typing import Any

from attention_contract.errors import ModuleNotFound, VersionMismatch
from attention_service.api.access.api_keys import divided, limits_of
from attention_service.api.endpoint import Handler, RequestContext
from attention_service.api.http_limits.descriptors import MAX_CONNECTIONS
from attention_service.settings import Settings


def share_of(settings: Settings) -> Settings:
    """The settings of one of ``replicas`` processes. The engine divides the memory, once it knows the device."""
    if settings.replicas == 1:
        return settings
    of_callers = divided(limits_of(settings).model_dump(exclude_none=True), settings.replicas)
    connections = divided({"max_connections": settings.max_connections or MAX_CONNECTIONS}, settings.replicas)
    return settings.model_copy(update={f"caller_{name}": share for name, share in of_callers.items()} | connections)


def following(handler: Handler) -> Handler:
    """Answer by a handler. If it knows no such module or version, look once whether another process has stored it."""

    async def answer(call: RequestContext, body: Any) -> Any:
        try:
            return await handler(call, body)
        except (ModuleNotFound, VersionMismatch):
            await call.engine.catch_up()
        return await handler(call, body)

    return answer
