"""BentoML, one worker; it reads bodies as JSON or multipart only, so that bytes come in as base64 and go out raw."""

import os
import sys
from base64 import b64decode
from pathlib import Path
from typing import Annotated, Any

import bentoml
import numpy as np
import torch
from bentoml.validators import ContentType, DType

from benchmarks.servers.attention import Attention

GIVEN = "BENCHMARK_WEIGHTS", "BENCHMARK_THREADS"
"""The workers import this file anew and know no arguments."""


@bentoml.service(workers=1, traffic={"timeout": 120}, logging={"access": {"enabled": False}})
class Served:
    """``/raw`` and ``/json``."""

    def __init__(self) -> None:
        weights, threads = (os.environ[name] for name in GIVEN)
        self.attention = Attention(Path(weights), int(threads))

    @bentoml.api(route="/raw")
    async def raw(self, query: str) -> Annotated[bytes, ContentType("application/octet-stream")]:
        """Bytes of float32."""
        return bytes(self.attention.of_bytes(b64decode(query))[0])

    @bentoml.api(route="/json")
    async def lists(self, query: Annotated[np.ndarray, DType("float32")]) -> dict[str, Any]:
        """Nested lists."""
        return {"output": self.attention(torch.from_numpy(query)).tolist()}


def main(weights: str, port: str, threads: str) -> None:
    """Become the server."""
    os.environ |= dict(zip(GIVEN, (weights, threads), strict=True))
    arguments = ["-m", "bentoml", "serve", "benchmarks.peers.bentoml:Served", "--host", "127.0.0.1", "--port", port]
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606


if __name__ == "__main__":
    main(*sys.argv[1:])
