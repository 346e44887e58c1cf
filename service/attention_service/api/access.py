"""The log line of each request, as structlog would write it, for a small part of the time that it takes.

Lines are put together without its processors and written some at a time: a line that is written at once costs a request
more than all else that is observed of it.
"""

import asyncio
import logging
import sys
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal

import orjson

WRITTEN_AFTER = 0.1
"""Seconds that a line may wait to be written together with others."""


class AccessLog:
    """Writes a line for each request to standard error. Used from the event loop only."""

    def __init__(self, level: str, form: Literal["console", "json"]) -> None:
        self._least = logging.getLevelName(level.upper())
        self._line = _console_line if form == "console" else _json_line
        self._lines: list[str] = []

    def note(
        self, level: int, method: str, path: str, operation: str, status: int, seconds: float, request_id: str
    ) -> None:
        """Log a request that was answered, unless its level is below what is logged."""
        if level < self._least:
            return
        if not self._lines:
            asyncio.get_running_loop().call_later(WRITTEN_AFTER, self.write)
        second, fraction = divmod(time.time(), 1)
        now = f"{_second(int(second))}.{int(fraction * 1e6):06}Z"
        name = "debug" if level == logging.DEBUG else "info"
        self._lines.append(self._line(now, name, method, path, operation, status, round(seconds * 1e3, 3), request_id))

    def write(self) -> None:
        """Write the lines that wait."""
        lines, self._lines = self._lines, []
        if lines:
            sys.stderr.write("".join(lines))
            sys.stderr.flush()


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
