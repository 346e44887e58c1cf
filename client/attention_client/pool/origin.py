"""Where a connection leads, and how it is made secure."""

import ssl
from functools import cached_property
from typing import NamedTuple

import httpx


class Origin(NamedTuple):
    """What two requests have to share to be sent over one connection."""

    secure: bool
    host: str
    port: int
    server_name: str
    """The name that the server's certificate has to be for."""

    @classmethod
    def of(cls, request: httpx.Request) -> "Origin":
        """Raises UnsupportedProtocol for a URL that is neither http nor https."""
        url = request.url
        if url.scheme not in {"http", "https"} or not url.host:
            raise httpx.UnsupportedProtocol(f"expected an http or https URL, got {str(url)!r}", request=request)
        host = url.raw_host.decode("ascii")
        secure = url.scheme == "https"
        return cls(secure, host, url.port or (443 if secure else 80), request.extensions.get("sni_hostname", host))


class TLS:
    """httpx's settings for secure connections; certificates are loaded when the first one is made."""

    def __init__(self, verify: ssl.SSLContext | str | bool, trust_env: bool) -> None:
        self._verify = verify
        self._trust_env = trust_env

    @cached_property
    def context(self) -> ssl.SSLContext:
        """The context, for HTTP/1.1 alone."""
        context = httpx.create_ssl_context(verify=self._verify, trust_env=self._trust_env)
        context.set_alpn_protocols(["http/1.1"])
        return context
