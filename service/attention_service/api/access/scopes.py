"""The scopes of API keys, and the ones that each route needs."""

from collections.abc import Awaitable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from attention_contract.errors import Forbidden
from attention_contract.operations import ANY_KEY, INFER, INSPECT, MANAGE, METRICS, NO_KEY, OPERATIONS, SEE, Scopes
from attention_service.api import problems
from attention_service.api.access.audit import AUDITED, Audited

HELD: Final = "attention.scopes"
"""The entry of the ASGI scope with the scopes that the caller holds."""
SCOPES: Final[Mapping[str, Scopes]] = MappingProxyType(
    {operation.name: operation.scopes for operation in OPERATIONS}
    | {"metrics": METRICS, "session_stream": INFER, "sound_stream": INFER}
    | {
        "v2_live": NO_KEY,
        "v2_ready": NO_KEY,
        "v2_server": ANY_KEY,
        "v2_not_supported": ANY_KEY,
        "v2_metadata": SEE,
        "v2_config": SEE,
        "v2_model_ready": SEE,
        "v2_index": SEE,
        "v2_statistics": INSPECT,
        "v2_infer": INFER,
        "v2_load": MANAGE,
        "v2_unload": MANAGE,
    }
    | dict.fromkeys(
        (
            "page",
            "open",
            "web",
            "openapi",
            "custom_swagger_ui_html",
            "swagger_ui_redirect",
            "redoc_html",
            "static-offline-docs",
            "mcp",
        ),
        ANY_KEY,
    )
)
"""The scopes of each route by its name. One of them is enough."""
OPEN_PATHS: Final = frozenset(operation.path for operation in OPERATIONS if not operation.scopes)
"""The paths that need no key."""
OPEN_V2_PATHS: Final = frozenset(f"/v2/health/{state}{end}" for state in ("live", "ready") for end in ("", "/"))
"""Paths of the Open Inference Protocol that need no key."""


def require_scopes(routes: Iterable[BaseRoute]) -> None:
    """Let each route answer only callers who hold one of its scopes. Raises KeyError for a route without scopes."""
    for route in routes:
        endpoint: Any = route
        if endpoint.name not in SCOPES:
            raise KeyError(f"{endpoint.name}: the route has no scopes; add it to SCOPES")
        if SCOPES[endpoint.name] and not hasattr(endpoint, "operation"):  # the route of an operation checks them itself
            endpoint.app = Guarded(endpoint.app, endpoint.name)
        if endpoint.name in AUDITED:
            endpoint.app = Audited(endpoint.app, endpoint.name)


def lacking(name: str, needed: Scopes, held: Scopes) -> Forbidden:
    """The refusal of a caller who holds none of the scopes that a route needs."""
    return Forbidden(
        f"{name} needs a key with scope {' or '.join(sorted(needed))}; this one has {', '.join(sorted(held))}",
        needed_scopes=sorted(needed),
    )


class Guarded:
    """The application of a route, for callers who hold one of its scopes."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self.app = app
        self._name = name

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request."""
        needed = SCOPES[self._name]
        if scope[HELD].isdisjoint(needed):
            return problems.render(lacking(self._name, needed, scope[HELD]))(scope, receive, send)
        return self.app(scope, receive, send)
