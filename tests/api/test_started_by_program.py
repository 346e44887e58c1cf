"""A server that a program starts for itself: its key, its end without requests, and its end with the program."""

import os
import subprocess
import sys
import time
from hashlib import sha256

import httpx
import pytest

from attention_service.api.idle_exit import IdleExit
from tests.api.processes import process

KEY = "attn_of_a_program"
IDLE_S = 1.5


@pytest.mark.slow  # a server starts anew; tests/client/test_local.py has one so started in every run
def test_a_server_takes_the_key_of_its_hash_and_stops_when_nobody_asks(tmp_path):
    own = ("--require-keys", "true", "--key-hash", sha256(KEY.encode()).hexdigest(), "--idle-exit-s", str(IDLE_S))
    with process(tmp_path, *own) as (server, url):
        for key, status in (("attn_another", 401), (KEY, 200)):
            assert httpx.get(f"{url}/v1", headers={"Authorization": f"Bearer {key}"}).status_code == status
        assert httpx.get(f"{url}/v1/modules").status_code == 401
        for _ in range(8):  # longer than it waits for the next request
            assert httpx.get(f"{url}/health/live").status_code == 200
            time.sleep(0.3)
        assert server.wait(10 * IDLE_S) == 0
        assert b"idle_exit_s" in server.stderr.read()
    assert not (tmp_path / "keys.json").exists()


def test_work_under_way_counts_as_a_request(monkeypatch):
    now, beside = 100.0, 0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    idle = IdleExit(10, lambda: beside)
    steps = [(9, 0, 0, False), (18, 1, 0, False), (27, 1, 1, False), (36, 1, 0, False), (37, 1, 0, True)]
    for seconds, answered, under_way, ends in steps:
        now = 100.0 + seconds
        assert idle.has_come(answered, under_way) is ends, seconds
    beside = 1
    assert not idle.has_come(1, 0)


def test_a_server_whose_parent_has_ended_ends_before_it_imports_pytorch(tmp_path):
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "attention_service", "--parent-pid", "1", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": path, "ATTENTION_MODELS_DIR": str(tmp_path / "models")}
    assert subprocess.run(command, env=environment, cwd=tmp_path, timeout=30, check=False).returncode == 1
