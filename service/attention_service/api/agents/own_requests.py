"""Requests to this application from inside its process, in the name of the caller whose message is answered.

Each takes the whole line of a request that comes from outside, from the id and the key to the reply. So the scopes,
quotas and limits of the caller hold, and every question has its line in the log and its place in the metrics.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote

import httpx
from starlette.types import ASGIApp, Scope

from attention_contract.base import WireModel
from attention_contract.errors import from_problem
from attention_contract.operations import Operation
from attention_contract.validation import validate
from attention_contract.wire import JSON, SAFETENSORS, from_body, from_json, to_json
from attention_service.api import problems

ReplyT = TypeVar("ReplyT", bound=WireModel)
PATH: Final = "/mcp"
"""The path of the door whose messages are answered so."""
_HERE: Final = "http://127.0.0.1"
_PASSED_ON: Final = ("authorization", "prefer", "traceparent", "tracestate")
"""Headers of the message that its requests carry too."""


class OwnRequests:
    """Asks operations of the contract as the caller of one message."""

    def __init__(self, app: ASGIApp, message: Scope) -> None:
        """``app``: the whole application; ``message``: the ASGI scope of the message."""
        self._transport = httpx.ASGITransport(app, client=tuple(message.get("client") or ("local", 0)))
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        self._headers = {name: given[name] for name in _PASSED_ON if name in given}
        if (identity := problems.request_id.get()) is not None:
            self._headers["x-request-id"] = identity

    async def ask(
        self, operation: Operation[ReplyT], fields: Mapping[str, Any] | None = None, /, **path: str
    ) -> ReplyT:
        """Ask an operation and return its reply. Raises its error, and InvalidRequest for fields that are not valid."""
        body = await self.fetch(operation, fields, JSON, **path)
        return cast("ReplyT", from_body(cast("type[WireModel]", operation.reply), body, JSON, "reply"))

    async def fetch(
        self,
        operation: Operation[Any],
        fields: Mapping[str, Any] | None,
        media_type: str = SAFETENSORS,
        options: Mapping[str, Any] | None = None,
        /,
        **path: str,
    ) -> bytes:
        """Ask an operation and return its reply as bytes of a media type. ``options``: those of a picture."""
        content = None
        headers = {**self._headers, "accept": media_type}
        if fields is not None and operation.request is not None:
            content = to_json(validate(operation.request, fields))
            headers["content-type"] = JSON
        url = _HERE + operation.path.format(**{name: quote(part, safe="") for name, part in path.items()})
        request = httpx.Request(operation.method, url, params=options or None, headers=headers, content=content)
        response = await self._transport.handle_async_request(request)
        body = await response.aread()
        if not response.is_success:
            raise from_problem(response.status_code, from_json(body))
        return body
