"""The lean lane: requests that carry tensors reach their endpoint by their path alone.

The application's own routing tries one route after the other and prepares for what these operations do not use; that
takes longer than the smallest attention. Both ways end in the same endpoint, so their answers cannot differ.
"""

from collections.abc import Mapping

from fastapi import APIRouter
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from attention_service.api.serving import Endpoint

_MODULES = "/v1/modules/"


def endpoints_of(router: APIRouter) -> dict[str, Endpoint]:
    """The endpoints that take tensors by POST, by their path."""
    return {
        route.path: route.endpoint
        for route in router.routes
        if isinstance(route, Route)
        and isinstance(route.endpoint, Endpoint)
        and route.endpoint.operation.tensors
        and route.endpoint.operation.method == "POST"
    }


class Lane:
    """Middleware that hands requests to their endpoint where it knows it, and all others on."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self.app = app
        prefix = f"{_MODULES}{{name}}/"
        self._raw = {path: endpoint for path, endpoint in endpoints.items() if "{" not in path}
        self._of_modules = {
            path.removeprefix(prefix): endpoint for path, endpoint in endpoints.items() if path.startswith(prefix)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            path: str = scope["path"]
            endpoint = self._raw.get(path)
            if endpoint is None and path.startswith(_MODULES):
                name, _, question = path[len(_MODULES) :].partition("/")
                endpoint = self._of_modules.get(question) if name else None
                if endpoint is not None:
                    scope["path_params"] = {"name": name}
        await (endpoint or self.app)(scope, receive, send)
