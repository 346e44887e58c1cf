"""One of several processes that serve together: its share of the limits, and what the others have stored."""

from typing import Any

from attention_contract.errors import ModuleNotFound, VersionMismatch
from attention_service.api.access.api_keys import divided
from attention_service.api.endpoint import Call, Handler
from attention_service.api.http_limits.descriptors import MAX_CONNECTIONS
from attention_service.settings import Settings


def share_of(settings: Settings) -> Settings:
    """The settings of one of ``replicas`` processes. The engine divides the memory, once it knows the device."""
    if settings.replicas == 1:
        return settings
    stated = settings.model_dump(exclude_none=True)
    of_callers = {name.removeprefix("caller_"): value for name, value in stated.items() if name.startswith("caller_")}
    shares = {f"caller_{name}": share for name, share in divided(of_callers, settings.replicas).items()}
    connections = {"max_connections": settings.max_connections or MAX_CONNECTIONS}
    return settings.model_copy(update=shares | divided(connections, settings.replicas))


def following(handler: Handler) -> Handler:
    """Answer by a handler. If it knows no such module or version, look once whether another process has stored it."""

    async def answer(call: Call, body: Any) -> Any:
        try:
            return await handler(call, body)
        except (ModuleNotFound, VersionMismatch):
            await call.engine.catch_up()
        return await handler(call, body)

    return answer
