"""From an operation of the contract and a function to a route: read, call, reply."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from attention_contract.base import WireModel
from attention_contract.errors import AttentionError, InvalidRequest
from attention_contract.operations import Operation
from attention_contract.schemas.modules import ModuleInfo, Parameter, ParameterList
from attention_contract.tensors import Encoding
from attention_contract.wire import JSON, PICTURES
from attention_service.api import negotiation, pictures, problems
from attention_service.api.leaving import unless_gone
from attention_service.runtime.engine import Engine

BodyT = TypeVar("BodyT")


@dataclass(frozen=True)
class Call(Generic[BodyT]):
    """One request, read and checked: what a handler works with."""

    engine: Engine
    path: dict[str, str]
    body: BodyT
    pin: str | None
    """The version that If-Match names."""
    deadline: float | None = None
    """Of ``time.monotonic``: computing that has not begun by then is not wanted any more."""

    @property
    def name(self) -> str:
        """The module that the path names."""
        return self.path["name"]


VERSIONED = (ModuleInfo, ParameterList, Parameter)
"""Replies that are a module or a part of one: their version is their ETag."""
Handler = Callable[[Call[Any]], Awaitable[WireModel | None]]


class Endpoint:
    """One operation as an ASGI application: every operation is answered here, whichever way its request was routed."""

    def __init__(self, operation: Operation[Any], handler: Handler) -> None:
        self.operation = operation
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Whatever goes wrong becomes a problem document here."""
        scope["operation"] = self.operation.name
        answer: ASGIApp
        try:
            answer = await self._answer(scope, receive)
        except AttentionError as error:
            answer = problems.render(error)
            problems.forget(error)
        except Exception as fault:
            answer = problems.render(problems.unexpected(scope["path"], fault))
            problems.forget(fault)
        await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        operation, state = self.operation, scope["app"].state
        headers = negotiation.headers_of(scope)
        media_type = negotiation.accepted(headers, operation) if operation.reply is not None else JSON
        pin = _etags(negotiation.header(headers, b"if-match"), "If-Match")
        wait = negotiation.wait(headers)
        deadline = None if wait is None else time.monotonic() + wait
        engine: Engine = state.engine
        with engine.budget.body() as memory:
            limit = state.settings.max_body_bytes
            body = await negotiation.read(scope, headers, receive, operation, state.forms, limit, memory)
            body = _pinned(body, pin)
            if media_type in PICTURES:
                body = pictures.with_sweep(body)
            call = Call(engine, scope.get("path_params") or {}, body, pin, deadline)
            reply = await unless_gone(receive, self._handler(call))
            if media_type in PICTURES:
                return await _drawn(reply, body, media_type)
            return await _respond(headers, operation, reply, media_type, getattr(body, "encoding", "list"))


def serve(router: APIRouter, operation: Operation[Any]) -> Callable[[Handler], Handler]:
    """Make a function of a Call the route of an operation."""

    def register(handler: Handler) -> Handler:
        endpoint = Endpoint(operation, handler)
        router.routes.append(
            Route(operation.path, endpoint, methods=[operation.method], name=operation.name, include_in_schema=False)
        )
        return handler

    return register


async def _drawn(reply: Any, body: Any, media_type: str) -> ASGIApp:
    picture = await run_in_threadpool(pictures.draw, reply, body.sweep, media_type)
    return Response(picture, media_type=media_type, headers={"Vary": "Accept"})


async def _respond(
    sent: negotiation.Headers, operation: Operation[Any], reply: WireModel | None, media_type: str, encoding: Encoding
) -> ASGIApp:
    if reply is None:
        return Response(status_code=operation.status)
    headers: dict[str, str] = {"Vary": "Accept"} if operation.tensors or operation.pictures else {}
    if isinstance(reply, VERSIONED):
        headers["ETag"] = f'"{reply.version}"'
        if operation.method == "GET" and _unchanged(negotiation.header(sent, b"if-none-match"), headers["ETag"]):
            return Response(status_code=304, headers=headers)
    if operation.status == 201 and isinstance(reply, ModuleInfo):
        headers["Location"] = f"/v1/modules/{reply.name}"
    return await negotiation.render(reply, media_type, encoding=encoding, status=operation.status, headers=headers)


def _unchanged(header: str | None, etag: str) -> bool:
    """Whether If-None-Match names the present version; compared weakly, as RFC 9110 has it."""
    given = [tag.strip().removeprefix("W/") for tag in (header or "").split(",")]
    return "*" in given or etag in given


def _etags(header: str | None, name: str) -> str | None:
    """The one version that a precondition names; None for no precondition and for ``*``."""
    if header is None or header.strip() == "*":
        return None
    tag = header.strip().removeprefix("W/")
    if "," in tag or len(tag) < 2 or not (tag[0] == tag[-1] == '"'):
        raise InvalidRequest(f'{name}: expected one version in quotation marks, as in "4f1d…", or *', param=name)
    return tag[1:-1]


def _pinned(body: Any, pin: str | None) -> Any:
    """The body with the version that If-Match names, where it can carry one."""
    if pin is None or body is None or "version" not in type(body).model_fields:
        return body
    if body.version not in {None, pin}:
        raise InvalidRequest(
            "version: the body and If-Match name different versions; send one of them", param="version"
        )
    return body.model_copy(update={"version": pin})
