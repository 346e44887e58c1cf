"""What is wrong with a start is told in one line each, before PyTorch is imported."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from attention_service.__main__ import serve
from attention_service.settings import MAX_THREADS
from tests.api.processes import process

NO_TORCH = "raise SystemExit('torch was imported')"


def start(folder, **variables):
    """The exit status and the lines of a command whose PyTorch cannot be imported."""
    (folder / "torch.py").write_text(NO_TORCH)
    path = os.pathsep.join([str(folder), *sys.path])
    own = {"ATTENTION_MODELS_DIR": str(folder / "models"), "ATTENTION_PORT": "0"}
    environment = os.environ | own | variables | {"PYTHONPATH": path}
    command = [sys.executable, "-c", "from attention_service.__main__ import serve; raise SystemExit(serve([]))"]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr.splitlines()


FAULTS = {
    "threads": ({"ATTENTION_THREADS": "100000"}, "ATTENTION_THREADS", str(MAX_THREADS)),
    "budget": ({"ATTENTION_MEMORY_BUDGET": "0"}, "ATTENTION_MEMORY_BUDGET", "greater than 0"),
    "a misspelt name": ({"ATTENTION_MEMORY_BUGDET": "1GiB"}, "ATTENTION_MEMORY_BUGDET", "ATTENTION_MEMORY_BUDGET?"),
    "origin": ({"ATTENTION_ALLOWED_ORIGINS": "not an origin"}, "ATTENTION_ALLOWED_ORIGINS", "scheme://host"),
    "host": ({"ATTENTION_ALLOWED_HOSTS": "http://box/"}, "ATTENTION_ALLOWED_HOSTS", "without scheme"),
    "proxy": ({"ATTENTION_TRUSTED_PROXIES": "10.0.0.0/99"}, "ATTENTION_TRUSTED_PROXIES", "10.0.0.0/99"),
    "device": ({"ATTENTION_DEVICE": "tpu"}, "ATTENTION_DEVICE", "'tpu'"),
    "no certificate": ({"ATTENTION_SSL_CERTFILE": "missing.pem"}, "ATTENTION_SSL_CERTFILE", "missing.pem"),
    "a wrong certificate": ({"ATTENTION_SSL_CERTFILE": "empty.pem"}, "ATTENTION_SSL_CERTFILE", "empty.pem"),
    "a key alone": ({"ATTENTION_SSL_KEYFILE": "key.pem"}, "ATTENTION_SSL_KEYFILE", "key.pem"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_setting_is_reported_in_one_line(tmp_path, monkeypatch, capsys, fault):
    variables, name, message = FAULTS[fault]
    monkeypatch.chdir(tmp_path)
    Path("empty.pem").touch()
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert serve([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
    assert message in line


def test_a_wrong_setting_is_reported_before_torch_is_imported(tmp_path):
    (tmp_path / "empty.pem").touch()
    status, (line,) = start(tmp_path, **FAULTS["a wrong certificate"][0])
    assert (status, "ATTENTION_SSL_CERTFILE" in line) == (2, True)


def test_a_misspelt_name_in_the_file_is_reported_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(".env").write_text("ATTENTION_PROT=1\n")
    assert serve([]) == 2
    assert capsys.readouterr().err == "ATTENTION_PROT: there is no such setting; did you mean ATTENTION_PORT?\n"


def test_a_taken_port_is_reported_before_torch_is_imported(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, (line,) = start(tmp_path, ATTENTION_PORT=port)
    assert status == 1
    assert port in line


@pytest.mark.slow
def test_other_names_with_the_prefix_start(tmp_path):
    """Kubernetes makes such names for a service, and the client has variables of its own."""
    others = {"ATTENTION_SERVICE_HOST": "10.0.0.1", "ATTENTION_URL": "http://box", "ATTENTION_API_KEY": "k"}
    status, lines = start(tmp_path, **others)
    assert (status, lines) == (1, ["torch was imported"])


@pytest.mark.slow
def test_a_hangup_drains(tmp_path):
    with process(tmp_path, "--drain-seconds", "30") as (server, url):
        body, answers = {"query": [[[0.5] * 64] * 1500] * 8, "num_heads": 4}, []
        askers = [
            threading.Thread(
                target=lambda: answers.append(httpx.post(f"{url}/v1/attention/forward", json=body, timeout=60))
            )
            for _ in range(4)
        ]
        for asker in askers:
            asker.start()
        while not httpx.get(f"{url}/v1").json()["memory"]["in_flight_bytes"]:
            pass
        server.send_signal(signal.SIGHUP)
        for asker in askers:
            asker.join()
        assert 200 in {answer.status_code for answer in answers}
        assert {answer.status_code for answer in answers} <= {200, 503}
        assert server.wait(60) == 0
