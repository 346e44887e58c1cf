"""The route of an operation of the contract: bytes to request, its handler, reply to bytes.

FastAPI matches and documents a route like any other. It reads and writes bodies itself, because FastAPI knows neither
safetensors nor limits.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi.routing import APIRoute
from starlette._utils import get_route_path
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from attention_contract.errors import AttentionError, InvalidRequest
from attention_contract.json_writing import tensor_bytes
from attention_contract.operations import Operation
from attention_contract.schemas.models import ModelInfo
from attention_contract.schemas.modules import ModuleInfo
from attention_contract.schemas.recordings import RecordingInfo
from attention_contract.schemas.sessions import SessionInfo
from attention_contract.tensors import Encoding
from attention_contract.wire import JSON, PICTURES, TABLES
from attention_service.api import problems
from attention_service.api.access.scopes import HELD, lacking
from attention_service.api.bodies import negotiation, pictures, table_replies
from attention_service.api.bodies.request_body import query_of, read_request
from attention_service.api.disconnection import unless_gone
from attention_service.api.documentation import VERSIONED, documented, signature_of
from attention_service.api.http_limits.connection_limits import CAME
from attention_service.api.request_head import Headers, header, headers_of, wait_seconds
from attention_service.engine import Engine
from attention_service.runtime.scheduling.budget import UNCOUNTED, BodyMemory
from attention_service.settings import Settings


@dataclass(slots=True)
class RequestContext:
    """Everything about a request but its body, for its handler."""

    engine: Engine
    settings: Settings
    headers: Headers
    path: Mapping[str, str]
    """The parts of the path that name something."""
    came: float
    """The time, of ``time.monotonic``, at which the request came."""
    pin: str | None
    """The version that If-Match names."""
    deadline: float | None
    """The time, of ``time.monotonic``, by which the answer must be ready; None for none."""
    media_type: str = JSON
    """The media type of the reply."""

    @property
    def name(self) -> str:
        """The module that the path names."""
        return self.path["name"]

    @property
    def model(self) -> str:
        """The whole model that the path names."""
        return self.path["model"]

    @property
    def id(self) -> str:
        """The session, recording or kept pass that the path names."""
        return self.path["id"]


Handler = Callable[[RequestContext, Any], Awaitable[Any]]
"""The function that answers an operation: of a call and a body, the reply. A whole response is sent as it is."""


def call_of(scope: Scope) -> RequestContext:
    """Read the headers of a request. Raises InvalidRequest for one that is too long or cannot be read."""
    headers, state = headers_of(scope), scope["app"].state
    came, pin = scope.get("state", {}).get(CAME) or time.monotonic(), None
    if b"if-match" in headers:
        pin = _etag(header(headers, b"if-match"), "If-Match")
    seconds = wait_seconds(headers, state.settings.default_wait_s)
    deadline = None if seconds is None else came + seconds
    return RequestContext(state.engine, state.settings, headers, scope["path_params"], came, pin, deadline)


async def serve(
    answer: Callable[[Scope, Receive, BodyMemory], Awaitable[ASGIApp]], scope: Scope, receive: Receive, send: Send
) -> None:
    """Send what ``answer`` makes of a request, or the error that it raises. Its memory is held until that is sent."""
    memory = BodyMemory(scope["app"].state.engine.host)
    try:
        try:
            response = await answer(scope, receive, memory)
        except AttentionError as error:
            memory.give_back()
            response = problems.render(error)
            problems.forget(error)
        await response(scope, receive, send)
    finally:
        memory.give_back()


class OperationRoute(APIRoute):
    """The route of an operation. It answers HEAD like GET, as Starlette's routes do and FastAPI's do not."""

    answers_head = True

    def __init__(self, operation: Operation[Any], handler: Handler) -> None:
        path = operation.path.replace("{path}", "{path:path}")  # a checkpoint's path has slashes
        super().__init__(path, signature_of(operation), **documented(operation))
        self.operation = operation
        self.handler = handler
        self.app = partial(serve, self._answer)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request by path and method."""
        path_match = self.path_regex.match(get_route_path(scope)) if scope["type"] == "http" else None
        if path_match is None:
            return Match.NONE, {}
        method = scope["method"]
        match = Match.FULL if ("GET" if method == "HEAD" else method) == self.operation.method else Match.PARTIAL
        return match, {"endpoint": self.endpoint, "path_params": path_match.groupdict(), "route": self}

    def handle(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:  # type: ignore[override]
        """Answer a request that matched."""
        method = scope["method"]
        if ("GET" if method == "HEAD" else method) == self.operation.method:
            return self.app(scope, receive, send)
        return super().handle(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, memory: BodyMemory) -> ASGIApp:
        """The response, whose memory is held until it is sent."""
        operation = self.operation
        if operation.scopes and operation.scopes.isdisjoint(scope[HELD]):
            raise lacking(operation.name, operation.scopes, scope[HELD])
        call = call_of(scope)
        media_type = JSON if operation.reply is None else negotiation.accepted(call.headers, operation)
        call.media_type = media_type
        drawn = media_type in PICTURES
        if operation.pictures and (drawn or scope["query_string"]):
            options = pictures.options_of(query_of(scope), operation)
        body = await read_request(scope, call.headers, receive, operation, call.settings, memory)
        if call.pin is not None:
            body = pinned(body, call.pin)
        if drawn:
            facts, heads = _facts(call, operation, body)
            body = pictures.with_needs(body, options, heads, facts.get("past", 0))
        if media_type in TABLES:
            body = table_replies.with_rows(body)
        work = self.handler(call, body)
        reply: Any = await unless_gone(receive, work, call.deadline)
        if isinstance(reply, Response):
            memory.give_back()
            return _held(reply, memory)
        if drawn:
            if (size := tensor_bytes(reply)) > UNCOUNTED:
                memory.become_reply(size)
            drawing = pictures.draw(reply, body, options, media_type, facts, call.engine.host)
            picture = await unless_gone(receive, drawing, call.deadline)
            return Response(picture.data, media_type=media_type, headers={"Vary": "Accept"})
        if media_type in TABLES:
            if (size := tensor_bytes(reply)) > UNCOUNTED:
                memory.become_reply(size)
            content = await unless_gone(
                receive, table_replies.write(reply, body, media_type, call.engine.host), call.deadline
            )
            return Response(content, media_type=media_type, headers={"Vary": "Accept"})
        encoding: Encoding = getattr(body, "encoding", "list")
        del body, work  # the reply may take their memory
        memory.give_back()
        return _held(await _reply(call.headers, operation, reply, media_type, encoding), memory)


def _held(answer: Response, memory: BodyMemory) -> Response:
    """A response whose memory is held until it is sent. Raises NoRoom."""
    if (size := getattr(answer, "held_bytes", 0)) > UNCOUNTED:
        memory.become_reply(size)
    return answer


def _facts(call: RequestContext, operation: Operation[Any], body: Any) -> tuple[dict[str, Any], int | None]:
    """The facts of a picture's making that are known before, and the heads of its module."""
    facts: dict[str, Any] = {"operation": operation.name, "request_id": problems.request_id.get()}
    if operation.path.startswith("/v1/recordings/"):
        return facts | {"recording": call.id}, None
    if "model" in call.path:
        return facts | {"model": call.model}, None
    module = call.engine.modules.get(call.name, body.version) if "name" in call.path else None
    if operation.path.startswith("/v1/sessions/"):
        session = call.engine.sessions.registry.get(call.id)
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
    headers: dict[str, str] = {"Vary": "Accept"} if operation.tensors or operation.pictures or operation.tables else {}
    if type(reply) in VERSIONED:
        headers["ETag"] = f'"{reply.version}"'
        if operation.method == "GET" and _unchanged(header(sent, b"if-none-match"), headers["ETag"]):
            return Response(status_code=304, headers=headers)
    if operation.status == 201 and isinstance(reply, ModuleInfo):
        headers["Location"] = f"/v1/modules/{reply.name}"
    if operation.status == 201 and isinstance(reply, ModelInfo):
        headers["Location"] = f"/v1/models/{quote(reply.id, safe='')}"
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
        raise InvalidRequest.at(name, 'expected one version in quotation marks, as in "4f1d…", or *')
    return tag[1:-1]


def pinned(body: Any, pin: str) -> Any:
    """The body with the version that If-Match names, if it can carry one."""
    if body is None or "version" not in type(body).model_fields:
        return body
    if body.version not in {None, pin}:
        raise InvalidRequest.at("version", "the body and If-Match name different versions; send one of them")
    return body.model_copy(update={"version": pin})
