"""The log line of a request is what structlog would have written."""

import asyncio
import json
import logging
import re

import pytest
import structlog

from attention_service.api.access import AccessLog

FIELDS = ("POST", "/v1/modules/m/forward", "forward", 200, 0.0012341, "id-1")
NAMED = {"method": "POST", "path": "/v1/modules/m/forward", "operation": "forward", "status": 200, "ms": 1.234,
         "request_id": "id-1"}  # fmt: skip
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def written(capsys, form, *fields, level="info", of=logging.INFO):
    log = AccessLog(level, form)

    async def answered():
        log.note(of, *fields)

    asyncio.run(answered())
    assert not capsys.readouterr().err  # it waits for others
    log.write()
    return capsys.readouterr().err


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_lines_are_those_of_structlog(capsys, level):
    name = logging.getLevelName(level).lower()
    event = {"event": "request", "level": name, "timestamp": "T", **NAMED}
    console = structlog.dev.ConsoleRenderer(colors=False)(None, name, dict(event))
    line = written(capsys, "console", *FIELDS, level="debug", of=level)
    assert TIME.sub("T", line) == console + "\n"
    assert json.loads(TIME.sub("T", written(capsys, "json", *FIELDS, level="debug", of=level))) == event


def test_what_is_below_the_level_is_not_written(capsys):
    assert written(capsys, "json", *FIELDS, level="warning") == ""
    assert written(capsys, "json", *FIELDS, of=logging.DEBUG) == ""


@pytest.mark.parametrize("form", ["console", "json"])
def test_nobody_writes_lines_of_their_own(capsys, form):
    line = written(capsys, form, "POST", "/x\n2026 [info] forged", *FIELDS[2:])
    assert line.count("\n") == 1
