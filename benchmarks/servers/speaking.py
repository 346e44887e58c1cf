"""A bare ASGI application that speaks as much of the service's protocol as its clients need to forward.

``/v1/modules/one/forward`` answers one request at a time, ``/v1/modules/many/forward`` together what arrived in one
turn of the event loop. The head of a request is passed over; that of the reply was written once.
"""

import argparse
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import uvicorn

from attention_contract.schemas.attention import ForwardReply, Ran
from attention_contract.wire import SAFETENSORS, to_body
from benchmarks.servers.attention import Attention
from benchmarks.servers.bare import Route, Together, application

RAN = Ran(
    kernel="fused", device="cpu", dtype="float32", version="0" * 64, flops=1, predicted_ms=0.1, predicted_low_ms=0.05,
    predicted_high_ms=0.2, compute_ms=0.1, queue_ms=0.01, batch=1, peak_bytes=1,
)  # fmt: skip


def speaking(shape: tuple[int, ...], answer: Callable[[memoryview], Awaitable[memoryview]]) -> Route:
    """Answer a safetensors file of one tensor with another."""
    head = bytes(to_body(ForwardReply(output=np.zeros(shape, np.float32), ran=RAN), SAFETENSORS, "reply")[0])

    async def route(body: bytes) -> bytes:
        view = memoryview(body)
        return b"".join((head, await answer(view[8 + int.from_bytes(view[:8], "little") :])))

    return route


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("threads", type=int)
    options = parser.parse_args()
    attention = Attention(options.weights, options.threads)

    async def one(body: memoryview) -> memoryview:
        return attention.of_bytes(body)[0]

    async def alive(body: bytes) -> bytes:
        return body

    answers: dict[str, Callable[[memoryview], Awaitable[memoryview]]] = {"one": one, "many": Together(attention)}
    routes: dict[str, Route] = {"/": alive}
    routes |= {f"/v1/modules/{name}/forward": speaking(attention.shape, answer) for name, answer in answers.items()}
    app = application(routes, (b"content-type", SAFETENSORS.encode()))
    gc.freeze()
    uvicorn.run(app, port=options.port, lifespan="off", log_level="error", access_log=False, timeout_keep_alive=3600)


if __name__ == "__main__":
    main()
