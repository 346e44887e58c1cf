"""Read responses: the reply that one holds, or the error."""

import time
from email.utils import parsedate_to_datetime
from typing import Any, cast

import httpx

from attention_client.calls import Call, ReplyT
from attention_client.connection_settings import OWN_VERSION
from attention_client.errors import UnexpectedReply
from attention_contract.base import WireModel
from attention_contract.errors import (
    PROBLEM_MEDIA_TYPE,
    AttentionError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Unreadable,
    error_classes,
    from_problem,
)
from attention_contract.operations import Operation
from attention_contract.request_names import names_of
from attention_contract.schemas.analyses.vectors import GgufFile
from attention_contract.schemas.answers import Picture
from attention_contract.wire import EVENTS, GGUF, JSON, MEDIA_TYPES, PICTURES, VERSION_HEADER, from_body, from_json


def read(call: Call[ReplyT], response: httpx.Response, body: bytearray | memoryview) -> ReplyT:
    """Return the reply that a response holds, with its request's id and labels. Raise the error if it holds one.

    The reply's tensors are writable views of the body.
    """
    reply = _read(call.operation, response, body)
    if reply is not None:
        object.__setattr__(reply, "_request_id", response.headers.get("x-request-id"))
        _name(reply, call)
    return reply


def piece_of(call: Call[ReplyT], response: httpx.Response, line: str) -> ReplyT | None:
    """Return the object of a line of server-sent events; None for another line. Raises the error that it holds."""
    if not line.startswith("data: {"):
        return None
    body = bytearray(line.removeprefix("data: ").encode())
    if line.startswith(('data: {"error":', 'data: {"type":"error"')):
        raise _problem(response, body) or _unexpected(response, EVENTS, body)
    piece = cast("ReplyT", _read_body(call.operation, response, body, JSON))
    _name(piece, call)
    return piece


def _name(reply: object, call: Call[Any]) -> None:
    """Let a reply know the labels of its request."""
    object.__setattr__(reply, "_names", names_of(call.request, call.path.get("name") or call.path.get("model", "")))


def _read(operation: Operation[ReplyT], response: httpx.Response, body: bytearray | memoryview) -> ReplyT:
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not response.is_success:
        raise _error(response, media_type, body)
    if operation.reply is None:
        return cast("ReplyT", None)
    if operation.reply is Picture and media_type in PICTURES:
        return cast("ReplyT", Picture(media_type=media_type, data=bytes(body)))
    if operation.reply is GgufFile and media_type == GGUF:
        return cast("ReplyT", GgufFile(data=bytes(body)))
    if media_type not in MEDIA_TYPES:
        raise _unexpected(response, media_type, body)
    return cast("ReplyT", _read_body(operation, response, body, media_type))


def _read_body(
    operation: Operation[Any], response: httpx.Response, body: bytearray | memoryview, media_type: str
) -> WireModel:
    model = cast("type[WireModel]", operation.reply)
    try:
        return from_body(model, memoryview(body), media_type, "reply")
    except (Unreadable, InvalidRequest) as fault:
        raise UnexpectedReply(
            f"the reply does not read as {model.__name__}: {fault.detail}{_versions(response)}",
            answered=response.status_code,
        ) from fault


def _versions(response: httpx.Response) -> str:
    """Return a sentence if client and server differ in their minor version, between which the wire may change."""
    server = response.headers.get(VERSION_HEADER)
    if server is None or server.split(".")[:2] == OWN_VERSION.split(".")[:2]:
        return ""
    return (
        f"; the server has version {server} and this client {OWN_VERSION}: "
        f"pip install 'attention-service=={server}' fits them"
    )


def _error(response: httpx.Response, media_type: str, body: bytearray | memoryview) -> AttentionError:
    error = _problem(response, body) if media_type in {PROBLEM_MEDIA_TYPE, JSON} else None
    if error is None:
        error = _unexpected(response, media_type, body)
    if isinstance(error, NotFound | InvalidRequest | MethodNotAllowed):
        error.detail += _versions(response)
    if error.request_id is None:
        error.request_id = response.headers.get("x-request-id")
    seconds = _retry_after(response)
    if seconds is not None:
        error.facts["retry_after"] = seconds
    return error


def _problem(response: httpx.Response, body: bytearray | memoryview) -> AttentionError | None:
    """Return the error of a problem document, or of OpenAI's object of an error."""
    try:
        document = from_json(memoryview(body))
    except Unreadable:
        return None
    if isinstance(error := document.get("error"), dict):
        document = error | {"detail": error.get("message")}
    elif response.headers.get("content-type", "").startswith(JSON):
        return None
    return from_problem(response.status_code, document)


def _unexpected(response: httpx.Response, media_type: str, body: bytearray | memoryview) -> AttentionError:
    """Return the error of an answer that another program gave: of the class of its status, if there is one."""
    status = response.status_code
    url = response.request.url
    begins = bytes(body[:80]).decode("utf-8", "replace").strip()
    detail = f"{url} answered {status} with {media_type or 'no media type'}, not as the attention service does"
    if response.is_redirect:
        detail += f": it points to {response.headers.get('location')}; use that as the base URL"
    elif begins:
        detail += f": {begins!r}"
    known = (error for error in error_classes().values() if error.status == status and status not in {0, 500})
    return next(known, UnexpectedReply)(detail, answered=status)


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of the header Retry-After, a number or a date."""
    value = response.headers.get("retry-after", "").strip()
    try:
        number = value.replace(".", "", 1).isdecimal()
        return max(0.0, float(value) if number else parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
