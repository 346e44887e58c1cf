"""The headers of every reply that tell a browser what it may not do with it."""

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


def _with_policy(policy: bytes) -> Lines:
    return (
        (b"content-security-policy", policy),
        (b"x-content-type-options", b"nosniff"),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-resource-policy", b"same-origin"),
    )


_OTHERS: Final = _with_policy(_NOTHING)
_PAGES: Final = {"/": _with_policy(_PAGE)} | dict.fromkeys(
    ("/docs", "/docs/oauth2-redirect", "/redoc"), _with_policy(_DOCS)
)


def security_headers(path: str) -> Lines:
    """The headers of the replies at a path."""
    return _PAGES.get(path, _OTHERS)
