"""Claims about a GPU that no test without one can hold, each measured beside its goal: one line a claim.

``python -m benchmarks.gpu_claims`` prints them; a part that fails costs the others nothing. ``--device cpu`` and
``--small`` show that it runs. ``--profile`` runs two passes for a profiler alone.
"""

import argparse
import asyncio
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.schemas.modules import CreateModule, ModuleConfig
from attention_contract.schemas.sessions import OpenSession, SessionStep, StepsRequest
from attention_contract.spec import AttentionSpec, Causal, SlidingWindow
from attention_service.core.attention import attend
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.core.problem import Problem
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.engine import Engine
from attention_service.modules.resident import Module, complete
from attention_service.runtime.device.cuda_graphs import OFTEN, Graphs
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import forward, gradients
from benchmarks.cuda import FUSED, by_backend, interleaved

FREE_BYTES = 2**62
CAUSAL = AttentionSpec(masks=[Causal()])


@dataclass(frozen=True)
class Work:
    """The sizes that are measured."""

    lengths: Sequence[int] = (2048, 8192, 32768)
    heads: int = 16
    width: int = 128
    window: int = 512
    sessions: int = 64
    past: int = 8192
    rounds: int = 21


SMALL = Work((16, 32), 2, 8, 4, 2, 16, 3)


@dataclass(frozen=True)
class Claim:
    """One measurement beside its goal."""

    text: str
    found: float
    most: float | None = None
    """The goal: no more than this. None for a number without a goal."""
    unit: str = ""

    def __str__(self) -> str:
        goal = "" if self.most is None else f", goal {self.most:g}"
        verdict = "     " if self.most is None else "held " if self.found <= self.most else "MISS "
        return f"{verdict} {self.text}: {self.found:.3g}{self.unit}{goal}"


Part = Callable[[Device, Work], Iterator[Claim]]


def bfloat16(*shape: int) -> NDArray[np.generic]:
    """Seeded numbers."""
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def milliseconds(run: Callable[[], object], device: Device, rounds: int) -> float:
    """The median time of a run, by the device's events."""
    return median(interleaved({"it": run}, device, rounds)["it"])


def bandwidth(device: Device) -> float:
    """Bytes a second that a large copy reads and writes."""
    x = torch.empty(2**28 if device.is_cuda else 2**22, dtype=torch.uint8, device=device.torch)
    y = torch.empty_like(x)
    return 2 * x.nbytes / milliseconds(lambda: y.copy_(x), device, 11) * 1e3


def rates(device: Device, work: Work) -> Iterator[Claim]:
    """The rates that predictions stand on, beside the same products and copies measured now."""
    rated = device.clock.rated(lambda each: each.flops_per_s).median
    halves = device.clock.rated(lambda each: each.product_flops_per_s(2)).median
    side = 8192 if device.is_cuda else 128
    for dtype, of_clock in ((torch.float32, rated), (torch.bfloat16, halves)):
        a = torch.randn(side, side, device=device.torch, dtype=dtype)
        found = 2 * side**3 / milliseconds(lambda a=a: a @ a, device, 11) * 1e3
        yield Claim(f"products in {dtype}, measured over the clock's rate", found / of_clock, 2)
        yield Claim(f"the clock's rate over the measured one, {dtype}", of_clock / found, 2)


def forward_passes(device: Device, work: Work) -> Iterator[Claim]:
    """The fused kernel beside the fastest of PyTorch's, causal and with a window."""
    for length in work.lengths:
        q, k, v = torch.randn(3, 1, work.heads, length, work.width, device=device.torch).bfloat16()
        problem = Problem(q, k, v, CAUSAL, finite=True)  # as in a request, which looks at the sums of keys at its end
        runs: dict[str, Callable[[], object]] = {"ours": lambda problem=problem: attend(problem, kernel="fused")}
        runs["default"] = lambda q=q, k=k, v=v: sdpa(q, k, v, is_causal=True)
        runs |= {each.name: by_backend(each, q, k, v) for each in FUSED} if device.is_cuda else {}
        times = {name: median(each) for name, each in interleaved(runs, device, work.rounds).items()}
        ours = times.pop("ours")
        yield Claim(f"causal forward of {length} tokens over the best bare kernel", ours / min(times.values()), 1.03)
    length = work.lengths[len(work.lengths) // 2]
    q, k, v = torch.randn(3, 1, work.heads, length, work.width, device=device.torch).bfloat16()
    spec = AttentionSpec(masks=[Causal(), SlidingWindow(left=work.window - 1)])
    windowed = Problem(q, k, v, spec, finite=True)
    flash = by_backend(SDPBackend.FLASH_ATTENTION, q, k, v)  # PyTorch's only kernel with windows
    both = {"window": lambda: attend(windowed, kernel="fused")}
    both["causal"] = flash if device.is_cuda else lambda: sdpa(q, k, v, is_causal=True)
    times = {name: median(each) for name, each in interleaved(both, device, work.rounds).items()}
    share = 2 * work.window / length
    yield Claim(
        f"a window of {work.window} in {length} tokens over its share of the causal pass of the same kernel",
        times["window"] / (share * times["causal"]), 2,
    )  # fmt: skip


def resident(device: Device, dtype: str = "float32", **config: int) -> Module:
    """A module on the device."""
    whole = complete(ModuleConfig.model_validate(config | {"dtype": dtype}))
    return Module.of("m", whole, initial_parameters(Sizes.of(whole), 0, TORCH_DTYPES[dtype])).on(device.torch)


def small_passes(device: Device, work: Work) -> Iterator[Claim]:
    """A pass of 16 tokens from arrays to arrays, by its graph and without; many lengths, and what their graphs hold."""
    module, plain = resident(device, d_model=64, num_heads=4), Device.open(str(device.torch))
    plain.graphs = Graphs(limit=0)
    query = np.random.default_rng(0).standard_normal((1, 16, 64)).astype(np.float32)
    by_graph, eager = (
        forward.prepare(module, ForwardRequest(query=query), each, FREE_BYTES) for each in (device, plain)
    )
    for _ in range(OFTEN):
        by_graph.run()
    device.graphs.capture_next(FREE_BYTES)
    for name, job in (("with graphs", by_graph), ("without", eager)):
        taken = []
        for _ in range(10 * work.rounds):
            started = time.perf_counter()
            job.run()
            taken.append(time.perf_counter() - started)
        most = 60 if name == "with graphs" else None
        yield Claim(f"16 tokens, width 64, {name}", median(taken) * 1e6, most, " µs")
    for length in range(1, 129):
        job = forward.prepare(module, ForwardRequest(query=np.zeros((1, length, 64), np.float32)), device, FREE_BYTES)
        for _ in range(OFTEN):
            job.run()
        device.graphs.capture_next(FREE_BYTES)
    yield Claim("captures of 128 lengths", device.graphs.captures, 4)
    yield Claim("peak_meter of one pass", min(_seconds(device.peak_meter) for _ in range(99)) * 1e6, 60, " µs")


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def memory(device: Device, work: Work) -> Iterator[Claim]:
    """Measured peaks over planned ones; nothing where the device does not measure them."""
    length = work.lengths[0]
    cases = {
        "bfloat16": (forward, RawForwardRequest(query=bfloat16(1, work.heads, length, work.width), spec=CAUSAL)),
        "heads of 100": (forward, RawForwardRequest(query=bfloat16(1, work.heads, length, 100), spec=CAUSAL)),
        "float64": (forward, RawForwardRequest(query=np.zeros((1, work.heads, length, 64)))),
        "weights": (
            forward,
            RawForwardRequest(query=np.zeros((1, 2, length, 64), np.float32), return_=["output", "weights"]),
        ),
        "gradients": (
            gradients,
            RawGradientsRequest(query=bfloat16(1, work.heads, length, work.width), spec=CAUSAL, wrt=["query"]),
        ),
    }
    for name, (operation, request) in cases.items():
        job = operation.prepare(None, request, device, FREE_BYTES)  # type: ignore[attr-defined]
        meter = device.peak_meter()
        job.run()
        if (held := meter()) is not None:
            yield Claim(f"peak over plan, {name} by {job.plan.kernel}", held / job.plan.peak_bytes, 1)


def new_shapes(device: Device, work: Work) -> Iterator[Claim]:
    """The first pass of a length that was never seen, over the next of the same."""
    attend(Problem(*torch.randn(3, 1, 8, 64, 64, device=device.torch).bfloat16(), CAUSAL), kernel="fused")
    for length in (130, 131, work.lengths[-1] + 1):
        q, k, v = torch.randn(3, 1, 8, length, 64, device=device.torch).bfloat16()
        problem = Problem(q, k, v, CAUSAL)

        def run(problem: Problem = problem) -> None:
            attend(problem, kernel="fused")
            device.synchronize()

        device.synchronize()
        yield Claim(f"first pass of {length} tokens", (_seconds(run) - _seconds(run)) * 1e3, 10, " ms more")


def decoding(device: Device, work: Work) -> Iterator[Claim]:
    """A step of many sessions in one pass, over the time to read their keys and values once."""
    heads, kv_heads, width = 32, 8, 128
    config = ModuleConfig(
        d_model=1024,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        dtype="bfloat16",
        spec=CAUSAL,
    )
    past, kernels = bfloat16(1, kv_heads, work.past, width), set[str]()

    async def steps(engine: Engine) -> list[float]:
        await engine.modules.create(CreateModule(name="m", config=config))
        opening = OpenSession(past_key=past, past_value=past)
        opened = [await engine.sessions.open("m", opening) for _ in range(work.sessions)]
        query, taken = bfloat16(1, 1, config.d_model), []
        kernels.add(engine.sessions.kernel)
        for _ in range(work.rounds):
            request = StepsRequest(steps=[SessionStep(session=each.session, query=query) for each in opened])
            reply = await engine.sessions.steps(request)
            first = reply.steps[0]
            if first.ran is None:
                raise RuntimeError(f"a step failed: {first}")
            taken.append(first.ran.compute_ms)
        return taken

    taken = _with_engine(device, steps)
    floor = work.sessions * 2 * past.nbytes / bandwidth(device) * 1e3
    yield Claim(f"a step of {work.sessions} sessions × {work.past}", median(taken), None, " ms")
    yield Claim("kernels of these steps that are not PyTorch's for block tables", len(kernels - {"paged"}), 0)
    yield Claim("the same over one read of their cache", median(taken) / floor, 1.3)


def _with_engine(device: Device, ask: Callable[[Engine], Awaitable[list[float]]]) -> list[float]:
    async def run(folder: Path) -> list[float]:
        engine = Engine(folder, device)
        await engine.start()
        try:
            return await ask(engine)
        finally:
            await engine.stop()

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(Path(folder)))


PARTS: tuple[Part, ...] = (rates, forward_passes, small_passes, memory, new_shapes, decoding)


def lines(device: Device, work: Work) -> Iterator[str]:
    """All claims, and what kept a part from being measured."""
    for part in PARTS:
        try:
            yield from map(str, part(device, work))
        except Exception:
            yield f"FAIL  {part.__name__}\n{traceback.format_exc(limit=-3)}"


def profiled(device: Device) -> None:
    """Run a small pass and a large one between the calls that start and stop a profiler."""
    for sizes, heads in (((1, 16, 64), 4), ((8, 512, 512), 8)):
        module = resident(device, d_model=sizes[2], num_heads=heads)
        job = forward.prepare(module, ForwardRequest(query=np.zeros(sizes, np.float32)), device, FREE_BYTES)
        job.run()
        torch.cuda.cudart().cudaProfilerStart()
        job.run()
        torch.cuda.cudart().cudaProfilerStop()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to see that it runs")
    parser.add_argument("--small", action="store_true", help="short sequences")
    parser.add_argument("--profile", action="store_true", help="two passes for a profiler alone")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        print("there is no CUDA device here; nothing was measured")
        return
    device = Device.open(arguments.device)
    if arguments.profile:
        profiled(device)
        return
    print(f"{device.model}, torch {torch.__version__}", flush=True)
    for line in lines(device, SMALL if arguments.small else Work()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
