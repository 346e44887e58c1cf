"""The settings of a client: where the server is, and how calls are made."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final
from urllib.request import getproxies

import httpx
from pydantic import SecretStr

from attention_client.environment import DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE
from attention_client.retry import CallPolicy

ApiKey = str | SecretStr
OWN_VERSION: Final = version("attention-service")
LIMITS: Final = httpx.Limits(max_connections=100, max_keepalive_connections=100, keepalive_expiry=5.0)
"""httpx's own, but every connection may be kept: calls that run side by side are mostly followed by as many."""
_OF_HTTP: Final = frozenset({"accept", "accept-encoding", "connection"})
"""Headers that a WebSocket's handshake has values of its own for, or none."""


@dataclass(frozen=True)
class StreamSettings:
    """A server's address, headers and policy, for a WebSocket connection."""

    url: str
    headers: Mapping[str, str] = field(repr=False)
    policy: CallPolicy

    @classmethod
    def of(cls, http: httpx.Client | httpx.AsyncClient, address: str, policy: CallPolicy) -> "StreamSettings":
        """Return those of a client."""
        own = {name: value for name, value in http.headers.items() if name not in _OF_HTTP}
        return cls(f"ws{address.removeprefix('http')}", own | dict(policy.headers), policy)


def server_url(given: str | None) -> httpx.URL:
    """Return the server's URL: the given one, that of the environment, or the default."""
    text = given or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as fault:
        raise ValueError(f"base_url: {text!r} is not a URL: {fault}") from None
    if url.scheme not in {"http", "https"} or not url.host or url.query or url.fragment:
        raise ValueError(f"base_url: expected something like {DEFAULT_URL}, got {text!r}")
    return url


def trusted_by(url: httpx.URL) -> ssl.SSLContext | bool:
    """Return the authorities that a client of this server trusts: httpx's, or none if it never uses TLS.

    To read httpx's takes 30 to 60 ms for each client.
    """
    uses_tls = any(address.startswith("https:") for address in (str(url), *getproxies().values()))
    return uses_tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def all_headers(given: Mapping[str, str] | None, api_key: ApiKey | None) -> dict[str, str]:
    """Return the headers of every request: the client's own with the API key, and those given.

    The key is by default the environment's ``ATTENTION_API_KEY``.
    """
    key = (api_key.get_secret_value() if isinstance(api_key, SecretStr) else api_key) or os.environ.get(KEY_VARIABLE)
    own = {"User-Agent": f"attention-client/{OWN_VERSION}"}
    if key:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(
                "api_key: expected only visible ASCII characters, without spaces; is it a key of the server?"
            )
        own["Authorization"] = f"Bearer {key}"
    return own | dict(given or {})


def given_alone(http: httpx.Client | httpx.AsyncClient | None, **others: object) -> None:
    """Raise ValueError if ``others`` are given beside the caller's own httpx client, in which they are to be set."""
    for name, value in others.items():
        if http is not None and value is not None:
            raise ValueError(f"{name}: cannot be combined with http; configure it in that client")


def address_of(http: httpx.Client | httpx.AsyncClient, base_url: str | None) -> str:
    """Return the URL before each path: the one given, else the httpx client's own, without a slash at its end."""
    return str(http.base_url if base_url is None and http.base_url.host else server_url(base_url)).rstrip("/")
