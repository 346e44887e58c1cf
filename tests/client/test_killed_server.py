"""A server that is killed in the middle of many sessions' steps: each goes on, and all numbers are the same."""

import asyncio
from contextlib import ExitStack

import numpy as np
import pytest
from benchmarks.processes import free_port
from tools.proof.servers import serving

from attention_client import AsyncClient, Client

MODULE, WIDTH = "killed", 32
CONFIG = {"d_model": WIDTH, "num_heads": 4, "num_kv_heads": 2, "spec": {"masks": [{"name": "causal"}]}}
CONFIG["spec"]["position"] = {"name": "rope"}
SESSIONS, STEPS = 32, 200
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture
def running():
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
async def test_sessions_outlive_a_killed_server(tmp_path, running):
    port = free_port()

    def start():
        return running.enter_context(serving(tmp_path, port))

    server = start()
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
        nonlocal server
        for share in (0.3, 0.7):
            while taken < share * SESSIONS * STEPS:
                await asyncio.sleep(0.01)
            server.process.kill()
            running.close()
            await asyncio.sleep(0.5)
            server = await asyncio.to_thread(start)

    async with AsyncClient(server.url, timeout=None) as client:
        *ended, _ = await asyncio.gather(*(decode(client, each) for each in x), kill())
        assert (await client.sessions.list()).sessions == []
    # A session that has all its tokens before the second end, as on a busy machine, is not replayed again.
    assert {replays for _, replays in ended} <= {1, 2}
    assert max(replays for _, replays in ended) == 2
    np.testing.assert_allclose(np.stack([found for found, _ in ended]), expected, **CLOSE)
