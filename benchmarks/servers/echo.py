"""A bare ASGI application that answers a forward request of the service's protocol with its own query.

It does not read the head of a request, and writes the head of the reply once.
"""

import numpy as np

from attention_contract.schemas.attention import ForwardReply, Ran
from attention_contract.wire import SAFETENSORS, to_body
from benchmarks.servers.attention import Attention
from benchmarks.servers.bare import Application, application, serve

RAN = Ran(
    kernel="fused", device="cpu", dtype="float32", version="0" * 64, flops=1, predicted_ms=0.1, predicted_low_ms=0.05,
    predicted_high_ms=0.2, compute_ms=0.1, cpu_ms=0.1, queue_ms=0.01, batch=1, peak_bytes=1,
)  # fmt: skip


def made(attention: Attention) -> Application:
    """Make the application, for queries of the attention's shape."""
    reply = ForwardReply(output=np.zeros(attention.shape, np.float32), ran=RAN)
    head = bytes(to_body(reply, SAFETENSORS, "reply")[0])

    async def echo(body: bytes) -> bytes:
        view = memoryview(body)
        return b"".join((head, view[8 + int.from_bytes(view[:8], "little") :]))

    async def alive(body: bytes) -> bytes:
        return body

    return application({"/": alive, "/v1/modules/echo/forward": echo}, (b"content-type", SAFETENSORS.encode()))


def main() -> None:
    """Serve until terminated."""
    serve(__doc__, made, timeout_keep_alive=3600)


if __name__ == "__main__":
    main()
