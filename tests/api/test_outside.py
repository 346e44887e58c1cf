"""A server seen from outside: phases, problems by caller, connections, bytes of replies, and promtool's opinion."""

import json
import logging
import re
import shutil
import socket
import subprocess

import httpx
import numpy as np
import pytest

from attention_client import Client
from attention_service.api.observation.access_log import Answered
from attention_service.api.observation.log_setup import configure_logging
from attention_service.api.observation.metrics import MAX_CALLERS, Metrics
from attention_service.runtime.request_timing import PHASES, RequestTiming
from tests.conftest import live_server

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: apt-get install prometheus")
QUERY = np.ones((2, 3, 8), "float32")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    settings = {"log_level": "info", "log_format": "json"}
    with live_server(tmp_path_factory.mktemp("seen"), **settings) as url, httpx.Client(base_url=url) as http:
        yield http


def metric(source, name, **labels):
    """The value of a metric, 0 where it has none: the sum over the labels that are not given."""
    found, text = 0.0, source if isinstance(source, str) else source.get("/metrics").text
    for line in text.splitlines():
        match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
        if (
            match
            and match[1] == name
            and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', match[2] or "")).items()
        ):
            found += float(match[3])
    return found


@pytest.mark.parametrize("media_type", ["json", "safetensors"])
def test_every_phase_of_a_request_is_timed(seen, media_type):
    def growth(name, **labels):
        return metric(after, name, operation="raw_forward", **labels) - metric(
            before, name, operation="raw_forward", **labels
        )

    before = seen.get("/metrics").text
    with Client(str(seen.base_url), media_type=media_type) as client:
        replies = [client.attention.forward(QUERY, QUERY, QUERY, num_heads=2) for _ in range(3)]
    after = seen.get("/metrics").text
    spent = {each: growth("attention_phase_seconds_sum", phase=each) for each in PHASES}
    assert {each: growth("attention_phase_seconds_count", phase=each) for each in PHASES} == dict.fromkeys(PHASES, 3)
    assert all(seconds >= 0 for seconds in spent.values())
    assert spent["compute"] == pytest.approx(sum(reply.ran.compute_ms for reply in replies) / 1e3, rel=1e-6)
    # Phases follow one another, so that together they take at most the time of the requests.
    assert sum(spent.values()) <= growth("attention_request_seconds_sum")


def test_each_step_of_one_request_has_its_own_phases(seen):
    with Client(str(seen.base_url)) as client:
        client.modules.create("phased", {"d_model": 8, "num_heads": 2}, seed=0)
        opened = [client.sessions.open("phased").id for _ in range(3)]
        client.sessions.step_many([{"session": each, "query": QUERY[0]} for each in opened])
    for phase, count in {"decode": 1, "queue": 3, "compute": 3, "encode": 1}.items():
        assert metric(seen, "attention_phase_seconds_count", operation="step_sessions", phase=phase) == count


def test_problems_are_counted_by_code_and_caller(seen):
    assert seen.get("/v1/modules/nobody").status_code == 404
    assert (
        seen.post("/v1/attention/forward", content="{", headers={"Content-Type": "application/json"}).status_code == 400
    )
    assert metric(seen, "attention_problems_total", code="module_not_found") == 1
    assert metric(seen, "attention_problems_total", code="unreadable") == 1


def test_callers_have_a_limited_number_of_labels():
    metrics = Metrics()
    for number in range(3 * MAX_CALLERS):
        metrics.count(
            [Answered(0.0, "GET", "/", "page", 429, 0.1, "id", f"caller-{number}", RequestTiming(code="overloaded"))]
        )
    samples = [each for family in metrics.problems.collect() for each in family.samples if each.name.endswith("total")]
    counts = {each.labels["caller"]: each.value for each in samples}
    assert len(counts) == MAX_CALLERS + 1
    assert counts["other"] == 2 * MAX_CALLERS


def test_connections_and_unsent_bytes_of_replies(seen):
    before = metric(seen, "attention_connections")
    address = seen.base_url
    with Client(str(seen.base_url)) as client:
        client.modules.create("unread", {"d_model": 1024, "num_heads": 1}, seed=0)
    slow = socket.create_connection((address.host, address.port))
    try:
        assert metric(seen, "attention_connections") == before + 1
        assert metric(seen, "attention_reply_bytes") == 0
        slow.sendall(b"GET /v1/modules/unread/parameters/q_proj.weight HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4)
        deadline = 100
        while not (unsent := metric(seen, "attention_reply_bytes")) and (deadline := deadline - 1):
            pass
        assert unsent > 2**20  # of JSON that nobody reads
    finally:
        slow.close()


@needs_promtool
def test_promtool_accepts_names_and_help(seen):
    checked = subprocess.run([PROMTOOL, "check", "metrics"], input=seen.get("/metrics").content,
                             capture_output=True, check=False)  # fmt: skip
    assert (checked.returncode, checked.stderr, checked.stdout) == (0, b"", b"")


@pytest.mark.usefixtures("own_logging")
def test_every_line_of_a_request_has_its_id_and_caller_and_no_secret(seen, capfd, monkeypatch):
    def fails(_):
        logging.getLogger("some.library").warning("on the way")
        raise RuntimeError

    monkeypatch.setattr("attention_service.runtime.services.module_service.ModuleService.list", fails)
    monkeypatch.setattr(logging.getLogger("httpx"), "disabled", True)  # the caller's own lines
    configure_logging("info", "json")
    secret = "s3cret-of-nobody"
    headers = {"Authorization": f"Bearer {secret}", "X-Request-ID": "log-1"}
    assert seen.get(f"/v1/modules?token={secret}", headers=headers).status_code == 500
    metric(seen, "attention_modules")  # a scrape writes what waits
    captured = capfd.readouterr().err
    assert secret not in captured
    lines = {line["event"]: line for line in map(json.loads, captured.splitlines())}
    assert {"on the way", "internal_error", "request"} <= lines.keys()
    for event in ("on the way", "internal_error", "request"):
        assert lines[event]["request_id"] == "log-1"
        assert lines[event]["caller"] == lines["request"]["caller"] in {"anyone", "127.0.0.1"}
    assert lines["request"]["code"] == "internal_error"
