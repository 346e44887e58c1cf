"""What the C library and oneDNN keep beside tensors, told by Linux of a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory"),
]

RESIDENT = """
from pathlib import Path

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))
"""

THREADS = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from attention_service.runtime.device import freed_memory

freed_memory.keep_freed_memory()
together, alone = Barrier(8), Lock()

def use(_):
    together.wait(60)  # that there are eight of them
    with alone:
        return len(b"1" * 2**24)

with ThreadPoolExecutor(8) as threads:
    before, own = resident(), freed_memory.private_bytes()
    list(threads.map(use, range(16)))
    print(resident() - before)
    print((freed_memory.private_bytes() - own) / 2**20)
    freed_memory.give_back_freed_memory()
    print(resident() - before)
"""

SHAPES = """
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.device.freed_memory import give_back_freed_memory

Device.open("cpu", 1)
import torch

tokens, weights = torch.ones(500, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(tokens, weights)
before = resident()
for length in range(1, 500):
    torch.nn.functional.linear(tokens[:length], weights)
give_back_freed_memory()
print(resident() - before)
"""


def printed(script):
    """The numbers that a script prints, in MiB."""
    done = subprocess.run([sys.executable, "-c", RESIDENT + script], check=True, capture_output=True, text=True)
    return [float(line) for line in done.stdout.split()]


def test_freed_memory_is_kept_once_for_all_threads_and_given_back_on_request():
    kept, counted, given_back = printed(THREADS)
    assert 12 < kept < 2 * 16
    assert counted == pytest.approx(kept, abs=1)
    assert given_back < 4


def test_code_that_is_compiled_for_shapes_stays_within_bounds():
    (kept,) = printed(SHAPES)
    assert kept < 150
