"""The contract costs little to import: no tensors' framework, no network, no event loop."""

import subprocess
import sys

SCRIPT = """
import sys
import attention_contract.operations, attention_contract.wire
print(*sorted(name.partition(".")[0] for name in sys.modules))
"""


def test_the_contract_does_not_import_what_it_does_not_need():
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=60)
    imported = set(done.stdout.split())
    assert "attention_contract" in imported
    heavy = {"torch", "transformers", "httpx", "asyncio", "anyio", "ssl", "fastapi", "attention_client"}
    assert not heavy & imported
