"""The headers of every reply that tell a browser what it may not do with it."""

from collections.abc import Mapping
from typing import Final

Lines = tuple[tuple[bytes, bytes], ...]

_NOTHING: Final = b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_PAGE: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""The built-in page: its own files alone."""
_DOCS: Final = (
    b"default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    b"font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; frame-ancestors 'none'; base-uri 'none'; "
    b"form-action 'none'"
)
"""Swagger UI and ReDoc begin with a script in the page, and make styles."""


_FOR_ALL: Final[Lines] = ((b"x-content-type-options", b"nosniff"), (b"x-frame-options", b"DENY"))
_FOR_DOCUMENTS: Final[Lines] = (
    *_FOR_ALL,
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
SECURITY_HEADERS: Final[Lines] = ((b"content-security-policy", _NOTHING), *_FOR_ALL)
"""Replies that are no documents: they refer to nothing, and the access layer answers no page of another site."""
PAGES: Final[Mapping[str, Lines]] = {"/": ((b"content-security-policy", _PAGE), *_FOR_DOCUMENTS)} | dict.fromkeys(
    ("/docs", "/docs/oauth2-redirect", "/redoc"), ((b"content-security-policy", _DOCS), *_FOR_DOCUMENTS)
)
"""Headers of the paths that answer documents."""
