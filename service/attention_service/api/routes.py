"""The routes of the operations of the contract."""

from typing import Any

from attention_contract.operations import OPERATIONS, Operation
from attention_service.api.doors.openai.openai_handlers import OPENAI_HANDLERS
from attention_service.api.endpoint import OperationRoute
from attention_service.api.handlers import HANDLERS
from attention_service.api.replicas import following


def make_routes(*, siblings: bool = False) -> list[OperationRoute]:
    """One route for each operation. Raises KeyError for a handler of no operation.

    ``siblings``: other processes change the modules too.
    """
    known: dict[str, Operation[Any]] = {operation.name: operation for operation in OPERATIONS}
    prepared = following if siblings else (lambda handler: handler)
    return [OperationRoute(known[name], prepared(handler)) for name, handler in {**HANDLERS, **OPENAI_HANDLERS}.items()]
