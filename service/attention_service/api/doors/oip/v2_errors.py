"""Errors as the Open Inference Protocol writes them, on its paths."""

from typing import Any

from starlette.types import Scope

from attention_contract.errors import AttentionError, InvalidRequest


class NotSupported(AttentionError, status=501, title="This server does not have it"):
    """A part of the protocol that this server leaves out."""


def is_v2(scope: Scope) -> bool:
    """True for a request to the protocol's paths, if the server answers them."""
    path = scope.get("path", "")
    return (path == "/v2" or path.startswith("/v2/")) and bool(scope["app"].state.settings.oip)


def v2_status(error: AttentionError) -> int:
    """The status of an error there: 400 for what is not valid."""
    return 400 if error.status == InvalidRequest.status else error.status


def v2_error(error: AttentionError) -> dict[str, Any]:
    """The object that describes an error. Clients read ``error``; the rest is as in a problem document."""
    problem = error.to_problem()
    told = {name: value for name, value in problem.items() if name not in {"type", "title", "status", "detail"}}
    return told | {"error": error.detail}
