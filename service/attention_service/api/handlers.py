"""The table of handlers: the function that answers each operation of the contract."""

from collections.abc import Callable
from typing import Any

from fastapi.routing import APIRoute

from attention_contract.operations import Operation
from attention_service.api.endpoint import Handler, TensorRoute, read_route

_HANDLERS: list[tuple[Operation[Any], Handler]] = []
_FREQUENT = ["forward", "raw_forward", "step_session", "step_sessions", "create_pass", "backward"]


def serve(operation: Operation[Any]) -> Callable[[Handler], Handler]:
    """Make a function the handler of an operation."""

    def register(handler: Handler) -> Handler:
        _HANDLERS.append((operation, handler))
        return handler

    return register


def make_routes() -> list[APIRoute]:
    """One route for each operation. A router tries them in order, so the most frequent operations come first."""
    return [
        (TensorRoute if operation.request is not None or operation.tensors else read_route)(operation, handler)
        for operation, handler in sorted(_HANDLERS, key=lambda each: each[0].name not in _FREQUENT)
    ]
