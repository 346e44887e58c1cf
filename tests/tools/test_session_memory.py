"""Memory of a server whose sessions come and go: what they gave back is free."""

import re

import httpx
import numpy as np
import psutil
import pytest
from tools.proof.servers import serving

from attention_client import Client

BUDGET = 2**29
TOKENS, HEADS, WIDTH = 60_000, 2, 32
BESIDE = 100e6
"""Bytes of resident memory beside the budget, at most, over those of an idle server."""
GROWTH = 16e6 + 2**25
"""Bytes that the sessions of all later modules may leave behind, beyond what those of the first two do: by then every
thread has its heap. The C library keeps one freed block, of at most 32 MiB."""


def gauge(url: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.mark.slow
def test_resident_memory_stays_in_the_budget_while_sessions_of_many_kinds_come_and_go(tmp_path):
    resident = []
    with serving(tmp_path, memory_budget=BUDGET) as server, Client(server.url, timeout=120) as client:
        process = psutil.Process(server.process.pid)
        idle = process.memory_info().rss
        key = np.ones((HEADS, TOKENS, WIDTH), np.float32)
        for value_dim in range(30, 38):
            name = f"m{value_dim}"
            config = {"d_model": 64, "num_heads": HEADS, "head_dim": WIDTH, "value_dim": value_dim}
            client.modules.create(name, config | {"spec": {"masks": [{"name": "causal"}]}}, seed=0)
            value = np.ones((HEADS, TOKENS, value_dim), np.float32)
            long = [client.sessions.create(name, past_key=key, past_value=value).session for _ in range(6)]
            client.sessions.create(name, past_key=key[:, :10], past_value=value[:, :10])
            resident.append(process.memory_info().rss - idle)
            for session in long:
                client.sessions.delete(session)
            resident.append(process.memory_info().rss - idle)
        held = gauge(server.url, "attention_session_held_bytes")
        pages = gauge(server.url, "attention_session_bytes")
    print(f"idle {idle / 1e6:.0f} MB; more, before and after each deletion:", [round(each / 1e6) for each in resident])
    print(f"{pages:.0f} bytes of pages, {held:.0f} held")
    assert max(resident) <= BUDGET + BESIDE
    assert resident[-1] - resident[3] <= GROWTH
    assert pages <= held <= 64 * pages
