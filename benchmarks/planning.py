"""Time to bind, plan and admit a request with a new shape, with warm buckets.

No attention is computed.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.modules.resident import Module, complete
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import forward
from attention_service.runtime.scheduling.budget import Budget
from benchmarks.page import parser, publish
from benchmarks.tables import table

FREE_BYTES = 2**33
_TEXT = "Microseconds of one request whose shape did not come before, in streams whose buckets of sizes are known."


@dataclass(frozen=True)
class Stream:
    """Requests to one module, each of another shape."""

    name: str
    module: Module
    warm: list[ForwardRequest]
    """Requests that fill the plan cache."""
    timed: list[ForwardRequest]


def streams(rng: np.random.Generator) -> Iterator[Stream]:
    """Mixed lengths of two modules, and a decode whose past grows by one token a step."""
    for d_model, heads, longest in ((64, 4, 128), (512, 8, 512)):
        module = module_of(d_model, heads)
        lengths = rng.permutation(np.arange(1, longest + 1))
        requests = [ForwardRequest(query=rng.standard_normal((1, n, d_model), np.float32)) for n in lengths]
        name = f"lengths 1 to {longest}, d_model {d_model}, {heads} heads"
        yield Stream(name, module, requests[::2], requests[1::2])
    module = module_of(512, 8)
    first, steps = 256, 1024
    yield Stream(
        "one query, the past grows by one", module, list(decode(rng, first, 4)), list(decode(rng, first + 4, steps))
    )


def module_of(d_model: int, heads: int) -> Module:
    """A module with parameters drawn at random."""
    config = complete(ModuleConfig(d_model=d_model, num_heads=heads))
    return Module.of("m", config, initial_parameters(Sizes.of(config), 0, torch.float32))


def decode(rng: np.random.Generator, past: int, steps: int) -> Iterator[ForwardRequest]:
    """Steps of one query over a past of views of one array."""
    held = rng.standard_normal((2, 1, 8, past + steps, 64), np.float32)
    query = rng.standard_normal((1, 1, 512), np.float32)
    for length in range(past, past + steps):
        yield ForwardRequest(query=query, past_key=held[0, :, :, :length], past_value=held[1, :, :, :length])


def microseconds(stream: Stream, device: Device, budget: Budget) -> tuple[float, float]:
    """The median and the mean of one request's binding, planning and admission."""
    _walk(stream.module, stream.warm, device, budget)
    times = [_walk(stream.module, [request], device, budget) for request in stream.timed]
    return median(times) * 1e6, sum(times) / len(times) * 1e6


def _walk(module: Module, requests: Iterable[ForwardRequest], device: Device, budget: Budget) -> float:
    started = time.perf_counter()
    for request in requests:
        job = forward.prepare(module, request, device, budget.capacity)
        if not budget.take(job.plan.peak_bytes):
            raise RuntimeError("the budget of this benchmark holds every request")
        budget.release(job.plan.peak_bytes)
    return time.perf_counter() - started


def rows() -> Iterator[list[str]]:
    """Measure each stream."""
    device, budget = Device.open("cpu", 1), Budget(FREE_BYTES, FREE_BYTES, lambda: 0, 256)
    for stream in streams(np.random.default_rng(0)):
        middle, mean = microseconds(stream, device, budget)
        yield [stream.name, f"{middle:.0f}", f"{mean:.0f}"]


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__, 1).parse_args()
    lines = table(["stream", "median µs", "mean µs"], list(rows())).splitlines()
    publish("Planning", _TEXT, lines, arguments.output)


if __name__ == "__main__":
    main()
