"""The headers of every reply that tell a browser what it may not do with it."""

from collections.abc import Mapping, Sequence
from typing import Final

Lines = tuple[tuple[bytes, bytes], ...]

_NOTHING: Final = b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_PAGE: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src blob:; connect-src 'self'; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""The built-in page: its own files alone, and sounds that its reader chose, which it plays."""
_DOCS: Final = (
    b"default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    b"font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; frame-ancestors 'none'; base-uri 'none'; "
    b"form-action 'none'"
)
"""Swagger UI and ReDoc begin with a script in the page, and make styles."""


_UNFRAMED: Final = (b"x-frame-options", b"DENY")
_FOR_ALL: Final[Lines] = ((b"x-content-type-options", b"nosniff"), _UNFRAMED)
_FOR_DOCUMENTS: Final[Lines] = (
    *_FOR_ALL,
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
SECURITY_HEADERS: Final[Lines] = ((b"content-security-policy", _NOTHING), *_FOR_ALL)
"""Replies that are no documents: they refer to nothing, and the access layer answers no page of another site."""


def page_headers(frame_origins: Sequence[str]) -> Mapping[str, Lines]:
    """Return the headers of the paths that answer documents.

    ``frame_origins``: the pages that may show the built-in page in a frame. X-Frame-Options has no word for them.
    """
    page: Lines = ((b"content-security-policy", _PAGE), *_FOR_DOCUMENTS)
    if frame_origins:
        framed = _PAGE.replace(b"frame-ancestors 'none'", b"frame-ancestors " + " ".join(frame_origins).encode())
        page = ((b"content-security-policy", framed), *(line for line in _FOR_DOCUMENTS if line != _UNFRAMED))
    documents: Lines = ((b"content-security-policy", _DOCS), *_FOR_DOCUMENTS)
    return {"/": page} | dict.fromkeys(("/docs", "/docs/oauth2-redirect", "/redoc"), documents)
