"""Training steps: attention of the service beside ``torch.nn.MultiheadAttention``, and three ways to bring parameters.

``python -m benchmarks.training --quick`` prints tables; ``--output FILE`` writes them.
"""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from attention_client import Client
from attention_client.calls import call
from attention_client.torch import RemoteMultiheadAttention
from attention_contract import operations
from benchmarks.page import fewer, parser, publish
from benchmarks.processes import cores_for, free_port, running
from benchmarks.tables import short, table

TEXT = """One step is a forward and a backward pass of one module over one sequence: self-attention without weights in
float32, with gradients of the input and of every parameter. Server and local module compute with one thread each.
The cases take turns in {rounds} rounds, short ones in ten times as many. Each time is the least of a case. Where other
programs keep both cores busy, a short step through the service still waits for its core several times.

`remote` is `RemoteMultiheadAttention`. Its first request brings the parameters, and the service keeps the forward pass
for the second, which brings ∂L/∂output. The bytes are those of both requests and replies; their transfer is the time
that a plain socket on loopback takes for as many. `computed` is the service's own time for both requests.

The second table has the other ways to change parameters: `PUT` them to a module in memory or to a durable one, then ask
for output and gradients by the new version."""
SIZES = ((16, 64, 4), (128, 256, 8), (512, 512, 8), (1024, 512, 8), (2048, 512, 8))
"""Tokens, width and heads."""
LONG, FURTHER = 512, 10
"""Fewer tokens are timed in so many times the rounds."""
QUICK = 4
"""The first of them, which are measured quickly."""


@dataclass
class Step:
    """One way to take a step, with its times in milliseconds."""

    name: str
    run: Callable[[], object]
    times: list[float]

    def timed(self, *, kept: bool) -> None:
        """Take one step."""
        started = time.perf_counter()
        self.run()
        if kept:
            self.times.append((time.perf_counter() - started) * 1e3)

    @property
    def milliseconds(self) -> float:
        """The least."""
        return min(self.times)


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, 40).parse_args()
    rounds = options.rounds or (fewer(40) if options.quick else 40)
    sizes = SIZES[:QUICK] if options.quick else SIZES
    publish("Training", TEXT.format(rounds=rounds), lines(sizes, rounds), options.output, ("torch", "httpx", "uvicorn"))


def lines(sizes: Sequence[tuple[int, int, int]], rounds: int) -> Iterator[str]:
    """Start a server and measure."""
    cores, _ = cores_for(2)
    torch.set_num_threads(1)
    port, steps, others = free_port(), [], []
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "attention_service", "--models-dir", folder, "--port", str(port)]
        command += ["--calibrate", "false", "--log-level", "error", "--threads", "1"]
        server = running(command, port, "/health/ready", cores, {}, Path(folder) / "log")
        with server as started, Client(started.url) as http:
            rate = bytes_per_second()
            for size in sizes:
                one, other = measured(http, size, rounds * (FURTHER if size[0] < LONG else 1), rate)
                steps.append(one)
                others.append(other)
    head = ["tokens × width", "local ms", "remote ms", "more ms", "computed ms", "MB", "transfer ms"]
    yield table([*head, "(remote − transfer) / local"], steps)
    yield ""
    yield table(["tokens × width", "brought ms", "PUT in memory ms", "PUT durable ms"], others)


def measured(
    http: Client, size: tuple[int, int, int], rounds: int, rate: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The rows of one size."""
    tokens, width, heads = size
    local = nn.MultiheadAttention(width, heads, batch_first=True)
    remote = RemoteMultiheadAttention.of(local, http)
    x = torch.randn(1, tokens, width, requires_grad=True)
    noted: list[tuple[float, int]] = []
    attend = remote.connection.attend

    def watched(operation: object, fields: object) -> object:
        reply = attend(operation, fields)
        sent = sum(map(len, call(operation, fields).encode("safetensors").chunks))
        arrays = [reply.output] if hasattr(reply, "output") and reply.output is not None else []
        arrays += getattr(reply, "gradients", {}).values()
        noted.append((reply.ran.compute_ms, sent + sum(array.nbytes for array in arrays)))
        return reply

    ways = [
        Step("local", lambda: step(local, x), []),
        Step("remote", lambda: step(remote, x), []),
        Step("memory", put(http, remote, x, durable=False), []),
        Step("durable", put(http, remote, x, durable=True), []),
    ]
    for turn in range(rounds + 2):
        for way in ways[:: 1 if turn % 2 else -1]:
            way.timed(kept=turn > 1)
    remote.connection.attend = watched
    for _ in range(rounds):
        step(remote, x)
    at, by, memory, durable = (way.milliseconds for way in ways)
    computed = min(first[0] + second[0] for first, second in zip(noted[::2], noted[1::2], strict=True))
    moved = noted[0][1] + noted[1][1]
    transfer = moved / rate * 1e3
    name = f"{tokens} × {width}"
    numbers = (at, by, by - at, computed, moved / 1e6, transfer, (by - transfer) / at)
    return (name, *map(short, numbers)), (name, *map(short, (by, memory, durable)))


def step(module: nn.MultiheadAttention, x: Tensor) -> None:
    """Take the gradients of Σ output²."""
    output, _ = module(x, x, x, need_weights=False)
    output.square().sum().backward()


def put(http: Client, module: RemoteMultiheadAttention, x: Tensor, *, durable: bool) -> Callable[[], None]:
    """Return a step that replaces the parameters of a module of its own, and pins the version."""
    name = f"step-{x.shape[1]}-{durable}"
    config = module._config(causal=False)
    http.send(call(operations.create_module, {"name": name, "config": config, "seed": 0, "durable": durable}))

    def run() -> None:
        with torch.no_grad():
            module.out_proj.weight.mul_(1.0001)  # other content each time, as in training
        parameters = module._parameters_by_name()
        made = http.send(call(operations.replace_parameters, {"name": name, "parameters": parameters}))
        at = {"name": name, "query": x, "version": made.version, "wrt": ["query", "parameters"]}
        kept = http.send(call(operations.create_pass, at))
        http.send(call(operations.backward, {"id": kept.id, "upstream": 2 * kept.output}))

    return run


def bytes_per_second(size: int = 2**26, piece: int = 2**18) -> float:
    """The rate of a plain socket on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send() -> None:
            with socket.create_connection(listener.getsockname()) as sender:
                for _ in range(size // piece):
                    sender.sendall(bytes(piece))

        sending = threading.Thread(target=send)
        sending.start()
        receiver, _ = listener.accept()
        with receiver:
            buffer, received, started = bytearray(piece), 0, time.perf_counter()
            while got := receiver.recv_into(buffer):
                received += got
            seconds = time.perf_counter() - started
        sending.join()
    return received / seconds


if __name__ == "__main__":
    main()
