"""Errors in the form of OpenAI's API, on its paths and wherever else its clients come."""

from typing import Any, Final

from starlette.routing import compile_path

from attention_contract import operations
from attention_contract.errors import AttentionError, Forbidden, InvalidRequest, Overloaded, Unauthorized
from attention_contract.operations import OPERATIONS
from attention_contract.schemas.openai import OpenAIRequest

OPENAI_PATHS: Final = frozenset(
    operation.path
    for operation in OPERATIONS
    if operation.request is not None and issubclass(operation.request, OpenAIRequest)
)
"""The paths on which errors have this form."""
_SHARED: Final = {operations.list_models.path, operations.get_model.path}
_OWN: Final = [compile_path(path)[0] for path in sorted({each.path for each in OPERATIONS} - OPENAI_PATHS - _SHARED)]
"""Patterns of the paths that OpenAI's API does not have."""
OPENAI_OFFER: Final = f"the paths of OpenAI's API are {', '.join(sorted(OPENAI_PATHS | {operations.list_models.path}))}"
_TYPES: Final[tuple[tuple[type[AttentionError], str], ...]] = (
    (Unauthorized, "authentication_error"),
    (Forbidden, "permission_error"),
    (Overloaded, "rate_limit_error"),
)


def is_beside_openai(path: str) -> bool:
    """True if clients of OpenAI's API read the errors of a path that has this service's own form.

    These are the paths of models, which both APIs have, and those under ``/v1`` that only OpenAI has.
    """
    return path.startswith("/v1/") and path not in OPENAI_PATHS and not any(own.match(path) for own in _OWN)


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
