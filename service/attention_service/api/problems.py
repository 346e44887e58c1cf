"""Errors as problem documents (RFC 9457)."""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Mount
from starlette.types import Receive, Scope, Send

from attention_contract.errors import (
    PROBLEM_MEDIA_TYPE,
    AttentionError,
    Draining,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    from_problem,
)
from attention_contract.operations import OPENAI_PATHS, list_models
from attention_contract.wire import JSON, to_json
from attention_service.runtime.request_timing import timing

_OPENAI_OFFER: Final = f"the paths of OpenAI's API are {', '.join(sorted(OPENAI_PATHS | {list_models.path}))}"
log = structlog.get_logger(__name__)
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered."""


def note(error: AttentionError) -> None:
    """Note an error as the answer to the current request, whose id it gets."""
    error.request_id = error.request_id or request_id.get()
    if (current := timing.get()) is not None:
        current.code = error.code


def render(error: AttentionError) -> Response:
    """The response that carries an error, with the request's id in it."""
    note(error)
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Draining):
        headers["Connection"] = "close"  # the server closes the connection soon; the caller must not use it again
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.facts.get("allowed", ()))
    return ProblemResponse(error, headers)


@dataclass(frozen=True)
class ErrorForm:
    """The form of an error for the clients of another protocol."""

    body: Mapping[str, Any]
    status: int
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


def status_elsewhere(error: AttentionError | type[AttentionError]) -> int:
    """The status of an error in other protocols: 400 for what is not valid."""
    return 400 if error.status == InvalidRequest.status else error.status


class ProblemResponse(Response):
    """An error as a problem document; on the paths of other protocols, as their clients read it."""

    def __init__(self, error: AttentionError, headers: Mapping[str, str]) -> None:
        super().__init__(to_json(error.to_problem()), error.status, headers, PROBLEM_MEDIA_TYPE)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the form that the first door which has one for the path gives it."""
        for form_of in scope["app"].state.error_forms:
            if (form := form_of(scope, self._error)) is not None:
                self.status_code, self.body = form.status, to_json(form.body)
                self.headers["content-type"], self.headers["content-length"] = form.media_type, str(len(self.body))
                self.headers.update(form.headers)
                break
        await super().__call__(scope, receive, send)


def install(app: FastAPI) -> None:
    """Answer the errors of ordinary routes, of routing and of added middleware with problem documents."""

    @app.exception_handler(AttentionError)
    async def known(_: Request, error: AttentionError) -> Response:
        return render(error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if request.method == "OPTIONS" and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            return Response(status_code=HTTPStatus.NO_CONTENT, headers={"Allow": ", ".join(_methods(request))})
        return render(_from_http(request, error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return render(InvalidRequest("; ".join(str(fault["msg"]) for fault in error.errors()[:4])))

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        return render(unexpected(request.url.path, error))


def unexpected(path: str, fault: BaseException) -> InternalError:
    """Log a fault of the server and make the error that its caller gets."""
    log.error("internal_error", path=path, request_id=request_id.get(), exc_info=fault)
    return InternalError("the server failed; its log has the cause under this request's id")


def forget(fault: BaseException | None) -> None:
    """Drop the traceback of a fault, whose frames hold the request, so that its memory is freed now.

    Some frames hold the fault itself; such a cycle would stay until the garbage collector runs.
    """
    while fault is not None:
        fault.__traceback__ = None
        fault = fault.__cause__ or fault.__context__


def _from_http(request: Request, error: HTTPException) -> AttentionError:
    path = request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND:
        offered = f". Here {_OPENAI_OFFER}" if path.startswith("/v1/") else ""
        return NotFound(f"there is nothing at {path[:200]}; GET /docs lists every path{offered}")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = _methods(request)
        return MethodNotAllowed(
            f"{request.method} is not allowed at {path[:200]}; expected {' or '.join(allowed)}", allowed=allowed
        )
    return from_problem(error.status_code, {"detail": str(error.detail)})


def _methods(request: Request) -> list[str]:
    """The methods that the path of a request takes; of one with a route of its own, what this route takes."""
    full_scope = {**request.scope, "path": request.url.path, "root_path": ""}  # a mount takes its part off the path
    routes = [route for route in request.app.routes if route.matches(full_scope)[0] != Match.NONE]
    own = [route for route in routes if getattr(route, "path", None) == request.url.path]
    methods = {"OPTIONS"}
    for route in own or routes:
        methods |= {"GET", "HEAD"} if isinstance(route, Mount) else set(getattr(route, "methods", None) or ())
        methods |= {"HEAD"} if getattr(route, "answers_head", False) and "GET" in route.methods else set()
    return sorted(methods)
