"""A server that is killed in the middle of many sessions' steps: each goes on, and all numbers are the same."""

import asyncio
import os
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest

from attention_client import AsyncClient, Client

MODULE, WIDTH = "killed", 32
CONFIG = {"d_model": WIDTH, "num_heads": 4, "num_kv_heads": 2, "spec": {"masks": [{"name": "causal"}]}}
CONFIG["spec"]["position"] = {"name": "rope"}
SESSIONS, STEPS = 32, 200
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


class Killable:
    """A server process that starts again at the same address with the same modules."""

    def __init__(self, folder):
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        own = {"ATTENTION_MODELS_DIR": str(self.folder), "ATTENTION_CALIBRATE": "false", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "attention_service", "--port", str(self.port), "--log-format", "json"]
        self.process = subprocess.Popen(command, env=os.environ | own, stderr=subprocess.DEVNULL, cwd=self.folder)

    def wait(self):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        raise RuntimeError("the server did not become ready")

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path):
    server = Killable(tmp_path)
    server.start()
    server.wait()
    yield server
    server.kill()


@pytest.mark.slow
def test_sessions_outlive_a_killed_server(server):
    x = np.random.default_rng(0).standard_normal((SESSIONS, STEPS, WIDTH)).astype(np.float32)
    with Client(server.url) as client:
        client.modules.create(MODULE, CONFIG, seed=0)
        expected = client.forward(MODULE, x).output
    taken = 0

    async def decode(client, inputs):
        nonlocal taken
        async with client.sessions.open(MODULE) as session:
            found = []
            for token in range(STEPS):
                reply = await session.step(inputs[None, token : token + 1])
                assert (reply.length, session.length) == (token + 1, token + 1)
                found.append(reply.output[0])
                taken += 1
            return np.concatenate(found), session.replays

    async def kill():
        for share in (0.3, 0.7):
            while taken < share * SESSIONS * STEPS:
                await asyncio.sleep(0.01)
            server.kill()
            await asyncio.sleep(0.5)
            server.start()

    async def play():
        async with AsyncClient(server.url, timeout=None) as client:
            *ended, _ = await asyncio.gather(*(decode(client, each) for each in x), kill())
            assert (await client.sessions.list()).sessions == []
            return ended

    ended = asyncio.run(play())
    assert all(replays == 2 for _, replays in ended)
    np.testing.assert_allclose(np.stack([found for found, _ in ended]), expected, **CLOSE)
