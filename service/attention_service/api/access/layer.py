"""The layer in front of everything: who asks, from where, and with which scopes.

Each request passes, in this order: Host, the site of the page that sent it, the key. Routes then ask for their scopes
(``scopes.limits``). Health checks pass without any of it.
"""

import base64
import binascii
from collections.abc import Awaitable
from functools import lru_cache
from html import escape
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_contract.errors import AttentionError, CallerLimit, Unauthorized
from attention_contract.operations import ANY_KEY, Scopes
from attention_contract.wire import VERSION_HEADER
from attention_service.api import problems
from attention_service.api.access.api_keys import HeldKey, KeyRing, limits_of, read_keys
from attention_service.api.access.quotas import Quotas
from attention_service.api.access.scopes import HELD, OPEN_PATHS, OPEN_V2_PATHS
from attention_service.api.access.sites import Hosts, check_single, check_site, is_loopback
from attention_service.api.request_head import HEADERS, Headers
from attention_service.runtime.callers import UNLIMITED, Caller, caller
from attention_service.settings import Settings, listed

PROTOCOL: Final = "attention.v1"
"""The subprotocol of a stream. A browser, which cannot set headers, offers it beside one that carries the key."""
_KEY_PROTOCOL: Final = b"attention.key."
_POLICY: Final = 1008
"""The code of a WebSocket that is closed because of who uses it (RFC 6455, section 7.4.1)."""
_SINGLE: Final = frozenset({b"host", b"origin", b"authorization", b"content-type", b"sec-fetch-site"})
_OF_PAGES: Final = frozenset({b"origin", b"sec-fetch-site"})
"""Headers of a request that a web page may have sent; a program that is no browser sends none of them."""
_ASK_USER: Final = 'Basic realm="attention: any name, the API key as the password", charset="UTF-8"'
"""The challenge to a browser that opens a page: it asks its user for the key."""
_NO_KEY: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>This server needs an API key</title></head>
<body><h1>This server needs an API key</h1>
<p>Reload the page to enter one: any name as the user, and the key as the password.</p>
<p>{}</p></body></html>
"""
"""The page that the browser shows if its user cancels."""
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE")
_EXPOSED: Final = ("ETag", "Location", "Retry-After", "X-Request-ID", VERSION_HEADER)


def needs_keys(settings: Settings) -> bool:
    """True if every request needs a key: the setting, or else whether anybody but this machine can ask."""
    if settings.require_keys is not None:
        return settings.require_keys
    return not is_loopback(settings.host) or bool(settings.trusted_proxies)


class Access:
    """Middleware that lets a request in, or answers it with 401, 403 or 421."""

    def __init__(
        self, app: ASGIApp, settings: Settings, keys: KeyRing, quotas: Quotas, *, agents_path: str, exposed: str
    ) -> None:
        """``agents_path``: the path whose messages make requests; ``exposed``: a further header for pages."""
        self.app = app
        self._needed = needs_keys(settings)
        self._hosts = Hosts(settings.host, listed(settings.allowed_hosts), keys=self._needed)
        self._origins = frozenset(listed(settings.allowed_origins))
        self._framed = bool(settings.frame_origins)
        self._open = OPEN_PATHS | OPEN_V2_PATHS if settings.oip else OPEN_PATHS
        self._keys = keys
        self._quotas = quotas
        self._agents_path = agents_path
        limits = limits_of(settings)
        self._at = lru_cache(maxsize=4096)(lambda address: Caller(address, limits=limits))
        """The caller at an address, where no key is needed."""
        self._for_pages = CORSMiddleware(
            self._admit, self._origins, _METHODS, ["*"], expose_headers=[*_EXPOSED, exposed], max_age=600
        )

    # Most requests pass. A coroutine for each step of the way would take longer than the checks.

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request, or let it in."""
        if scope["type"] == "lifespan" or scope["path"] in self._open:
            return self.app(scope, receive, send)
        lines, headers = scope["headers"], scope[HEADERS]
        try:
            if len(headers) < len(lines):
                check_single(lines, _SINGLE)
            self._hosts.check(headers)
            page = None
            if not _OF_PAGES.isdisjoint(headers):
                framed = self._framed and scope["path"] == "/"
                page = check_site(
                    scope.get("method", "GET"), scope.get("scheme", "http"), headers, self._origins, framed=framed
                )
        except AttentionError as error:
            return problems.render(error)(scope, receive, send)
        return (self._admit if page is None else self._for_pages)(scope, receive, send)

    def _admit(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Find out who asks, and let the request in."""
        headers: Headers = scope[HEADERS]
        try:
            asks, scope[HELD], held = self._who(scope, headers)
        except Unauthorized as error:
            response = problems.render(error)
            if b"text/html" in headers.get(b"accept", b""):
                response = HTMLResponse(_NO_KEY.format(escape(error.detail)), error.status)
                response.headers["WWW-Authenticate"] = _ASK_USER
            else:
                response.headers["WWW-Authenticate"] = 'Bearer realm="attention"'
            return response(scope, receive, send)
        caller.set(asks)
        if scope["type"] == "websocket":  # each of its messages counts as a request
            return self.app(scope, receive if held is None else self._while_held(held, receive, send), send)
        if asks.limits is UNLIMITED:
            return self.app(scope, receive, send)
        return self._limited(asks, scope, receive, send)

    async def _limited(self, asks: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in if its caller has not used too much."""
        try:
            with self._quotas.used(asks):
                if scope["path"] != self._agents_path:
                    await self.app(scope, receive, send)
                    return
        except CallerLimit as error:
            await problems.render(error)(scope, receive, send)
            return
        # The questions of an agent's message are requests of their own, which count while they run in its place.
        await self.app(scope, receive, send)

    def _while_held(self, held: HeldKey, receive: Receive, send: Send) -> Receive:
        """Receive the messages of a WebSocket, and close it at the first one after its key was revoked."""

        async def checked() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive" and not self._keys.holds(held):
                await send({"type": "websocket.close", "code": _POLICY, "reason": "the API key was revoked"})
                return {"type": "websocket.disconnect", "code": _POLICY}
            return message

        return checked

    def _who(self, scope: Scope, headers: Headers) -> tuple[Caller, Scopes, HeldKey | None]:
        """The caller of a request, its scopes, and its key. Raises Unauthorized without a known one if it is needed."""
        key = _key_of(headers)
        if key is not None and (held := self._keys.find(key)) is not None:
            return held.caller, held.scopes, held
        if not self._needed:  # other credentials may be for a proxy
            return self._at(_address(scope)), ANY_KEY, None
        if key is None:
            raise Unauthorized(
                "this server needs an API key; send it as `Authorization: Bearer KEY` (in the client: api_key or "
                "ATTENTION_API_KEY). Its operator makes one with: attention keys create NAME"
            )
        raise Unauthorized("the API key is unknown or revoked; ask the operator of this server for a new one")


def name_of(scope: Scope, keys: KeyRing) -> str:
    """The caller as whom a request counts before it is let in: its key's name if the key is known, or its address."""
    key = _key_of(dict(scope["headers"]))
    held = None if key is None else keys.find(key)
    return _address(scope) if held is None else held.caller.name


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "local"


def _key_of(headers: Headers) -> bytes | None:
    """The key of a request: of a bearer, the password of a browser, or a subprotocol; None without one."""
    given = headers.get(b"authorization")
    if given is not None:
        kind, _, credentials = given.strip().partition(b" ")
        if kind.lower() == b"bearer":
            return credentials.strip()
        return _password(credentials) if kind.lower() == b"basic" else None
    if (protocols := headers.get(b"sec-websocket-protocol")) is not None:
        for offered in protocols.split(b","):
            if offered.strip().startswith(_KEY_PROTOCOL):
                return offered.strip().removeprefix(_KEY_PROTOCOL)
    return None


def _password(credentials: bytes) -> bytes | None:
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return None


def unsafe_start(settings: Settings) -> str | None:
    """The reason why a server with these settings must not start; None if it may."""
    if not needs_keys(settings) or settings.key_hash or read_keys(settings.models_dir):
        return None
    return (
        f"--host (ATTENTION_HOST): callers of {settings.host} need an API key, and there is none in "
        f"{settings.models_dir}. Make one with `attention keys create NAME --scope infer --scope inspect --scope "
        "manage`, or let the first start make one with --first-key true, or let everybody in with --require-keys "
        "false\n"
    )
