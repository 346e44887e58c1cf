"""Errors in the form of OpenAI's API, on its paths and wherever else its clients come."""

from typing import Any, Final

from starlette.routing import compile_path
from starlette.types import Scope

from attention_contract import operations
from attention_contract.errors import PROBLEM_MEDIA_TYPE, AttentionError, Forbidden, Overloaded, Unauthorized
from attention_contract.operations import OPENAI_PATHS, OPERATIONS
from attention_service.api.handlers import ErrorForm, status_elsewhere

_SHARED: Final = {operations.list_models.path, operations.get_model.path}
_OWN: Final = [
    compile_path(path)[0] for path in sorted({operation.path for operation in OPERATIONS} - OPENAI_PATHS - _SHARED)
]
"""Patterns of the paths that OpenAI's API does not have."""
_TYPES: Final[tuple[tuple[type[AttentionError], str], ...]] = (
    (Unauthorized, "authentication_error"),
    (Forbidden, "permission_error"),
    (Overloaded, "rate_limit_error"),
)


def openai_form(scope: Scope, error: AttentionError) -> ErrorForm | None:
    """The form of an error on the paths of OpenAI's API; elsewhere None.

    On the paths of models, which both APIs have, and those under ``/v1`` that only OpenAI has, it is a problem document
    with OpenAI's object in it.
    """
    path = scope.get("path", "")
    if path in OPENAI_PATHS:
        return ErrorForm(openai_error(error), status_elsewhere(error), headers=openai_headers(error))
    if path.startswith("/v1/") and not any(own.match(path) for own in _OWN):
        return ErrorForm(error.to_problem() | openai_error(error), error.status, PROBLEM_MEDIA_TYPE)
    return None


def openai_error(error: AttentionError) -> dict[str, Any]:
    """The object that describes an error; its facts are further fields."""
    of_class = (name for kind, name in _TYPES if isinstance(error, kind))
    kind = next(of_class, "invalid_request_error" if error.status < 500 else "server_error")
    fields = {"message": error.detail, "type": kind, "param": error.param, "code": error.code}
    return {"error": error.facts | {"request_id": error.request_id} | fields}


def openai_headers(error: AttentionError) -> dict[str, str]:
    """The headers by which the package decides on another attempt; it would repeat all but those of 4xx."""
    return {} if error.retry_after is not None or error.status < 500 else {"x-should-retry": "false"}
