"""The service on a real Ray Serve, two replicas on this machine; without Ray (extra `ray`) these tests are skipped."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import psutil
import pytest
import yaml
from tools.docs.snippets import ROOT

from attention_client import Client
from attention_contract.errors import Stuck
from tests.conftest import eventually

pytest.importorskip("ray", reason="needs Ray: pip install 'ray[serve]'", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
slow = pytest.mark.slow
CONFIG = {"d_model": 8, "num_heads": 2, "spec": {"masks": [{"name": "causal"}]}}
X = np.random.default_rng(0).standard_normal((1, 12, 8)).astype(np.float32)
ROWS = 2**18
"""Queries of 64 numbers whose output has 64 MiB."""
REPLICA = "ray::ServeReplica"
"""How Ray names the process of a replica."""


@pytest.fixture(scope="module")
def ray_serve():
    from attention_service import ray_serve

    return ray_serve


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def options_of_file():
    (application,) = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())["applications"]
    return application


def test_the_file_names_the_application_and_its_options(ray_serve):
    application = options_of_file()
    assert application["import_path"] == f"{ray_serve.__name__}:{ray_serve.build.__name__}"
    options = ray_serve.Options(**application["args"])
    assert ray_serve.settings_of(options).replicas == 2
    assert ray_serve.build(options)._bound_deployment.name == application["name"]


def test_every_option_is_documented(ray_serve):
    text = (ROOT / "docs" / "scale.md").read_text("utf-8")
    for name, field in ray_serve.Options.model_fields.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        if isinstance(field.default, int | float) and field.default is not True:
            assert row.endswith(f"| {field.default} |"), row


def test_a_replica_has_its_share_its_device_and_callers_with_keys(ray_serve, monkeypatch):
    from attention_service.api.access.layer import needs_keys

    for name in [name for name in os.environ if name.startswith("ATTENTION_")]:
        monkeypatch.delenv(name)
    settings = ray_serve.settings_of(ray_serve.Options(replicas=2, max_replicas=4, num_gpus=1, num_cpus=3))
    assert (settings.replicas, settings.device, settings.threads) == (4, "cuda", 3)
    assert needs_keys(settings)
    monkeypatch.setenv("ATTENTION_REQUIRE_KEYS", "false")
    monkeypatch.setenv("ATTENTION_DEVICE", "cpu")
    settings = ray_serve.settings_of(ray_serve.Options(num_gpus=1, settings={"threads": 2}))
    assert (settings.device, settings.threads) == ("cpu", 2)
    assert not needs_keys(settings)


@pytest.mark.parametrize(
    ("options", "detail"),
    [
        ({"replicas": 3, "max_replicas": 2}, "max_replicas is 2, less than"),
        ({"replica": 2}, "replica\n"),
        ({"num_gpus": 2}, "num_gpus\n"),
        ({"settings": {"model_dir": "/data"}}, "no such settings: model_dir"),
        ({"settings": {"port": "x"}}, "port\n"),
    ],
)
def test_options_that_make_no_sense_are_refused(ray_serve, options, detail):
    with pytest.raises(ValueError, match=detail):
        ray_serve.build(ray_serve.Options(**options))


def test_options_reach_ray(ray_serve):
    options = ray_serve.Options(
        replicas=2, max_replicas=4, target_ongoing_requests=3, num_gpus=1, num_cpus=2, settings={"drain_seconds": 7}
    )
    deployment = ray_serve.build(options)._bound_deployment
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 4, 3)
    assert deployment.ray_actor_options == {"num_cpus": 2, "num_gpus": 1}
    assert (deployment.max_ongoing_requests, deployment._deployment_config.graceful_shutdown_timeout_s) == (1024, 17)
    routers = [
        ray_serve.build(ray_serve.Options(sessions=sessions))._bound_deployment._deployment_config.request_router_config
        for sessions in (True, False)
    ]
    assert [router.request_router_class == ray_serve.SESSION_ROUTER for router in routers] == [True, False]


def test_a_replica_that_is_stuck_tells_ray(ray_serve):
    def stuck():
        raise Stuck("no progress")

    runner = SimpleNamespace(check_live=stuck)
    app = SimpleNamespace(state=SimpleNamespace(engine=SimpleNamespace(runner=runner)))
    replica = ray_serve.build(ray_serve.Options())._bound_deployment.func_or_class
    with pytest.raises(Stuck):
        asyncio.run(replica.check_health(SimpleNamespace(app=app)))


# ── two replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Start `serve run deploy/ray/serve.yaml`, on a free port. Yields its address and its process once it is ready."""
    folder = tmp_path_factory.mktemp("ray")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"]["settings"] = {
        "models_dir": str(folder / "models"), "require_keys": False, "allowed_hosts": "*", "calibrate": False,
    }  # fmt: skip
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    env = os.environ | {
        "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    command = [str(Path(sys.executable).parent / "serve"), "run", str(folder / "serve.yaml")]
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    children = []
    try:
        assert eventually(lambda: started.poll() is not None or _status(url) == 200, seconds=180)
        assert started.poll() is None, (folder / "log").read_text()[-3000:]
        children = psutil.Process(started.pid).children(recursive=True)
        yield url, psutil.Process(started.pid)
    finally:
        started.send_signal(signal.SIGINT)
        started.wait(60)
        for child in children:  # Ray leaves some of its helpers for a while
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _status(url):
    try:
        return httpx.get(f"{url}/health/ready", timeout=5).status_code
    except httpx.TransportError:
        return None


@pytest.fixture(scope="module")
def client(running):
    with Client(running[0]) as client:
        client.modules.create("m", CONFIG, seed=1)
        found = set()

        def finds_another():
            with client.sessions.open("m") as session:
                found.add(session.id.partition("-")[0])
            return len(found) == 2

        eventually(finds_another)  # the second replica may be ready later
        yield client


@slow
def test_after_ready_nothing_is_answered_with_503(running):
    """Each request has a connection of its own, and so any of the replicas."""
    assert Counter(_status(running[0]) for _ in range(60)) == {200: 60}


@slow
def test_sessions_reach_the_replica_that_has_them(client):
    whole, replicas = client.forward("m", X).output, Counter()
    for _ in range(16):
        with client.sessions.open("m") as session:
            outputs = [session.step(X[:, at : at + 1]).output for at in range(12)]
            assert session.replays == 0
            replicas[session.id.partition("-")[0]] += 1
        np.testing.assert_allclose(np.concatenate(outputs, 1), whole, atol=1e-5)
    assert len(replicas) == 2


@slow
def test_a_stream_of_steps_equals_one_pass(client):
    with client.sessions.open("m") as session, session.stream():
        outputs = [session.step(X[:, at : at + 1]).output for at in range(12)]
    np.testing.assert_allclose(np.concatenate(outputs, 1), client.forward("m", X).output, atol=1e-5)


@slow
def test_a_reply_of_64_mib_is_the_same(client):
    query, key = np.zeros((1, ROWS, 1), np.float32), np.zeros((1, 4, 1), np.float32)
    value = np.random.default_rng(1).integers(-8, 8, (1, 4, 64)).astype(np.float32)
    output = client.attention.forward(query, key, value).output
    assert output.nbytes == 2**26
    assert np.array_equal(output, np.repeat(value.mean(1, keepdims=True), ROWS, 1))


@slow
def test_tokens_of_a_model_arrive_as_events(client):
    body = {"max_tokens": 6, "temperature": 0}
    whole = client.models.generate("tiny", "the cat sat", **body).choices[0].text
    pieces = [piece.choices[0].text for piece in client.models.stream("tiny", "the cat sat", **body)]
    assert len(pieces) > 3
    assert "".join(pieces) == whole


@slow
def test_a_killed_replica_loses_no_call_that_is_safe_to_repeat(running, client):
    url, started = running
    whole = client.forward("m", X).output
    sessions = [client.sessions.open("m") for _ in range(16)]
    for session in sessions:
        session.step(X[:, :4])
    answered, faults, ended = Counter(), [], threading.Event()

    def ask():
        with Client(url) as own:
            while not ended.is_set():
                try:
                    np.testing.assert_allclose(own.forward("m", X).output, whole, atol=1e-5)
                    answered["forward"] += 1
                except Exception as fault:
                    faults.append(fault)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: answered["forward"] > 50, seconds=60)
    victim, *others = _replicas(started)
    assert others
    victim.kill()
    for session in sessions:
        np.testing.assert_allclose(session.step(X[:, 4:]).output, whole[:, 4:], atol=1e-5)
    before = answered["forward"]
    assert eventually(lambda: len(_replicas(started)) == 2 and answered["forward"] > before + 50, seconds=90)
    ended.set()
    for thread in threads:
        thread.join()
    assert faults == []
    assert sum(session.replays > 0 for session in sessions) > 0


def _replicas(started):
    """Return the processes of the replicas that run."""
    found = []
    for each in started.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "".join(each.cmdline()).startswith(REPLICA):
                found.append(each)
    return found
