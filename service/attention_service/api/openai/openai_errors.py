"""Errors in the form of OpenAI's API, on its paths."""

from typing import Any, Final

from attention_contract.errors import AttentionError, Forbidden, InvalidRequest, Overloaded, Unauthorized
from attention_contract.operations import OPERATIONS
from attention_contract.schemas.openai import OpenAIRequest

OPENAI_PATHS: Final = frozenset(
    operation.path
    for operation in OPERATIONS
    if operation.request is not None and issubclass(operation.request, OpenAIRequest)
)
"""The paths on which errors have this form."""
_TYPES: Final[tuple[tuple[type[AttentionError], str], ...]] = (
    (Unauthorized, "authentication_error"),
    (Forbidden, "permission_error"),
    (Overloaded, "rate_limit_error"),
)


def openai_status(error: AttentionError | type[AttentionError]) -> int:
    """The status of an error there: 400 for what is not valid."""
    return 400 if error.status == InvalidRequest.status else error.status


def openai_error(error: AttentionError) -> dict[str, Any]:
    """The object that describes an error; its facts are further fields."""
    of_class = (told for kind, told in _TYPES if isinstance(error, kind))
    kind = next(of_class, "invalid_request_error" if error.status < 500 else "server_error")
    told = {"message": error.detail, "type": kind, "param": error.param, "code": error.code}
    return {"error": error.facts | {"request_id": error.request_id} | told}


def openai_headers(error: AttentionError) -> dict[str, str]:
    """The headers by which the package decides on another attempt; it would repeat all but those of 4xx."""
    return {} if error.retry_after is not None or error.status < 500 else {"x-should-retry": "false"}
