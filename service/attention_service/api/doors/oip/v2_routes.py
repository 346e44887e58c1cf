"""The paths of the Open Inference Protocol and of Triton's extensions to it."""

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from starlette._utils import get_route_path
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope

from attention_service.api.doors.oip.v2_handlers import V2Handlers
from attention_service.api.handlers import serve
from attention_service.runtime.scheduling.budget import BodyMemory

_MODEL: Final = "/v2/models/{model}"
_VERSION: Final = "/v2/models/{model}/versions/{version}"
_NOT_SUPPORTED: Final = (
    "/v2/trace/setting", f"{_MODEL}/trace/setting", "/v2/logging", "/v2/systemsharedmemory/{rest:path}",
    "/v2/cudasharedmemory/{rest:path}", f"{_MODEL}/generate", f"{_MODEL}/generate_stream",
    f"{_VERSION}/generate", f"{_VERSION}/generate_stream",
)  # fmt: skip
"""Extensions of Triton that this server leaves out."""
Answer = Callable[[Scope, Receive, BodyMemory], Awaitable[Response]]


def add_v2_routes(routes: list[BaseRoute], *, siblings: bool) -> None:
    """Add the routes to others. ``siblings``: other processes change the modules too."""
    at = V2Handlers(siblings=siblings)
    # A router tries its routes in this order, so the most frequent ones come first.
    routes[:0] = [V2Route("v2_infer", "POST", f"{model}/infer", at.infer) for model in (_MODEL, _VERSION)]
    routes += [
        V2Route("v2_live", "GET", "/v2/health/live", at.live),
        V2Route("v2_ready", "GET", "/v2/health/ready", at.ready),
        V2Route("v2_server", "GET", "/v2", at.server),
        V2Route("v2_statistics", "GET", "/v2/models/stats", at.statistics),
        V2Route("v2_index", "POST", "/v2/repository/index", at.index),
        V2Route("v2_load", "POST", "/v2/repository/models/{model}/load", at.load),
        V2Route("v2_unload", "POST", "/v2/repository/models/{model}/unload", at.unload),
    ]
    for model in (_MODEL, _VERSION):
        routes += [
            V2Route("v2_metadata", "GET", model, at.metadata),
            V2Route("v2_config", "GET", f"{model}/config", at.config),
            V2Route("v2_model_ready", "GET", f"{model}/ready", at.model_ready),
            V2Route("v2_statistics", "GET", f"{model}/stats", at.statistics),
        ]
    routes += [
        V2Route("v2_not_supported", method, path, at.not_supported)
        for path in _NOT_SUPPORTED
        for method in ("GET", "POST")
    ]


class V2Route(Route):
    """The route of one path, with or without a slash at its end."""

    def __init__(self, name: str, method: str, path: str, answer: Answer) -> None:
        super().__init__(path, answer, methods=[method], name=name)
        self.app = partial(serve, answer)
        pattern = self.path_regex.pattern.removesuffix("$").replace("(?P<version>[^/]+)", "(?P<version>[^/]*)")
        self.path_regex = re.compile(f"{pattern}/?$")

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request by path and method."""
        path_match = self.path_regex.match(get_route_path(scope)) if scope["type"] == "http" else None
        if path_match is None:
            return Match.NONE, {}
        match = Match.FULL if scope["method"] in (self.methods or ()) else Match.PARTIAL
        return match, {"endpoint": self.endpoint, "path_params": path_match.groupdict(), "route": self}
