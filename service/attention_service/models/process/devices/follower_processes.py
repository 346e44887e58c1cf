"""The start of the processes of further devices. The first process starts them before it imports PyTorch itself."""

import subprocess
import sys
from typing import Final

FOLLOW: Final = "--follow"
_COMMAND: Final = (sys.executable, "-P", "-m", "attention_service.models.process", FOLLOW)


def start_followers(devices: int) -> list[subprocess.Popen[bytes]]:
    """Start the processes that follow the first of so many; each waits for what it is to load."""
    return [subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(devices - 1)]  # noqa: S603
