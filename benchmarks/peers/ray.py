"""Ray Serve: one replica, which batches what waits; bodies are read and answers written as bytes or JSON."""

import sys
import threading
from pathlib import Path

import orjson
import ray
import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.servers.attention import Attention


@serve.deployment(num_replicas=1, max_ongoing_requests=128)
class Served:
    """``/raw`` and ``/json``."""

    def __init__(self, weights: str, threads: int) -> None:
        self.attention = Attention(Path(weights), threads)

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0)  # type: ignore[untyped-decorator]
    async def together(self, bodies: list[bytes]) -> list[bytes]:
        """Answer a batch."""
        return [bytes(output) for output in self.attention.of_bytes(*bodies)]

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        body = await request.body()
        if request.url.path != "/json":
            return Response(await self.together(body) if body else b"", media_type="application/octet-stream")
        output = self.attention(torch.tensor(orjson.loads(body)["query"]))
        text = orjson.dumps({"output": output.numpy()}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(text, media_type="application/json")


def main(weights: str, port: str, threads: str) -> None:
    """Serve until terminated."""
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(Served.bind(weights, int(threads)))
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
