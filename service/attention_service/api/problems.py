"""Every error as RFC 9457 problem+json, rendered in this one place."""

from http import HTTPStatus

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from attention_contract.errors import (
    PROBLEM_MEDIA_TYPE,
    AttentionError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    from_problem,
)
from attention_contract.operations import OPERATIONS
from attention_contract.wire import dump_json
from attention_service.api.observing import request_id

log = structlog.get_logger(__name__)


def render(error: AttentionError) -> Response:
    """The response that carries an error, with the request's id in it."""
    error.request_id = error.request_id or request_id.get()
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.facts.get("allowed", ()))
    return Response(dump_json(error.to_problem()), error.status, headers, PROBLEM_MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answer every error of the application with a problem document."""

    @app.exception_handler(AttentionError)
    async def known(_: Request, error: AttentionError) -> Response:
        return render(error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return render(_from_http(request, error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return render(InvalidRequest("; ".join(str(fault["msg"]) for fault in error.errors()[:4])))

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        return render(unexpected(request.url.path, error))


def unexpected(path: str, fault: BaseException) -> InternalError:
    """The error for a fault of the server's own, which goes into the log."""
    log.error("internal_error", path=path, request_id=request_id.get(), exc_info=fault)
    return InternalError("the server failed; its log has the cause under this request's id")


def forget(fault: BaseException | None) -> None:
    """Let go of the frames that a fault went through, for they hold the request, and some of them the fault itself.

    Otherwise both stay until the collector comes across them.
    """
    while fault is not None:
        fault.__traceback__ = None
        fault = fault.__cause__ or fault.__context__


def _from_http(request: Request, error: HTTPException) -> AttentionError:
    path = request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND:
        return NotFound(f"there is nothing at {path[:200]}; GET /docs lists every path")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = sorted({operation.method for operation in OPERATIONS if compile_path(operation.path)[0].match(path)})
        return MethodNotAllowed(
            f"{request.method} is not known at {path[:200]}; expected {' or '.join(allowed) or 'GET'}",
            allowed=allowed or ["GET"],
        )
    return from_problem(error.status_code, {"detail": str(error.detail)})
