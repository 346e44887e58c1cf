"""From an operation of the contract and a function to a route: read, call, reply."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from attention_contract.base import WireModel
from attention_contract.errors import AttentionError, Cancelled, Draining, InvalidRequest
from attention_contract.operations import Operation
from attention_contract.schemas.modules import ModuleInfo, Parameter, ParameterList
from attention_contract.wire import JSON, PICTURES
from attention_service.api import negotiation, pictures, problems
from attention_service.runtime.engine import Engine

BodyT = TypeVar("BodyT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Call(Generic[BodyT]):
    """One request, read and checked: what a handler works with."""

    engine: Engine
    path: dict[str, str]
    body: BodyT
    pin: str | None
    """The version that If-Match names."""

    @property
    def name(self) -> str:
        """The module that the path names."""
        return self.path["name"]


VERSIONED = (ModuleInfo, ParameterList, Parameter)
"""Replies that are a module or a part of one: their version is their ETag."""
Handler = Callable[[Call[Any]], Awaitable[WireModel | None]]


def serve(router: APIRouter, operation: Operation[Any]) -> Callable[[Handler], Handler]:
    """Make a function of a Call the route of an operation."""

    def register(handler: Handler) -> Handler:
        async def endpoint(request: Request) -> Response:
            media_type = negotiation.accepted(request, operation) if operation.reply is not None else JSON
            pin = _etags(request.headers.get("if-match"), "If-Match")
            engine: Engine = request.app.state.engine
            with engine.budget.body() as hold:
                body: Any = None
                if operation.request is not None:
                    limit = request.app.state.settings.max_body_bytes
                    body = _pinned(await negotiation.read(request, operation, operation.request, limit, hold), pin)
                if media_type in PICTURES:
                    body = pictures.with_sweep(body)
                call = Call(engine, dict(request.path_params), body, pin)
                try:
                    reply = await _unless_gone(request, handler(call))
                    if media_type in PICTURES:
                        return await _drawn(reply, body, media_type)
                    return await _respond(request, operation, reply, media_type, getattr(body, "encoding", "list"))
                except AttentionError:
                    raise
                except Exception as fault:
                    raise problems.unexpected(request, fault) from fault

        router.add_api_route(
            operation.path, endpoint, methods=[operation.method], name=operation.name, include_in_schema=False
        )
        return handler

    return register


async def _drawn(reply: Any, body: Any, media_type: str) -> Response:
    picture = await run_in_threadpool(pictures.draw, reply, body.sweep, media_type)
    return Response(picture, media_type=media_type, headers={"Vary": "Accept"})


async def _respond(
    request: Request, operation: Operation[Any], reply: WireModel | None, media_type: str, encoding: Any
) -> Response:
    if reply is None:
        return Response(status_code=operation.status)
    headers: dict[str, str] = {"Vary": "Accept"} if operation.tensors or operation.pictures else {}
    if isinstance(reply, VERSIONED):
        headers["ETag"] = f'"{reply.version}"'
        if operation.method == "GET" and _unchanged(request.headers.get("if-none-match"), headers["ETag"]):
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
    if pin is None or "version" not in type(body).model_fields:
        return body
    if body.version not in {None, pin}:
        raise InvalidRequest(
            "version: the body and If-Match name different versions; send one of them", param="version"
        )
    return body.model_copy(update={"version": pin})


async def _unless_gone(request: Request, work: Coroutine[Any, Any, ResultT] | Awaitable[ResultT]) -> ResultT:
    """The result of the work, given up as soon as the caller has gone away. Raises Cancelled then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the caller went away before the answer was ready")
    except asyncio.CancelledError:  # the server gives up what is still running at the end of its grace
        raise Draining(
            "the server stopped before the answer was ready; ask another, or this one once it is back"
        ) from None
    finally:
        gone.cancel()
        task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
