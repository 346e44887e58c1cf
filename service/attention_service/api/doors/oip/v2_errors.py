"""Errors as the Open Inference Protocol writes them, on its paths."""

from starlette.types import Scope

from attention_contract.errors import AttentionError
from attention_service.api.handlers import ErrorForm, status_elsewhere


class NotSupported(AttentionError, status=501, title="This server does not have it"):
    """A part of the protocol that this server leaves out."""


def v2_form(scope: Scope, error: AttentionError) -> ErrorForm | None:
    """The form of an error on the protocol's paths; elsewhere None.

    Clients read ``error``; the rest is as in a problem document.
    """
    path = scope.get("path", "")
    if path != "/v2" and not path.startswith("/v2/"):
        return None
    problem = error.to_problem()
    rest = {name: value for name, value in problem.items() if name not in {"type", "title", "status", "detail"}}
    return ErrorForm(rest | {"error": error.detail}, status_elsewhere(error))
