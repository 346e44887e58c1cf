"""The Pod of the chart, run by Podman: it keeps its modules when another Pod takes its place, and drains at SIGTERM.

Needs Helm, Podman, and the image among Podman's: ``docker save attention-service:cpu | podman load``.
"""

import json
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from benchmarks.processes import free_port

from attention_client import Client, ModuleNotFound
from tests.conftest import eventually
from tests.deploy.test_chart import pod_of, render

PODMAN = shutil.which("podman")
IMAGE = "attention-service:cpu"
CONFIG = {"d_model": 8, "num_heads": 2, "spec": {"masks": [{"name": "causal"}]}}
X = np.random.default_rng(0).standard_normal((1, 5, 8)).astype(np.float32)


def podman(*words):
    """Run a command of Podman and return what it prints. Raises AssertionError."""
    done = subprocess.run([PODMAN, *map(str, words)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def has_image():
    """Return True if Podman is there and has the image."""
    command = [PODMAN, "image", "exists", IMAGE]
    return PODMAN is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("helm") is None, reason="needs Helm"),
    pytest.mark.skipif(not has_image(), reason=f"needs Podman with the image {IMAGE}"),
]


class Played:
    """A Pod of the chart, and the addresses of its ports on this machine.

    Podman does not do what the kubelet does from outside: the probes and the hook that waits before SIGTERM. The test
    asks what the probes ask.
    """

    def __init__(self, name: str, folder: Path):
        full_name = podman("image", "inspect", "--format", "{{index .RepoTags 0}}", IMAGE)
        repository, _, tag = full_name.rpartition(":")
        objects = render(
            image={"repository": repository, "tag": tag, "pullPolicy": "Never"},
            store={"claim": f"{name}-store"}, keys={"required": False}, cpu=1, memoryMiB=3072,
        )  # fmt: skip
        spec = pod_of(objects)
        (container,) = spec["containers"]
        urls = {}
        for port in container["ports"]:
            port |= {"hostPort": free_port(), "hostIP": "127.0.0.1"}
            urls[port["name"]] = f"http://127.0.0.1:{port['hostPort']}"
        self.url, self.grace = urls["http"], spec["terminationGracePeriodSeconds"]
        probes = (container.pop(f"{kind}Probe")["httpGet"] for kind in ("startup", "readiness", "liveness"))
        self.startup, self.readiness, self.liveness = (urls[probe["port"]] + probe["path"] for probe in probes)
        assert list(container.pop("lifecycle")["preStop"]) == ["sleep"]
        self.container = f"{name}-{container['name']}"
        self.manifest = folder / "pod.yaml"
        self.manifest.write_text(
            yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
        )

    @contextmanager
    def running(self):
        """Play the Pod until the block ends, once its startup probe succeeds."""
        try:
            podman("kube", "play", self.manifest)
            eventually(lambda: status(self.startup) == 200, seconds=120)
            yield
        finally:
            podman("kube", "down", self.manifest)


def status(url):
    """The status that a GET of this address has, or None without an answer."""
    try:
        return httpx.get(url, timeout=2).status_code
    except httpx.TransportError:
        return None


@pytest.fixture
def pod(tmp_path):
    """A Pod that is not played yet. Its volumes go with it."""
    volumes = set(podman("volume", "ls", "--quiet").split())
    yield Played(f"attention-{free_port()}", tmp_path)
    for name in set(podman("volume", "ls", "--quiet").split()) - volumes:
        podman("volume", "rm", name)


def test_the_pod_keeps_its_modules_and_drains(pod):
    with pod.running(), Client(pod.url) as client:
        assert status(pod.readiness) == status(pod.liveness) == 200
        with pytest.raises(ModuleNotFound):
            client.modules.get("kept")
        client.modules.create("kept", CONFIG, seed=7)
        before = client.forward("kept", X).output
        state = json.loads(podman("inspect", pod.container))[0]
        assert state["Config"]["User"] == "10001:10001"
        assert state["HostConfig"]["ReadonlyRootfs"]
        assert state["HostConfig"]["Memory"] == 3072 * 2**20
        assert state["EffectiveCaps"] in (None, [])

    with pod.running(), Client(pod.url, timeout=60) as client:
        np.testing.assert_array_equal(client.forward("kept", X).output, before)
        answers = []
        layers = np.random.default_rng(1).dirichlet(np.ones(96), (4, 1, 96))
        ask = threading.Thread(target=lambda: answers.append(client.attention.rollout(layers, method="flow")))
        ask.start()  # it takes seconds
        time.sleep(2)
        stop = threading.Thread(target=podman, args=("stop", "--time", pod.grace, pod.container))
        stop.start()
        eventually(lambda: status(pod.readiness) == 503, seconds=5)
        assert status(pod.liveness) == 200
        assert answers == []
        ask.join(pod.grace)
        assert answers[0].values.shape == (96, 96)
        stop.join(pod.grace)
        assert podman("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", pod.container) == "exited 0"
