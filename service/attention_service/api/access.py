"""The log line of each request, as structlog would write it, for a small part of the time that it takes.

Lines are put together without its processors and written some at a time: a line that is written at once costs a request
more than all else that is observed of it.
"""

import logging
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal, NamedTuple

import orjson

_BY_THE_CLOCK = {"health_live", "health_ready", "metrics"}


class Answered(NamedTuple):
    """A request that was answered."""

    at: float
    """When, of ``time.time``."""
    method: str
    path: str
    operation: str
    status: int
    seconds: float
    request_id: str


class AccessLog:
    """Writes a line for each request to standard error."""

    def __init__(self, level: str, form: Literal["console", "json"]) -> None:
        self._least = logging.getLevelName(level.upper())
        self._line = _console_line if form == "console" else _json_line

    def write(self, answered: Iterable[Answered]) -> None:
        """Write a line for each of these, unless its level is below what is logged."""
        lines = "".join(self._lines(answered))
        if lines:
            sys.stderr.write(lines)
            sys.stderr.flush()

    def _lines(self, answered: Iterable[Answered]) -> Iterator[str]:
        for at, method, path, operation, status, seconds, request_id in answered:
            # What asks by the clock would drown what people ask.
            level = logging.DEBUG if operation in _BY_THE_CLOCK else logging.INFO
            if level >= self._least:
                second, fraction = divmod(at, 1)
                now = f"{_second(int(second))}.{int(fraction * 1e6):06}Z"
                name = "debug" if level == logging.DEBUG else "info"
                yield self._line(now, name, method, path, operation, status, round(seconds * 1e3, 3), request_id)


@lru_cache(maxsize=1)
def _second(since_1970: int) -> str:
    return datetime.fromtimestamp(since_1970, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _console_line(
    now: str, level: str, method: str, path: str, operation: str, status: int, ms: float, request_id: str
) -> str:
    shown = path if path.isprintable() and " " not in path else repr(path)  # nobody writes lines of their own here
    return (
        f"{now} [{level:<9}] {'request':<30} method={method} ms={ms} operation={operation} path={shown} "
        f"request_id={request_id} status={status}\n"
    )


def _json_line(
    now: str, level: str, method: str, path: str, operation: str, status: int, ms: float, request_id: str
) -> str:
    fields = {
        "method": method,
        "path": path,
        "operation": operation,
        "status": status,
        "ms": ms,
        "request_id": request_id,
        "event": "request",
        "level": level,
        "timestamp": now,
    }
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE).decode()
