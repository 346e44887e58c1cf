"""The ceilings: bare ASGI applications on uvicorn.

``/raw`` answers one request at a time, ``/batched`` together what arrived in one turn of the event loop, both in the
bytes of float32; ``/json`` reads and writes nested lists by orjson; ``/echo`` computes nothing. No validation, no
errors.
"""

import argparse
import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
import uvicorn

from benchmarks.servers.attention import Attention

Body = bytes | memoryview
Route = Callable[[bytes], Awaitable[Body]]
Application = Callable[..., Awaitable[None]]


class Together:
    """Answer all requests of one event loop iteration in one batch."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.waiting: list[tuple[Body, asyncio.Future[memoryview]]] = []

    async def __call__(self, body: Body) -> memoryview:
        """The answer to one request."""
        loop = asyncio.get_running_loop()
        if not self.waiting:
            loop.call_soon(self.flush)
        answer: asyncio.Future[memoryview] = loop.create_future()
        self.waiting.append((body, answer))
        return await answer

    def flush(self) -> None:
        """Answer all that wait."""
        waiting, self.waiting = self.waiting, []
        outputs = self.attention.of_bytes(*(body for body, _ in waiting))
        for (_, answer), output in zip(waiting, outputs, strict=True):
            if not answer.done():
                answer.set_result(output)


def routes(attention: Attention) -> dict[str, Route]:
    """Handlers by path."""

    async def raw(body: bytes) -> memoryview:
        return attention.of_bytes(body)[0]

    async def json(body: bytes) -> bytes:
        query = torch.from_numpy(np.array(orjson.loads(body)["query"], np.float32))
        return orjson.dumps({"output": attention(query).numpy()}, option=orjson.OPT_SERIALIZE_NUMPY)

    async def echo(body: bytes) -> bytes:
        return body

    return {"/raw": raw, "/batched": Together(attention), "/json": json, "/echo": echo}


def application(routes: dict[str, Route], *headers: tuple[bytes, bytes]) -> Application:
    """The ASGI application; its answers have these headers and their length."""
    head = {"type": "http.response.start", "status": 200}

    async def app(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        message = await receive()
        body = message["body"]
        if message["more_body"]:
            pieces = [body]
            while message["more_body"]:
                message = await receive()
                pieces.append(message["body"])
            body = b"".join(pieces)
        reply = await routes[scope["path"]](body)
        await send(head | {"headers": [*headers, (b"content-length", b"%d" % len(reply))]})
        await send({"type": "http.response.body", "body": reply})

    return app


def serve(description: str | None, make: Callable[[Attention], Application], **settings: Any) -> None:
    """Serve what is made of the weights, at the port and with the threads of the command line, until terminated."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("weights", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("threads", type=int)
    options = parser.parse_args()
    app = make(Attention(options.weights, options.threads))
    gc.freeze()
    uvicorn.run(app, port=options.port, lifespan="off", log_level="error", access_log=False, **settings)


def main() -> None:
    """Serve until terminated."""
    serve(__doc__, lambda attention: application(routes(attention)))


if __name__ == "__main__":
    main()
