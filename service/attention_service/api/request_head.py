"""The head of a request: its headers, their limits, and the time that its caller waits."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.types import Scope

from attention_contract.errors import HeadTooLarge, InvalidRequest
from attention_service.settings import Settings

Headers = Mapping[bytes, bytes]
"""Headers by their name in lower case. Of a repeated header that is no list, the first counts."""
HEADERS: Final = "attention.headers"
"""The entry of the ASGI scope with all headers by name; of a repeated one, the last."""
_LISTS = frozenset({b"accept", b"content-encoding", b"if-match", b"if-none-match", b"prefer"})
"""Headers that are lists: repeated lines are joined with commas (RFC 9110, section 5.3)."""
_WAIT = re.compile(rb"(?:^|[,;\s])wait\s*=\s*(\d{1,9}(?:\.\d{1,9})?)\s*(?:$|[,;])", re.IGNORECASE)
MAX_HEADER_BYTES = 2**14
"""Bytes of one header, and of a query string."""


def check_head(headers: Sequence[tuple[bytes, bytes]], target_bytes: int, settings: Settings) -> None:
    """Raise HeadTooLarge for more headers, or more bytes with the target of the request, than the settings allow."""
    if len(headers) > settings.max_headers:
        raise HeadTooLarge(
            f"the head has {len(headers)} headers; max_headers allows {settings.max_headers}",
            limit=settings.max_headers,
            actual=len(headers),
        )
    size = target_bytes + sum([len(name) + len(value) + 4 for name, value in headers])
    if size > settings.max_head_bytes:
        raise too_large(size, settings)


def too_large(size: int, settings: Settings) -> HeadTooLarge:
    """The error of a head that has at least ``size`` bytes."""
    return HeadTooLarge(
        f"the head has at least {size} bytes; max_head_bytes allows {settings.max_head_bytes}",
        limit_bytes=settings.max_head_bytes,
        needed_bytes=size,
    )


def headers_of(scope: Scope) -> Headers:
    """The headers of a request. Raises InvalidRequest for one that is too long."""
    lines = scope["headers"]
    headers: dict[bytes, bytes] = scope.get(HEADERS) or dict(lines)
    if len(headers) < len(lines):
        headers = dict(reversed(lines))
        for name in _LISTS & headers.keys():
            headers[name] = b", ".join(value for other, value in lines if other == name)
    if (size := max(map(len, headers.values()), default=0)) > MAX_HEADER_BYTES:
        longest = str(max(headers, key=lambda name: len(headers[name]))[:80], "latin-1")
        raise InvalidRequest.at(
            longest, f"the header has {size} bytes; expected at most {MAX_HEADER_BYTES}", limit=MAX_HEADER_BYTES
        )
    return headers


def header(headers: Headers, name: bytes) -> str | None:
    """The value of one header."""
    value = headers.get(name)
    return None if value is None else str(value, "latin-1")


def wait_seconds(headers: Headers, default: float | None = None) -> float | None:
    """Seconds that the caller is prepared to wait, by the preference of RFC 7240, section 4.3, with decimals.

    The default without such a preference, or with one that cannot be read.
    """
    preferences = headers.get(b"prefer")
    match = None if preferences is None else _WAIT.search(preferences)
    return default if match is None else float(match[1])
