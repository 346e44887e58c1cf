"""Temporary service process for the demo."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from attention_client import AttentionError, Client

STARTS_WITHIN = 120  # seconds; importing torch from a cold disk takes a while
STOPS_WITHIN = 40


@contextmanager
def serving(checkpoint: Path) -> Iterator[tuple[str, str]]:
    """Start a service with the checkpoint in its model repository. Yield its URL and the checkpoint's path."""
    with TemporaryDirectory(prefix="attention-demo-") as models_dir:
        inside = Path("checkpoints", checkpoint.name)
        _put(checkpoint, Path(models_dir, inside))
        with _process(Path(models_dir)) as url:
            yield url, inside.as_posix()


def _put(checkpoint: Path, folder: Path) -> None:
    """Link the checkpoint's tensors and config.json into another folder, or copy them to another disk."""
    folder.mkdir(parents=True)
    for file in [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.index.json"), checkpoint / "config.json"]:
        try:
            os.link(file.resolve(), folder / file.name)
        except OSError:
            shutil.copyfile(file, folder / file.name)


@contextmanager
def _process(models_dir: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "attention_service", "--host", "127.0.0.1", "--port", str(port)]
    log = models_dir / "server.log"
    with log.open("w") as written:
        process = subprocess.Popen(
            [*command, "--models-dir", str(models_dir), "--log-level", "warning"],
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        if not _becomes_ready(url, process):
            raise RuntimeError(f"the service did not start:\n{log.read_text()[-2000:]}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOPS_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _becomes_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + STARTS_WITHIN
    with Client(url, timeout=5, retries=0) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                client.server.ready()
            except AttentionError:
                time.sleep(0.1)
            else:
                return True
    return False
