"""A bare ASGI application that speaks as much of the service's protocol as its clients need to forward.

``/v1/modules/one/forward`` answers one request at a time, ``/v1/modules/many/forward`` together what arrived in one
turn of the event loop. The head of a request is passed over; that of the reply was written once.
"""

from collections.abc import Awaitable, Callable

import numpy as np

from attention_contract.schemas.attention import ForwardReply, Ran
from attention_contract.wire import SAFETENSORS, to_body
from benchmarks.servers.attention import Attention
from benchmarks.servers.bare import Application, Route, Together, application, serve

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


def made(attention: Attention) -> Application:
    """The application: one at a time, and many together."""

    async def one(body: memoryview) -> memoryview:
        return attention.of_bytes(body)[0]

    async def alive(body: bytes) -> bytes:
        return body

    answers: dict[str, Callable[[memoryview], Awaitable[memoryview]]] = {"one": one, "many": Together(attention)}
    routes: dict[str, Route] = {"/": alive}
    routes |= {f"/v1/modules/{name}/forward": speaking(attention.shape, answer) for name, answer in answers.items()}
    return application(routes, (b"content-type", SAFETENSORS.encode()))


def main() -> None:
    """Serve until terminated."""
    serve(__doc__, made, timeout_keep_alive=3600)


if __name__ == "__main__":
    main()
