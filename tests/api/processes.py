"""A server as a process of its own."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

_SERVE = "import attention_service.__main__ as command; raise SystemExit(command.serve())"


@contextmanager
def process(
    models_dir: Path, *flags: str, before: str = "", path: str = "/health/ready", **env: str
) -> Iterator[tuple[subprocess.Popen, str]]:
    """Run a server until the block ends. Yields it, once it is ready, and its base URL.

    ``before``: Python that it runs before it starts. ``path``: what is answered once it is ready.
    """
    server, url = _started(models_dir, *flags, before=before, **env)
    if not _is_ready(server, url + path):
        server.kill()
        _, log = server.communicate()
        assert b"address already in use" in log, log  # somebody took the port meanwhile
        server, url = _started(models_dir, *flags, before=before, **env)
        assert _is_ready(server, url + path)
    try:
        yield server, url
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def _started(models_dir: Path, *flags: str, before: str, **env: str) -> tuple[subprocess.Popen, str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {"ATTENTION_MODELS_DIR": models_dir, "ATTENTION_PORT": port, "ATTENTION_CALIBRATE": "false"}
    run = ["-c", f"{before}\n{_SERVE}"] if before else ["-m", "attention_service"]
    command = [sys.executable, *run, "--log-format", "json", *flags]
    environment = os.environ | {name: str(value) for name, value in own.items()} | env
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, cwd=models_dir)
    return server, f"http://127.0.0.1:{port}"


def _is_ready(server: subprocess.Popen, url: str) -> bool:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(url).status_code == 200:
                return True
        except httpx.TransportError:
            time.sleep(0.1)
    return False
