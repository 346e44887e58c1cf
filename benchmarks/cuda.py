"""Measurements that need a GPU: kernels by their own events, a million tokens, CUDA graphs, and HTTP with its copies.

``python -m benchmarks.cuda`` prints the tables; without a CUDA device it says so and ends. With ``--device cpu`` and
short ``--lengths`` it shows that it runs.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attention_client import Client
from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.spec import AttentionSpec, Causal
from attention_service.core.attention import attend
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.core.problem import Problem
from attention_service.core.tensors import to_device, to_host
from attention_service.modules.resident import Module, complete
from attention_service.runtime.device.cuda_graphs import OFTEN, Graphs
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import forward
from benchmarks.processes import free_port, running

HEADS, WIDTH = 16, 128
LENGTHS = tuple(2**power for power in range(11, 17))
CAUSAL = AttentionSpec(masks=[Causal()])
MILLION = 1_000_000
FREE_BYTES = 2**62
FUSED = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
W1, W3 = (1, 16, 64, 4), (8, 512, 512, 8)
"""Batch, length, width of the model, heads."""
Run = Callable[[], object]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to see that it runs")
    parser.add_argument("--rounds", type=int, default=21, help="of each comparison, in turn (default: 21)")
    parser.add_argument("--lengths", type=lambda text: [*map(int, text.split(","))], default=LENGTHS, help="2048,4096")
    parser.add_argument("--longest", type=int, default=MILLION, help="tokens of the one long request")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        print("there is no CUDA device here; nothing was measured")
        return
    for line in tables(Device.open(arguments.device), arguments.lengths, arguments.longest, arguments.rounds):
        print(line, flush=True)


def tables(device: Device, lengths: Sequence[int], longest: int, rounds: int) -> Iterator[str]:
    """All of them, line by line."""
    yield from kernels(device, lengths, rounds)
    yield from long_request(device, longest)
    yield from small(device, rounds)
    yield from over_http(device, rounds)


def kernels(device: Device, lengths: Sequence[int], rounds: int) -> Iterator[str]:
    """Causal bfloat16 by what the server takes, beside each fused kernel of PyTorch."""
    yield f"## Causal, bfloat16, {HEADS} heads of {WIDTH}, milliseconds by the device's events\n"
    yield "| n | ours | best bare | which | ratio |\n|---:|---:|---:|---|---:|"
    for length in lengths:
        q, k, v = torch.randn(3, 1, HEADS, length, WIDTH, device=device.torch).bfloat16()
        problem = Problem(q, k, v, CAUSAL, finite=True)  # as in a request, which looks at the sums of keys at its end
        runs: dict[str, Run] = {"ours": lambda problem=problem: attend(problem, kernel="fused")}
        for backend in FUSED if device.is_cuda else ():
            runs[backend.name] = by_backend(backend, q, k, v)
        if not device.is_cuda:
            runs["default"] = lambda q=q, k=k, v=v: sdpa(q, k, v, is_causal=True)
        times = interleaved(runs, device, rounds)
        ours = times.pop("ours")
        best = min(times, key=lambda name: median(times[name]))
        ratio = median(a / b for a, b in zip(ours, times[best], strict=True))
        yield f"| {length} | {median(ours):.3f} | {median(times[best]):.3f} | {best} | {ratio:.3f} |"


def long_request(device: Device, length: int) -> Iterator[str]:
    """Return one head of this many tokens as one exact request."""
    tensors = [np.random.default_rng(seed).standard_normal((1, length, 64), np.float32) for seed in range(3)]
    query, key, value = (x.astype(ml_dtypes.bfloat16) for x in tensors)
    request = RawForwardRequest(query=query, key=key, value=value, spec=CAUSAL)
    job = forward.prepare(None, request, device, FREE_BYTES)
    meter, started = device.peak_meter(), time.perf_counter()
    job.run()
    seconds, peak = time.perf_counter() - started, meter()
    yield f"\n## {length} tokens in one request\n"
    held = "not counted here" if peak is None else f"{peak / 2**20:.0f} MiB"
    yield f"{job.plan.kernel}: {seconds:.2f} s, predicted {job.plan.predicted.median:.2f} s; peak {held}, "
    yield f"estimated {job.plan.peak_bytes / 2**20:.0f} MiB"


def small(device: Device, rounds: int) -> Iterator[str]:
    """A small pass with graphs and without."""
    batch, length, width, heads = W1
    config = complete(ModuleConfig(d_model=width, num_heads=heads))
    module = Module.of("small", config, initial_parameters(Sizes.of(config), 0, torch.float32)).on(device.torch)
    query = np.random.default_rng(0).standard_normal((batch, length, width)).astype(np.float32)
    plain = Device.open(str(device.torch))
    plain.graphs = Graphs(limit=0)
    on, off = (forward.prepare(module, ForwardRequest(query=query), each, FREE_BYTES).run for each in (device, plain))
    for _ in range(OFTEN):
        on()
    device.graphs.capture_next(FREE_BYTES)
    times = interleaved({"on": on, "off": off}, device, 10 * rounds)
    yield f"\n## B{batch} L{length} d{width} h{heads}, from arrays to arrays\n"
    yield f"graphs on {median(times['on']):.3f} ms ({len(device.graphs)} kept), off {median(times['off']):.3f} ms"


def over_http(device: Device, rounds: int) -> Iterator[str]:
    """Two passes over HTTP from a server in a process of its own, beside the computation and the copies there and back.

    The device's other work rests meanwhile.
    """
    yield "\n## Over HTTP, milliseconds\n"
    yield "| pass | one request | on the device by nn.MultiheadAttention | copies |\n|---|---:|---:|---:|"
    with serving(device) as url, Client(url) as client:
        for batch, length, width, heads in (W1, W3):
            query = np.random.default_rng(0).standard_normal((batch, length, width)).astype(np.float32)
            host = torch.from_numpy(query)
            there = to_device(host, device.torch)
            name = f"width-{width}"
            client.modules.create(name, {"d_model": width, "num_heads": heads}, seed=0)
            local = torch.nn.MultiheadAttention(width, heads, batch_first=True, device=device.torch).eval()

            def bare(local: torch.nn.MultiheadAttention = local, there: torch.Tensor = there) -> object:
                with torch.inference_mode():
                    return local(there, there, there, need_weights=False)

            runs: dict[str, Run] = {
                "http": lambda name=name, query=query: client.forward(name, query),
                "bare": bare,
                "copies": lambda host=host: to_host(to_device(host, device.torch)),
            }
            for _ in range(4 * OFTEN):
                runs["http"]()
            times = {name: median(each) for name, each in interleaved(runs, device, rounds).items()}
            row = " | ".join(f"{times[name]:.2f}" for name in ("http", "bare", "copies"))
            yield f"| B{batch} L{length} d{width} h{heads} | {row} |"


def interleaved(runs: dict[str, Run], device: Device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each, in turn, by the device's events where it has them. What can't run is left out."""
    able = {name: run for name, run in runs.items() if _runs(run)}
    times: dict[str, list[float]] = {name: [] for name in able}
    for _ in range(rounds):
        for name, run in able.items():
            times[name].append(_milliseconds(run, device))
    return times


def _runs(run: Run) -> bool:
    try:
        for _ in range(3):
            run()
    except RuntimeError:  # a kernel that was not built, or takes no such arguments
        return False
    return True


def _milliseconds(run: Run, device: Device) -> float:
    device.synchronize()
    started = time.perf_counter()
    if not device.is_cuda:
        run()
        return (time.perf_counter() - started) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def by_backend(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    def run() -> object:
        with sdpa_kernel(backend), torch.inference_mode():
            return sdpa(q, k, v, is_causal=True)

    return run


@contextmanager
def serving(device: Device) -> Iterator[str]:
    """The URL of a server on this device, in a process of its own."""
    with TemporaryDirectory() as folder:
        port = free_port()
        command = [sys.executable, "-m", "attention_service", "--models-dir", folder, "--port", str(port)]
        cores = sorted(os.sched_getaffinity(0))
        environment = {"ATTENTION_DEVICE": str(device.torch), "ATTENTION_LOG_LEVEL": "warning"}
        with running(command, port, "/health/ready", cores, environment, Path(folder) / "log") as server:
            yield server.url


if __name__ == "__main__":
    main()
