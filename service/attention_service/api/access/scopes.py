"""The scopes of API keys, and the ones that each route needs."""

from collections.abc import Awaitable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from attention_contract.errors import Forbidden
from attention_contract.operations import OPERATIONS
from attention_service.api import problems
from attention_service.api.access.audit import AUDITED, Audited

KeyScope = Literal["infer", "inspect", "manage", "metrics"]
Scopes = frozenset[KeyScope]
EVERY: Final[Scopes] = frozenset(get_args(KeyScope))
OPEN: Final[Scopes] = frozenset()
"""A route that needs no key."""
HELD: Final = "attention.scopes"
"""The entry of the ASGI scope with the scopes that the caller holds."""

_INFER: Final[Scopes] = frozenset({"infer"})
_INSPECT: Final[Scopes] = frozenset({"inspect"})
_MANAGE: Final[Scopes] = frozenset({"manage"})
_ASK: Final[Scopes] = frozenset({"infer", "inspect"})
_OWN: Final[Scopes] = frozenset({"infer", "manage"})
_SEE: Final[Scopes] = frozenset({"infer", "inspect", "manage"})

SCOPES: Final[Mapping[str, Scopes]] = MappingProxyType({
    # computing
    "forward": _INFER, "weights": _INFER, "gradients": _INFER,
    "create_pass": _INFER, "create_raw_pass": _INFER, "backward": _INFER,
    "raw_forward": _INFER, "raw_weights": _INFER, "raw_gradients": _INFER, "hopfield_retrieve": _INFER,
    "open_session": _INFER, "step_session": _INFER, "step_sessions": _INFER, "fork_session": _INFER,
    "truncate_session": _INFER, "reorder_session": _INFER, "session_weights": _INFER, "session_gradients": _INFER,
    "attribution": _ASK, "raw_attribution": _ASK, "effects": _ASK, "raw_effects": _ASK,
    "session_attribution": _INFER, "session_effects": _INFER,
    "get_session_cache": _INFER, "put_session_cache": _INFER, "session_stream": _INFER,
    "create_recording": _INFER, "record_text": _INFER, "predict_text": _INFER,
    "model_forward": _INFER, "model_weights": _INFER,
    # seeing and ending what is one's own
    "list_sessions": _OWN, "get_session": _OWN, "delete_session": _OWN, "delete_recording": _OWN,
    # facts
    "complexity": _ASK, "raw_complexity": _ASK, "similarity": _ASK, "rollout": _ASK,
    "model_complexity": _ASK,
    "list_parameters": _INSPECT, "get_parameter": _INSPECT, "accuracy": _INSPECT, "circuits": _INSPECT,
    "list_modules": _SEE, "get_module": _SEE, "list_checkpoints": _SEE, "get_checkpoint": _SEE,
    "list_models": _SEE, "get_model": _SEE,
    "list_recordings": _SEE, "get_recording": _SEE, "recording_statistics": _SEE, "recording_similarity": _SEE,
    "recording_rollout": _SEE,
    # changes
    "create_module": _MANAGE, "import_module": _MANAGE, "delete_module": _MANAGE, "replace_parameters": _MANAGE,
    "fetch_checkpoint": _MANAGE, "load_model": _MANAGE, "unload_model": _MANAGE,
    "metrics": frozenset({"metrics"}),
    # any key
    "server_info": EVERY, "list_variants": EVERY, "list_hardware": EVERY,
    "page": EVERY, "web": EVERY, "openapi": EVERY, "custom_swagger_ui_html": EVERY, "swagger_ui_redirect": EVERY,
    "redoc_html": EVERY, "static-offline-docs": EVERY,
    # no key
    "health_live": OPEN, "health_ready": OPEN,
})  # fmt: skip
"""The scopes of each route by its name. One of them is enough."""
OPEN_PATHS: Final = frozenset(operation.path for operation in OPERATIONS if not SCOPES[operation.name])


def require_scopes(routes: Iterable[BaseRoute]) -> None:
    """Let each route answer only callers who hold one of its scopes. Raises KeyError for a route without scopes."""
    for route in routes:
        each: Any = route
        if each.name not in SCOPES:
            raise KeyError(f"{each.name}: the route has no scopes; add it to SCOPES")
        if SCOPES[each.name]:
            each.app = Guarded(each.app, each.name)
        if each.name in AUDITED:
            each.app = Audited(each.app, each.name)


class Guarded:
    """The application of a route, for callers who hold one of its scopes."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self.app = app
        self._name = name
        self._enough = SCOPES[name]

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request."""
        if not scope[HELD].isdisjoint(self._enough):
            return self.app(scope, receive, send)
        needed = sorted(self._enough)
        error = Forbidden(
            f"{self._name} needs a key with scope {' or '.join(needed)}; this one has {', '.join(sorted(scope[HELD]))}",
            needed_scopes=needed,
        )
        return problems.render(error)(scope, receive, send)
