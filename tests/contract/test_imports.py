"""The contract costs little to import: no tensors' framework, no network, no event loop."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import attention_contract.operations, attention_contract.wire
print(*sorted(name.partition(".")[0] for name in sys.modules))
"""


@pytest.fixture(scope="module")
def imported():
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "name", ["torch", "transformers", "httpx", "asyncio", "anyio", "ssl", "fastapi", "attention_client"]
)
def test_the_contract_does_not_import(imported, name):
    assert "attention_contract" in imported
    assert name not in imported
