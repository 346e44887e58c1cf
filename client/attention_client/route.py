"""How calls become httpx requests, and which way they take: through an httpx client, or straight to its connections.

An httpx client makes each request anew and passes it through authentication, hooks, redirects, cookies and a log line.
Where none of these is set up, all of that changes nothing: then one request is kept as a template for all that are
alike (the same operation, names and sizes), and what is made of it goes to the pool itself. What is sent is the same.
"""

import logging
import os
from typing import Any, Final, Generic, TypeVar
from urllib.request import getproxies

import httpx

from attention_client.exchange import AwaitedBody, BlockingBody, Exchange
from attention_client.pool import AsyncPool, Pool
from attention_client.pool.http1 import head_of

DEFAULT_URL: Final = "http://127.0.0.1:8000"
TEMPLATES: Final = 256
"""How many requests are kept as templates."""
_LOG: Final = logging.getLogger("httpx")

HttpT = TypeVar("HttpT", bound=httpx.Client | httpx.AsyncClient)
PoolT = TypeVar("PoolT", bound=Pool | AsyncPool)


def base_url_of(given: str | None) -> httpx.URL:
    """The server's URL, as given or by the environment."""
    text = given or os.environ.get("ATTENTION_URL") or DEFAULT_URL
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as fault:
        raise ValueError(f"base_url: {text!r} is no URL: {fault}") from None
    if url.scheme not in {"http", "https"} or not url.host:
        raise ValueError(f"base_url: expected something like {DEFAULT_URL}, got {text!r}")
    return url


def is_proxied(url: httpx.URL) -> bool:
    """Whether the environment names a proxy for such URLs. httpx then knows which hosts are exempt."""
    proxies = getproxies()
    return bool(proxies.get(url.scheme) or proxies.get("all"))


def check_apart(**others: object) -> None:
    """Raise ValueError for what is an httpx client's own to set, where one is given."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name}: not together with http; set it up in that client")


class Route(Generic[HttpT, PoolT]):
    """The way of all requests of one client."""

    def __init__(self, http: HttpT, pool: PoolT | None, prefix: str = "") -> None:
        self.http = http
        self._pool = pool
        self._prefix = prefix
        """Stands before each path where the httpx client has another base URL, or none."""
        self._templates: dict[tuple[str, str, tuple[tuple[str, str], ...]], httpx.Request] = {}

    @classmethod
    def through(cls, http: HttpT, url: str | None) -> "Route[HttpT, PoolT]":
        """The way through an httpx client of the caller's: to the URL, else to the client's own base URL."""
        if url is None and http.base_url.host:
            return cls(http, None)
        return cls(http, None, str(base_url_of(url)).rstrip("/"))

    def straight(self) -> PoolT | None:
        """The pool that a request may be handed to as it is, if it may."""
        return None if self.http.is_closed or _LOG.isEnabledFor(logging.INFO) else self._pool

    def request(self, exchange: Exchange[Any], body: BlockingBody | AwaitedBody | None) -> httpx.Request:
        """The request of an attempt. Raises DeadlineExceeded where no time is left for it."""
        exchange.check()
        if self._pool is None or exchange.params:
            timeouts = exchange.timeouts(self.http.timeout)
            return self._build(exchange, body, {"timeout": timeouts, "deadline": exchange.ends})
        alike = exchange.call.operation.method, exchange.url, tuple(exchange.headers.items())
        template = self._templates.get(alike)
        if template is None:
            template = self._build(exchange, None, {})
            template.extensions["head"] = head_of(template)
            if len(self._templates) >= TEMPLATES:
                self._templates.clear()
            self._templates[alike] = template
        return httpx.Request(
            template.method,
            template.url,
            headers=template.headers,
            stream=template.stream if body is None else body,
            extensions={"deadline": exchange.ends, "head": template.extensions["head"]},
        )

    def _build(
        self, exchange: Exchange[Any], body: BlockingBody | AwaitedBody | None, extensions: dict[str, Any]
    ) -> httpx.Request:
        return self.http.build_request(
            exchange.call.operation.method,
            self._prefix + exchange.url,
            params=exchange.params or None,
            headers=exchange.headers,
            content=body,
            extensions=extensions,
        )

    def learn(self, response: httpx.Response) -> None:
        """Leave the short way once the server has set a cookie: from then on it is httpx that sends it back."""
        if "set-cookie" in response.headers:
            self.http.cookies.extract_cookies(response)
            self._pool = None
