"""deploy/scale: several processes behind a real HAProxy, which finds the process of a session by its header."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import yaml
from tools.docs.snippets import ROOT
from tools.proof.chaos import haproxy, servers_of

from attention_client import Client
from attention_contract.errors import PROBLEM_MEDIA_TYPE, Unavailable, from_problem
from tests.conftest import eventually

FOLDER = ROOT / "deploy" / "scale"
HAPROXY = haproxy()
needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="needs HAProxy: apt-get install haproxy")
CONFIG = {"d_model": 8, "num_heads": 2, "spec": {"masks": [{"name": "causal"}]}}
X = np.random.default_rng(0).standard_normal((1, 20, 8)).astype(np.float32)


class _Loader(yaml.SafeLoader):
    """Compose's own tags stand for their values."""


_Loader.add_constructor("!reset", lambda loader, node: loader.construct_sequence(node))


@contextmanager
def scaled(n: int, models: Path):
    """``serve.sh`` with n processes, until the block ends. Yields HAProxy's address and each process's."""
    port, first = _free_ports(n)
    programs = f"{Path(sys.executable).parent}:{Path(HAPROXY).parent}:{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": programs, "ATTENTION_MODELS_DIR": str(models), "ATTENTION_PORT": str(port), "FIRST_PORT": str(first),
    }  # fmt: skip
    command = [str(FOLDER / "serve.sh"), str(n), "--calibrate", "false", "--log-level", "error"]
    with subprocess.Popen(command, env=environment, start_new_session=True) as started:
        try:
            urls = [f"http://127.0.0.1:{each}" for each in (port, *range(first, first + n))]
            for url in [*urls[1:], urls[0]]:
                eventually(lambda url=url: _is_ready(url), seconds=90)
            time.sleep(1.5)  # HAProxy's next checks find those that became ready last
            yield urls
        finally:
            started.terminate()
            assert started.wait(60) == 0
            with pytest.raises(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)  # nothing is left


def _free_ports(n: int) -> tuple[int, int]:
    """A free port, and the first of n others."""
    for first in range(20_000, 60_000, 100):
        try:
            for port in range(first, first + n + 1):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first + n, first
    raise AssertionError("no port is free")


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@needs_haproxy
def test_the_proxy_reads_its_configuration():
    command = [HAPROXY, "-c", "-f", FOLDER / "haproxy.cfg", "-f", FOLDER / "containers.cfg"]
    read = subprocess.run(command, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    assert "[WARNING]" not in read.stderr


def _accepts(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def proxied(folder: Path, *ports: int):
    """HAProxy before processes at these ports. Yields its address."""
    port, _ = _free_ports(1)
    (folder / "servers.cfg").write_text(servers_of(ports))
    command = [HAPROXY, "-db", "-q", "-f", FOLDER / "haproxy.cfg", "-f", folder / "servers.cfg"]
    environment = os.environ | {"ATTENTION_PORT": str(port)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as started:
        try:
            eventually(lambda: _accepts(port))
            yield f"http://127.0.0.1:{port}"
        finally:
            started.terminate()


class _Busy(BaseHTTPRequestHandler):
    """A process that fails every check of its health, and answers all else."""

    checks = 0

    def do_GET(self):
        is_check = self.path == "/health/ready"
        type(self).checks += is_check
        self.send_response(503 if is_check else 200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


@pytest.mark.slow
@needs_haproxy
def test_the_proxy_answers_problem_documents_where_no_process_does(tmp_path):
    with proxied(tmp_path, _free_ports(0)[0]) as url:
        answer = httpx.get(f"{url}/v1", timeout=30)
        assert (answer.status_code, answer.headers["content-type"]) == (503, PROBLEM_MEDIA_TYPE)
        assert answer.headers["retry-after"] == str(Unavailable.retry_after)
        with Client(url, retries=0) as client, pytest.raises(Unavailable, match="no process of the service"):
            client.modules.list()
    written = (FOLDER / "haproxy.cfg").read_text()
    problems = {
        int(status): json.loads(text) for status, text in re.findall(r"http-error status (\d+) .*'(.*)'", written)
    }
    assert problems.keys() == {400, 408, 502, 503, 504}
    for status, problem in problems.items():
        assert from_problem(status, problem).to_problem() | {"status": status} == problem


@pytest.mark.slow
@needs_haproxy
def test_the_last_process_is_used_though_its_checks_fail(tmp_path):
    port, _ = _free_ports(1)
    with ThreadingHTTPServer(("127.0.0.1", port), _Busy) as busy:
        threading.Thread(target=busy.serve_forever, daemon=True).start()
        with proxied(tmp_path, port) as url:
            eventually(lambda: _Busy.checks >= 7, seconds=60)  # more than mark it as down
            assert httpx.get(f"{url}/v1", timeout=30).status_code == 200
            assert httpx.get(f"{url}/health/ready", timeout=30).status_code == 503, "its own words"
        busy.shutdown()


def test_compose_starts_containers_of_the_same_service_behind_the_proxy():
    over = yaml.load((FOLDER / "compose.yml").read_text(), _Loader)["services"]  # noqa: S506 - a safe one
    base = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert over.keys() == {"attention", "proxy"}
    assert over["attention"]["environment"].keys() <= base["attention"]["environment"].keys()
    assert over["attention"]["ports"] == []
    files = {Path(part).name for part in over["proxy"]["command"] if part.endswith(".cfg")}
    assert files == {path.name for path in FOLDER.glob("*.cfg")}


@needs_haproxy
@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_a_thousand_steps_each_on_a_connection_of_its_own_equal_one_pass(n, tmp_path):
    with scaled(n, tmp_path) as (proxy, *_), Client(proxy, http=_unconnected()) as client:
        client.modules.create("m", CONFIG, seed=1)
        whole = client.forward("m", X).output
        processes = Counter()
        for _ in range(50):
            with client.sessions.open("m") as session:
                outputs = [session.step(X[:, i : i + 1]).output for i in range(20)]
                assert session.replays == 0
                processes[session.id.partition("-")[0]] += 1
            np.testing.assert_allclose(np.concatenate(outputs, 1), whole, atol=1e-5)
        assert len(processes) == n, "every process has sessions"


@needs_haproxy
@pytest.mark.slow
def test_a_process_that_is_killed_loses_nothing_but_its_sessions_which_go_on(tmp_path):
    with scaled(2, tmp_path) as (proxy, *processes), Client(proxy, retries=20) as client:
        client.modules.create("m", CONFIG, seed=1)
        whole = client.forward("m", X).output
        sessions = [client.sessions.open("m") for _ in range(8)]
        outputs = [[session.step(X[:, :10]).output] for session in sessions]
        victim = processes[0]
        held = {each["session"] for each in httpx.get(f"{victim}/v1/sessions").json()["sessions"]}
        os.kill(_pid_of(victim), signal.SIGKILL)
        for i in range(10, 20):
            written = client.modules.create(f"written{i}", CONFIG, seed=i)
            assert client.modules.get(f"written{i}").version == written.version
            for session, own in zip(sessions, outputs, strict=True):
                own.append(session.step(X[:, i : i + 1]).output)
        for own in outputs:
            np.testing.assert_allclose(np.concatenate(own, 1), whole, atol=1e-5)
        assert sum(session.replays > 0 for session in sessions) == len(held) > 0


def _unconnected() -> httpx.Client:
    """A client that opens a connection for each request."""
    return httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))


def _pid_of(url: str) -> int:
    """The process that listens at an address."""
    port = httpx.URL(url).port
    (found,) = (
        each.pid for each in psutil.net_connections("tcp4") if each.laddr.port == port and each.status == "LISTEN"
    )
    return int(found)
