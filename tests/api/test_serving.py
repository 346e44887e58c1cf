"""The server as a process: the command, its settings, readiness, a graceful stop, and a kill."""

import json
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

import httpx
import numpy as np
import pytest
import uvloop

from attention_client.connection_settings import LIMITS
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.wire import SAFETENSORS, to_body
from attention_service import __main__ as command
from attention_service.api.app import create_app
from attention_service.api.http_limits.guarded_http import GuardedHttp
from attention_service.api.serving import DrainingServer
from attention_service.settings import Settings
from tests.api.processes import process
from tests.conftest import eventually

pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.mark.slow
def test_a_module_survives_a_kill(tmp_path):
    body = {"name": "kept", "config": {"d_model": 8, "num_heads": 2}, "seed": 4}
    with process(tmp_path) as (server, url):
        made = httpx.post(f"{url}/v1/modules", json=body)
        assert made.status_code == 201
        server.send_signal(signal.SIGKILL)
        server.wait(10)
    with process(tmp_path) as (server, url):
        assert httpx.get(f"{url}/v1/modules/kept").json() == made.json()
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        lines = [json.loads(line) for line in server.stderr.read().splitlines()]
    events = [line["event"] for line in lines]
    assert "ready" in events
    assert "stopped" in events
    request = next(line for line in lines if line["event"] == "request")
    assert {"method", "path", "status", "ms", "request_id"} <= set(request)


@pytest.mark.slow
def test_a_stop_lets_what_is_in_flight_finish(tmp_path):
    with process(tmp_path, "--threads", "1") as (server, url), httpx.Client(base_url=url, timeout=60) as http:
        n = 1500
        body = {
            "query": {"dtype": "float64", "shape": [4, n, 64], "data": [0.01] * (4 * n * 64)},
            "wrt": ["query", "scores"],
        }
        with http.stream("POST", "/v1/attention/gradients", json=body) as answer:
            server.send_signal(signal.SIGTERM)
            answer.read()
        assert answer.status_code in {200, 503}  # 503: the stop came before the request was read whole
        assert server.wait(30) == 0


@pytest.mark.slow
def test_what_outlasts_the_grace_is_answered_that_the_server_stopped(tmp_path):
    with process(tmp_path, "--drain-seconds", "0") as (server, url), httpx.Client(base_url=url, timeout=60) as http:
        n = 1200
        body = {"query": {"dtype": "float64", "shape": [8, n, 64], "data": [0.01] * (8 * n * 64)}, "check": True}
        answers = []
        asking = threading.Thread(target=lambda: answers.append(http.post("/v1/attention/gradients", json=body)))
        asking.start()
        eventually(lambda: httpx.get(f"{url}/v1").json()["memory"]["in_flight_bytes"])
        server.send_signal(signal.SIGTERM)
        asking.join(30)
        assert answers[0].status_code == 503
        assert answers[0].json()["code"] == "draining"
        assert server.wait(20) == 0


@pytest.mark.slow
def test_the_process_ends_within_its_grace_whatever_computes(tmp_path):
    request = RawGradientsRequest(query=np.full((1, 8, 12_000, 64), 0.01, np.float32), wrt=["query"])
    with process(tmp_path, "--drain-seconds", "1", "--threads", "1") as (server, url):
        content = b"".join(to_body(request, SAFETENSORS, "request"))
        headers = {"content-type": SAFETENSORS}

        def ask():
            with suppress(httpx.HTTPError):  # the answer does not matter
                httpx.post(f"{url}/v1/attention/gradients", content=content, headers=headers, timeout=30)

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: httpx.get(f"{url}/v1").json()["memory"]["in_flight_bytes"])
        server.send_signal(signal.SIGTERM)
        since = time.monotonic()
        assert server.wait(30) == 0
        assert time.monotonic() - since < 10  # 1 s of grace, and what a busy machine adds
        asking.join(10)


def test_a_flag_wins_over_a_variable_over_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("ATTENTION_PORT=1111\nATTENTION_MAX_QUEUE=7\nATTENTION_DEVICE=\n")
    monkeypatch.setenv("ATTENTION_PORT", "2222")
    assert (Settings().port, Settings().max_queue, Settings().device) == (2222, 7, "auto")
    assert Settings(port=3333).port == 3333


def test_idle_connections_are_closed_by_those_who_call(tmp_path):
    settings = Settings(_env_file=None, models_dir=tmp_path)
    kept = DrainingServer(create_app(settings)).config.timeout_keep_alive
    assert kept >= 2 * max(LIMITS.keepalive_expiry, httpx.Limits().keepalive_expiry)


@pytest.mark.parametrize(
    ("flag", "value", "detail"),
    [
        ("--port", "99999", "ATTENTION_PORT"),
        ("--device", "tpu", "--device"),
        ("--models-dir", "a-file", "--models-dir"),
        ("--memory-budget", "lots", "--memory-budget"),
        ("--preload", "tiny,tinny", "'tinny' cannot be loaded"),
        ("--preload", "tinny", "did you mean tiny?"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys, flag, value, detail):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    assert command.serve([flag, value]) == 2
    text = capsys.readouterr().err
    assert flag in text
    assert detail in text


def test_every_setting_is_a_flag_with_a_word_of_help(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        command.serve(["--help"])
    shown = capsys.readouterr().out
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert field.description.split("\n")[0][:20] in shown


def test_a_taken_port_is_one_line(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert command.serve(["--port", port, "--models-dir", str(tmp_path)]) == 1
    text = f"--port (ATTENTION_PORT): cannot listen on 127.0.0.1:{port}: address already in use\n"
    assert capsys.readouterr().err == text


def test_the_command_serves_on_uvloop_and_other_threads_do_not_keep_it_waiting_for_long(tmp_path, monkeypatch):
    intervals = []

    def run(server):
        intervals.append(sys.getswitchinterval())
        server.config.load()
        assert server.config.http_protocol_class is GuardedHttp
        assert server.config.get_loop_factory() is uvloop.new_event_loop

    monkeypatch.setattr(DrainingServer, "run", run)
    before = sys.getswitchinterval()
    try:
        command.serve(["--models-dir", str(tmp_path), "--port", "0", "--log-level", "error"])
    finally:
        sys.setswitchinterval(before)
    assert intervals[0] <= 1e-3
