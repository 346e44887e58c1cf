"""The checks that keep web pages of other sites away: Host, Origin and Sec-Fetch-Site.

A browser sends requests for any page that it shows. Host names the server that the page means, so that a name which was
pointed at this machine afterwards (DNS rebinding) is found out. Origin and Sec-Fetch-Site name the page; no script can
forge them. A program that is no browser sends neither of the two.
"""

import ipaddress
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Final

from attention_contract.errors import Forbidden, Misdirected, Unreadable
from attention_service.api.request_head import Headers, header

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
EVERY_INTERFACE: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104
_OWN_SITE: Final = frozenset({b"same-origin", b"none"})
_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^][:@/?#\s]*))(?::\d*)?")
_PAGES: Final = {"http": "http", "ws": "http", "https": "https", "wss": "https"}
"""The scheme of the pages that belong to a connection."""
_PORTS: Final = {"http": ":80", "https": ":443"}
_SHOWN: Final = 80


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches a server that listens on this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Hosts:
    """The names by which the server may be asked."""

    def __init__(self, bound: str, allowed: Sequence[str], *, keys: bool) -> None:
        """``bound``: the address that it listens on; ``keys``: True if every request needs a key."""
        self._names = LOOPBACK_NAMES | {bound.lower()} | {name.lower() for name in allowed if not name.startswith("*")}
        self._endings = tuple(name[1:].lower() for name in allowed if name.startswith("*."))
        wide = bound in EVERY_INTERFACE
        self._any = "*" in allowed or (wide and keys and not allowed)
        self._any_address = wide
        """Names can be pointed at this machine by anybody, addresses cannot."""

    def check(self, headers: Headers) -> None:
        """Raise Misdirected for a name that is none of the server's."""
        given = headers.get(b"host")
        if self._any or given is None:
            return
        name = _name_of(given)
        if name in self._names or name.endswith(self._endings) or (self._any_address and _is_address(name)):
            return
        raise Misdirected.at(
            "Host",
            f"{name[:_SHOWN]!r} is not a name of this server; add it to ATTENTION_ALLOWED_HOSTS (--allowed-hosts) if "
            "it is one",
            setting="ATTENTION_ALLOWED_HOSTS",
        )


def check_site(
    method: str, scheme: str, headers: Headers, allowed: Collection[str], *, framed: bool = False
) -> str | None:
    """Return the origin of a page of another site that may ask, or None. Raises Forbidden for any other such page.

    scheme: that by which the request came. A WebSocket follows no link, since scripts read it. framed: True if its
    reply may be shown in a frame, by whom the reply's ``frame-ancestors`` says.
    """
    site = headers.get(b"sec-fetch-site")
    if site is None and b"origin" not in headers:
        return None
    origin = header(headers, b"origin")
    if origin is not None and (origin in allowed or "*" in allowed):
        return origin
    if site in _OWN_SITE:
        return None
    if site is None and origin is not None and _is_own(origin, scheme, headers):
        return None
    if site is not None and scheme in _PORTS and _follows_a_link(method, headers, framed=framed):
        return None
    raise Forbidden.at(
        "Origin",
        f"a page of {(origin or 'another site')[:_SHOWN]!r} may not send requests to this server; add its origin to "
        "ATTENTION_ALLOWED_ORIGINS (--allowed-origins) to allow it",
        setting="ATTENTION_ALLOWED_ORIGINS",
    )


def check_single(headers: Sequence[tuple[bytes, bytes]], names: Collection[bytes]) -> None:
    """Raise Unreadable if one of these headers came twice, where two readers may each take another one."""
    names_sent = [name for name, _ in headers if name in names]
    for name in names:
        if names_sent.count(name) > 1:
            shown = name.decode().title()
            raise Unreadable.at(shown, "the header came more than once; send it once")


def _is_own(origin: str, scheme: str, headers: Headers) -> bool:
    """True if a page and the request name the same scheme, host and port."""
    named, _, rest = origin.lower().partition("://")
    port = _PORTS.get(named, "")
    host = (header(headers, b"host") or "").lower()
    return named == _PAGES.get(scheme) and rest.removesuffix(port) == host.removesuffix(port) != ""


def _follows_a_link(method: str, headers: Headers, *, framed: bool) -> bool:
    """True if the browser shows the reply in a window or a frame of its own, where no other page can read it."""
    places = (b"document", b"iframe") if framed else (b"document",)
    navigates = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") in places
    return navigates and method in {"GET", "HEAD"}


@lru_cache(maxsize=256)
def _name_of(given: bytes) -> str:
    """The name in a Host header, without a port and the brackets of an IPv6 address; all of it if it is no such."""
    text = str(given, "latin-1").strip().lower()
    match = _HOST.fullmatch(text)
    return text if match is None else match[1] or match[2].rstrip(".")


@lru_cache(maxsize=256)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
