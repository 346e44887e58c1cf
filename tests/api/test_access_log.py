"""The log line of a request is what structlog would have written."""

import json
import logging
import re
import time

import httpx
import pytest
import structlog

from attention_service.api.observation.access_log import AccessLog, Answered
from attention_service.runtime.request_timing import RequestTiming
from tests.conftest import live_server

FIELDS = ("POST", "/v1/modules/m/forward", "forward", 200, 0.0012341, "id-1", "team-a", RequestTiming(code=None))
REFUSED = (*FIELDS[:3], 429, *FIELDS[4:7], RequestTiming(code="overloaded"))
NAMED = {"method": "POST", "path": "/v1/modules/m/forward", "operation": "forward", "status": 200, "ms": 1.234,
         "request_id": "id-1", "caller": "team-a"}  # fmt: skip
OPERATIONS = {logging.INFO: "forward", logging.DEBUG: "health_live"}
"""What is logged at each level."""
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def written(capsys, form, *fields, level="info"):
    AccessLog(level, form).write([Answered(time.time(), *fields)])
    return capsys.readouterr().err


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_lines_are_those_of_structlog(capsys, level):
    name = logging.getLevelName(level).lower()
    event = {"event": "request", "level": name, "timestamp": "T", **NAMED, "operation": OPERATIONS[level]}
    console = structlog.dev.ConsoleRenderer(colors=False)(None, name, dict(event))
    fields = (*FIELDS[:2], OPERATIONS[level], *FIELDS[3:])
    line = written(capsys, "console", *fields, level="debug")
    assert TIME.sub("T", line) == console + "\n"
    assert json.loads(TIME.sub("T", written(capsys, "json", *fields, level="debug"))) == event


def test_a_problem_is_logged_with_its_code(capsys):
    assert json.loads(written(capsys, "json", *REFUSED))["code"] == "overloaded"
    assert " caller=team-a code=overloaded method=POST " in written(capsys, "console", *REFUSED)


def test_a_traced_request_is_logged_with_its_trace(capsys):
    fields = (*FIELDS[:7], RequestTiming(trace="0af7"))
    event = {"event": "request", "level": "info", "timestamp": "T", **NAMED, "trace_id": "0af7"}
    assert json.loads(TIME.sub("T", written(capsys, "json", *fields))) == event
    console = structlog.dev.ConsoleRenderer(colors=False)(None, "info", dict(event))
    assert TIME.sub("T", written(capsys, "console", *fields)) == console + "\n"


def test_what_is_below_the_level_is_not_written(capsys):
    assert written(capsys, "json", *FIELDS, level="warning") == ""
    assert written(capsys, "json", *FIELDS[:2], "metrics", *FIELDS[3:]) == ""


@pytest.mark.parametrize("form", ["console", "json"])
def test_nobody_writes_lines_of_their_own(capsys, form):
    line = written(capsys, form, "POST", "/x\n2026 [info] forged", *FIELDS[2:])
    assert line.count("\n") == 1


def test_a_long_path_is_cut(tmp_path, capfd):
    with live_server(tmp_path, log_level="info") as url:
        assert httpx.get(f"{url}/{'a' * 50_000}").status_code == 404
        httpx.get(f"{url}/metrics")  # writes the lines that wait
    lines = [line for line in capfd.readouterr().err.splitlines() if "/aaa" in line]
    assert lines
    assert max(map(len, lines)) < 1000
