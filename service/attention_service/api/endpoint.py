"""Two kinds of route. Each translates one operation of the contract: request, call of the engine, reply.

``read_route`` makes an ordinary FastAPI route, for operations without a body. ``TensorRoute`` reads and writes bodies
itself, because FastAPI knows neither safetensors nor limits; FastAPI matches and documents it like any other.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from attention_contract.base import WireModel
from attention_contract.errors import AttentionError, InvalidRequest
from attention_contract.operations import Operation
from attention_contract.request_options import Outline
from attention_contract.schemas.modules import ModuleInfo
from attention_contract.schemas.recordings import RecordingInfo
from attention_contract.schemas.sessions import SessionInfo
from attention_contract.tensors import Encoding
from attention_contract.wire import JSON, PICTURES
from attention_service.api import problems
from attention_service.api.bodies import negotiation, pictures
from attention_service.api.bodies.negotiation import Headers, header, tensor_bytes
from attention_service.api.bodies.request_body import UNCOUNTED, query_of, read_request
from attention_service.api.disconnection import unless_gone
from attention_service.api.documentation import VERSIONED, documented
from attention_service.api.http_limits.connection_limits import CAME
from attention_service.runtime.engine import Engine
from attention_service.runtime.scheduling.budget import Body
from attention_service.settings import Settings

Handler = Callable[..., Awaitable[WireModel | Response | None]]
"""The function behind a route. A whole response is sent as it is."""


@dataclass(slots=True)
class Call:
    """The engine, the settings and the headers of a request, for its handler."""

    engine: Engine
    settings: Settings
    headers: Headers
    pin: str | None
    """The version that If-Match names."""
    deadline: float | None
    """The time, of ``time.monotonic``, by which the answer must be ready; None for none."""
    outline: Outline | None = None
    """The outline of the body, if it can be remembered."""


def call_of(scope: Scope) -> Call:
    """Read the headers of a request. Raises InvalidRequest for one that is too long or cannot be read."""
    headers, state = negotiation.headers_of(scope), scope["app"].state
    pin = deadline = None
    if b"if-match" in headers:
        pin = _etag(header(headers, b"if-match"), "If-Match")
    if (wait := negotiation.wait(headers, state.settings.default_wait_s)) is not None:
        deadline = scope.get("state", {}).get(CAME, time.monotonic()) + wait
    return Call(state.engine, state.settings, headers, pin, deadline)


def _call(request: Request) -> Call:
    return call_of(request.scope)


CallDep = Annotated[Call, Depends(_call)]


class OperationRoute(APIRoute):
    """The route of an operation. It answers HEAD like GET, as Starlette's routes do and FastAPI's do not."""

    answers_head = True

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request by path and method."""
        match, found = super().matches(scope)
        return (Match.FULL if match == Match.PARTIAL and self._answers(scope["method"]) else match), found

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that matched."""
        await (self.app if self._answers(scope["method"]) else super().handle)(scope, receive, send)

    def _answers(self, method: str) -> bool:
        return ("GET" if method == "HEAD" else method) in (self.methods or ())


def read_route(operation: Operation[Any], handler: Handler) -> OperationRoute:
    """The route of an operation without a body, whose reply is JSON."""

    @wraps(handler)
    async def endpoint(call: Call, **path: str) -> Response:
        if operation.reply is not None:
            negotiation.accepted(call.headers, operation)
        return await _reply(call.headers, operation, await handler(call=call, **path), JSON)

    # A checkpoint's path has slashes.
    return OperationRoute(operation.path.replace("{path}", "{path:path}"), endpoint, **documented(operation))


class TensorRoute(OperationRoute):
    """The route of an operation whose request or reply carries tensors, or whose body is JSON within limits."""

    def __init__(self, operation: Operation[Any], handler: Handler) -> None:
        super().__init__(operation.path, handler, **documented(operation))
        self.operation = operation
        self.handler = handler
        self.app = self._serve

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp
        with scope["app"].state.engine.budget.body() as memory:
            try:
                answer = await self._answer(scope, receive, memory)
            except AttentionError as error:
                memory.give_back()
                answer = problems.render(error)
                problems.forget(error)
            await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, memory: Body) -> ASGIApp:
        """The response, whose memory is held until it is sent."""
        operation, call = self.operation, call_of(scope)
        media_type = negotiation.accepted(call.headers, operation)
        drawn = media_type in PICTURES
        if operation.pictures and (drawn or scope["query_string"]):
            options = pictures.options_of(query_of(scope), operation)
        body, call.outline = await read_request(scope, call.headers, receive, operation, call.settings, memory)
        if call.pin is not None:
            body, call.outline = _pinned(body, call.pin), None
        if drawn:
            facts, heads = _facts(call, operation, scope["path_params"], body)
            body, call.outline = pictures.with_needs(body, options, heads, facts.get("past", 0)), None
        work = self.handler(body=body, call=call, **scope["path_params"])
        reply: Any = await unless_gone(receive, work, call.deadline)
        if isinstance(reply, Response):
            memory.give_back()
            return reply
        if drawn:
            if (size := tensor_bytes(reply)) > UNCOUNTED:
                memory.become_reply(size)
            drawing = pictures.draw(reply, body, options, media_type, facts, call.engine.budget)
            picture = await unless_gone(receive, drawing, call.deadline)
            return Response(picture.data, media_type=media_type, headers={"Vary": "Accept"})
        encoding: Encoding = getattr(body, "encoding", "list")
        del body, work  # the reply may take their memory
        call.outline = None
        memory.give_back()
        answer = await _reply(call.headers, operation, reply, media_type, encoding)
        if (size := getattr(answer, "held_bytes", 0)) > UNCOUNTED:
            memory.become_reply(size)
        return answer


def _facts(call: Call, operation: Operation[Any], path: dict[str, str], body: Any) -> tuple[dict[str, Any], int | None]:
    """The facts of a picture's making that are known before, and the heads of its module."""
    facts: dict[str, Any] = {"operation": operation.name, "request_id": problems.request_id.get()}
    if operation.path.startswith("/v1/recordings/"):
        return facts | {"recording": path["id"]}, None
    module = call.engine.modules.get(path["name"], body.version) if "name" in path else None
    if operation.path.startswith("/v1/sessions/"):
        session = call.engine.sessions.registry.get(path["id"])
        module = session.module
        facts |= {"session": session.id, "past": session.length}
    if module is None:
        spec = getattr(body, "spec", None)
        return facts | ({} if spec is None else {"spec": spec.model_dump(mode="json", exclude_defaults=True)}), None
    config = module.config.model_dump(mode="json", exclude_defaults=True)
    return facts | {"module": module.name, "version": module.version, "config": config}, module.config.num_heads


async def _reply(
    sent: Headers,
    operation: Operation[Any],
    reply: Any,
    media_type: str,
    encoding: Encoding = "list",
) -> Response:
    """The response to an operation: its reply, and the headers that belong to it."""
    if reply is None:
        return Response(status_code=operation.status)
    headers: dict[str, str] = {"Vary": "Accept"} if operation.tensors or operation.pictures else {}
    if type(reply) in VERSIONED:
        headers["ETag"] = f'"{reply.version}"'
        if operation.method == "GET" and _unchanged(header(sent, b"if-none-match"), headers["ETag"]):
            return Response(status_code=304, headers=headers)
    if operation.status == 201 and isinstance(reply, ModuleInfo):
        headers["Location"] = f"/v1/modules/{reply.name}"
    if operation.status == 201 and isinstance(reply, RecordingInfo):
        headers["Location"] = f"/v1/recordings/{reply.id}"
    if operation.status == 201 and isinstance(reply, SessionInfo):
        headers["Location"] = f"/v1/sessions/{reply.session}"
    return await negotiation.render(reply, media_type, encoding=encoding, status=operation.status, headers=headers)


def _unchanged(given: str | None, etag: str) -> bool:
    """True if If-None-Match names the present version. RFC 9110 compares weakly."""
    tags = [tag.strip().removeprefix("W/") for tag in (given or "").split(",")]
    return "*" in tags or etag in tags


def _etag(given: str | None, name: str) -> str | None:
    """The one version that a precondition names; None for no precondition and for ``*``."""
    if given is None or given.strip() == "*":
        return None
    tag = given.strip().removeprefix("W/")
    if "," in tag or len(tag) < 2 or not (tag[0] == tag[-1] == '"'):
        raise InvalidRequest(f'{name}: expected one version in quotation marks, as in "4f1d…", or *', param=name)
    return tag[1:-1]


def _pinned(body: Any, pin: str) -> Any:
    """The body with the version that If-Match names, if it can carry one."""
    if body is None or "version" not in type(body).model_fields:
        return body
    if body.version not in {None, pin}:
        raise InvalidRequest(
            "version: the body and If-Match name different versions; send one of them", param="version"
        )
    return body.model_copy(update={"version": pin})
