"""The device that one engine drives: what it is, what memory it has, how fast it is."""

import os
import platform
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import psutil
import torch

from attention_contract.errors import Stuck
from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS
from attention_service.core.kernels.fused.cuda_attention import generation
from attention_service.core.problem import Problem
from attention_service.core.tensors import to_device
from attention_service.cost import Clock, Rates, Roofline
from attention_service.runtime.device.cpu_threads import usable_cores
from attention_service.runtime.device.cuda_graphs import Graphs
from attention_service.runtime.device.freed_memory import keep_freed_memory
from attention_service.runtime.device.plan_cache import PlanCache

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_PROCESSORS = Path("/proc/cpuinfo")
BUDGET_SHARE = 0.8
"""The share of the free memory that is the default budget; the rest is for the interpreter and the allocator."""

_ON_A_CPU = {"reached": 0.45, "function_flops": 150.0, "overlaps": False, "starts": 1.0, "operation": 0.1}
"""Ratios by which counted work becomes time on a CPU, fitted to 1,400 runs of 600 random requests. Starts and
operations are those of warm caches; with cold ones they are 6 and 1/4."""
_HALF_ON_A_CPU = 1.75
"""The rate of products of half types beside the measured one, fitted to the same runs."""
_AMPERE = 8
"""The generation from which on GPUs multiply bfloat16."""
_LAUNCHES = 64
_COMPILED = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "128"
"""Shapes that oneDNN, and PyTorch for each calling thread, keep compiled code for: products in half
types. Each takes 0.6 MiB, and 1 to 5 ms to compile. The default is 1024 of each, which no memory budget counts."""

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",  # of the driver: for pinned memory, a graph, or the code of a kernel
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


@dataclass
class Device:
    """A torch device and the facts about it that the engine plans with."""

    torch: torch.device
    name: str
    total_bytes: int
    clock: Clock
    """Predicts times; replaced where what runs takes other times."""
    plans: PlanCache = field(default_factory=PlanCache, init=False, repr=False, compare=False)
    """The plans made with that clock."""
    graphs: Graphs = field(default_factory=Graphs, init=False, repr=False, compare=False)
    """CUDA graphs of small passes."""
    pinned_bytes: int = field(default=0, init=False, compare=False)
    """Bytes of the host that PyTorch kept pinned for the next copies to or from a GPU, at the last look."""
    tf32: bool = field(default=False, init=False, compare=False)
    """Products of float32 round their factors to TF32."""
    lost: str | None = field(default=None, init=False, compare=False)
    """The error after which the device computes nothing any more; None while it works."""

    @classmethod
    def open(cls, wanted: str = "auto", threads: int | None = None, *, tf32: bool = False) -> "Device":
        """The device of this name, its rates measured. Raises ValueError where there is no such device.

        threads: by default no more than this process may use cores, unless OMP_NUM_THREADS says how many.
        """
        if threads is None and "OMP_NUM_THREADS" not in os.environ and usable_cores() < torch.get_num_threads():
            threads = usable_cores()
        if threads is not None:
            torch.set_num_threads(threads)
        device = resolve(wanted)
        if device.type == "cpu":
            keep_freed_memory()
            _bound_compiled_code()
        if device.type == "cuda":  # for the whole process, before any thread computes
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
            with torch.cuda.device(device):  # remembered for threads that have another current device
                generation()
        rates = measure_rates(device)
        if device.type == "cpu":
            rates = replace(rates, **_ON_A_CPU)  # type: ignore[arg-type]  # its own fields
        opened = cls(device, _name(device), _total_bytes(device), Roofline(rates, factor=2.0))
        opened.tf32 = tf32 and device.type == "cuda"
        return opened

    def exact(self) -> "Device":
        """The same device with an empty plan cache that plans the exact sizes of each request."""
        device = replace(self)
        device.plans = PlanCache(by_bucket=False)
        device.tf32 = self.tf32
        return device

    @property
    def model(self) -> str:
        """The hardware by its maker's name, its instruction set and its number of cores."""
        if self.is_cuda:
            return torch.cuda.get_device_name(self.torch)
        return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}, {psutil.cpu_count()} cores"

    @cached_property
    def place(self) -> str:
        """The device as PyTorch writes it: cpu, cuda:0."""
        return str(self.torch)

    @cached_property
    def is_cuda(self) -> bool:
        """True for a CUDA device."""
        return self.torch.type == "cuda"

    @property
    def threads(self) -> int:
        """Threads of one computation on the CPU; 0 on a GPU."""
        return 0 if self.is_cuda else torch.get_num_threads()

    def free_bytes(self) -> int:
        """Bytes that could be allocated now, whoever holds the rest."""
        if self.is_cuda:
            return int(torch.cuda.mem_get_info(self.torch)[0])
        return min(psutil.virtual_memory().available, self.total_bytes)

    def look_at_pinned(self, most: int = 0) -> None:
        """Set ``pinned_bytes``, and have PyTorch give them back if they are more than ``most``. The driver may wait."""
        if not self.is_cuda:
            return
        self.pinned_bytes = self._unused_pinned()
        if self.pinned_bytes > most:
            try:
                torch.accelerator.empty_host_cache()
            except RuntimeError:  # of a device that an earlier run broke
                self._examine()
            self.pinned_bytes = self._unused_pinned()

    def _unused_pinned(self) -> int:
        counts = torch.cuda.host_memory_stats_as_nested_dict()
        return int(counts["allocated_bytes"]["current"] - counts["active_bytes"]["current"])

    def peak_meter(self) -> Callable[[], int | None]:
        """Start to measure peak memory. The result returns the bytes allocated since, or None on a CPU."""
        if not self.is_cuda:
            return _nobody_counts
        torch.cuda.reset_peak_memory_stats(self.torch)
        before = self._allocated("current")
        return lambda: self._allocated("peak") - before

    def allocated_bytes(self) -> int:
        """Bytes of a GPU that tensors of this process take."""
        return self._allocated("current") if self.is_cuda else 0

    def reserved_bytes(self) -> int:
        """Bytes of a GPU that PyTorch holds for this process, those of tensors among them."""
        return torch.cuda.memory_reserved(self.torch) if self.is_cuda else 0

    def _allocated(self, which: str) -> int:
        """Bytes that PyTorch's allocator gave out. ``torch.cuda.memory_allocated`` sorts all its counts first."""
        return int(torch.cuda.memory_stats_as_nested_dict(self.torch)["allocated_bytes"]["all"][which])

    def use_own_stream(self, *, first: bool) -> None:
        """Give the current thread a CUDA stream of its own; ``first``: one whose work the GPU prefers."""
        torch.cuda.set_device(self.torch)
        stream = torch.cuda.Stream(self.torch, priority=-1 if first else 0)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(stream)

    def await_parameters(self) -> None:
        """Let the current stream wait for copies of parameters, which other threads make on the default stream."""
        if self.is_cuda:
            torch.cuda.current_stream(self.torch).wait_stream(torch.cuda.default_stream(self.torch))

    def check(self) -> None:
        """Raise Stuck if the device computes nothing any more."""
        if self.lost is not None:
            raise Stuck(f"the device computes nothing any more ({self.lost}); restart the server")

    def recover(self, fault: Exception) -> None:
        """Free the tensors of a run that failed, wait for what it launched, and find out if the device still computes.

        The frames that a fault remembers hold the tensors of the run for as long as somebody holds the fault. What was
        launched may still write to pages of sessions, in which a later run on another stream goes on.
        """
        forget_frames(fault)
        if is_out_of_memory(fault):
            self.give_back_cached()
        self._examine()

    def give_back_cached(self, need: int | None = None) -> None:
        """Have PyTorch give back the GPU memory that it keeps, unless so many bytes are free beside it."""
        if not self.is_cuda:
            return
        try:
            if need is None or self.free_bytes() < need:
                torch.cuda.empty_cache()
        except RuntimeError:  # of a device that an earlier run broke
            self._examine()

    def _examine(self) -> None:
        """Set ``lost`` if the device computes nothing any more.

        After an error from which a GPU does not recover, whichever library reported it, every later call fails with it.
        After any other error, such as a launch with impossible sizes, the next call succeeds.
        """
        if not self.is_cuda or self.lost is not None:
            return
        try:
            self.probe()
        except RuntimeError as fault:
            if not is_out_of_memory(fault):
                self.lost = next(iter(str(fault).splitlines()), "")

    def probe(self) -> None:
        """Compute a small product on the current stream and wait for it. Raises RuntimeError if that is impossible.

        It does not wait for the whole device, which would break a capture on another thread.
        """
        x = torch.ones(16, 16, device=self.torch)
        (x @ x).sum().item()

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)


def _nobody_counts() -> None:
    """The peak memory of a device whose allocator does not count."""


def free_host_bytes() -> int:
    """Bytes of the host's memory that could be allocated now, within the limit of a container."""
    return min(psutil.virtual_memory().available, host_bytes())


def is_out_of_memory(fault: BaseException) -> bool:
    """True if a run failed for want of memory. Libraries, and the allocator of a CPU, only say so in words."""
    if isinstance(fault, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(fault, RuntimeError) and any(words in str(fault) for words in _OUT_OF_MEMORY)


def forget_frames(fault: BaseException | None) -> None:
    """Clear the local variables of all frames that a fault, and the faults before it, passed through."""
    while fault is not None:
        traceback.clear_frames(fault.__traceback__)
        fault = fault.__cause__ or fault.__context__


def resolve(wanted: str) -> torch.device:
    """The torch device that a setting names. Raises ValueError where there is none."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() and torch.version.hip is None else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"device {wanted!r} is not known; expected auto, cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device {wanted!r} is not supported; expected auto, cpu, cuda or cuda:N")
    index = device.index or 0
    if torch.version.hip is not None:
        raise ValueError(f"device {wanted!r} is not supported by this build of torch; only GPUs of NVIDIA are")
    if index >= torch.cuda.device_count():
        raise ValueError(f"device {wanted!r} is not there; {_why_not()}")
    device_capability = torch.cuda.get_device_capability(index)
    if device_capability < (least := _least_capability()):
        capability, needed = (".".join(map(str, version)) for version in (device_capability, least))
        raise ValueError(
            f"device {wanted!r} has compute capability {capability}, and this build of torch has code from {needed} "
            "on; deploy/README.md says how to take another build"
        )
    return torch.device("cuda", index)


def _least_capability() -> tuple[int, int]:
    """Return the compute capability from which on PyTorch has code: 7.5 (Turing) in builds for CUDA 13."""
    names = (name.removeprefix("sm_").rstrip("af") for name in torch.cuda.get_arch_list() if name.startswith("sm_"))
    return min((divmod(int(name), 10) for name in names), default=(0, 0))


def _why_not() -> str:
    """Return the reason for which there are too few GPUs."""
    if torch.version.cuda is None:
        return "this build of torch is for CPUs; deploy/README.md says which others there are"
    count = torch.cuda.device_count()
    if count:
        return f"this machine has {count} CUDA devices"
    return (
        f"PyTorch finds no GPU. Its build for CUDA {torch.version.cuda} needs an NVIDIA driver that knows this version "
        "(580 for CUDA 13), and in a container the NVIDIA container toolkit"
    )


def _bound_compiled_code() -> None:
    """Keep what is compiled for shapes within bounds, unless the surroundings say how many. Of use before the first."""
    names, most = _COMPILED
    for name in names:
        os.environ.setdefault(name, most)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _processor() -> str:
    """The model of the processor, where the system tells."""
    with suppress(OSError):
        for line in _PROCESSORS.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_bytes()


def host_bytes() -> int:
    """Bytes of the host's memory, within the limit of a container."""
    total = psutil.virtual_memory().total
    for limit in _CGROUP_LIMITS:  # a container sees the whole machine's memory, but is killed at its own limit
        if limit.exists() and (text := limit.read_text().strip()).isdecimal():
            total = min(total, int(text))
    return total


def warm_up(device: Device) -> None:
    """Compute something of each kind, so that the first request does not pay for threads and code being loaded."""
    for kernel in (entry.make() for entry in KERNELS):
        if not kernel.automatic:
            continue
        x = torch.rand(1, 64, 64, device=device.torch, requires_grad=True)
        q = (x @ x).reshape(1, 4, 16, 64)
        attend(Problem(q, q, q), kernel=kernel).context.sum().backward()  # type: ignore[no-untyped-call]
    device.synchronize()


def measure_rates(device: torch.device) -> Rates:
    """The rates of matrix products, of a copy, and the cost of the smallest attention, measured now.

    On a GPU, also those of products in other dtypes, of an upload as requests make it, and of one launch.
    """
    on_gpu = device.type == "cuda"
    side, size = (4096, 2**28) if on_gpu else (512, 2**24)
    big, other = torch.empty(2, size, dtype=torch.uint8, device=device)
    tiny = Problem(*torch.rand(3, 1, 1, 8, 8, device=device))
    product = _product_flops(side, torch.float32, device)
    copy = _median_seconds(lambda: other.copy_(big), device)
    start = _median_seconds(lambda: attend(tiny), device)
    rates = Rates(product, bytes_per_s=2 * big.nbytes / copy, overhead_s=start)
    if not on_gpu:
        # Weights times values: larger products of half types are slower without instructions.
        weights, values = torch.rand(4, 256, 256).bfloat16(), torch.rand(4, 256, 64).bfloat16()
        half = 2 * weights.numel() * 64 / _median_seconds(lambda: weights @ values, device)
        return replace(rates, half_flops_per_s=_HALF_ON_A_CPU * half, double_flops_per_s=product / 3)
    host, small = torch.empty(2**24, dtype=torch.uint8), torch.zeros(16, device=device)
    half_type = torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= _AMPERE else torch.float16
    launches = _median_seconds(lambda: [small.add_(1) for _ in range(_LAUNCHES)], device)
    return replace(
        rates,
        half_flops_per_s=_product_flops(side, half_type, device),
        double_flops_per_s=_product_flops(side // 2, torch.float64, device),
        link_bytes_per_s=host.nbytes / _median_seconds(lambda: to_device(host, device), device),
        operation=launches / _LAUNCHES / start,
    )


def _product_flops(side: int, dtype: torch.dtype, device: torch.device) -> float:
    a = torch.rand(side, side, device=device).to(dtype)
    return 2 * side**3 / _median_seconds(lambda: a @ a, device)


def _median_seconds(work: Callable[[], object], device: torch.device) -> float:
    # On a CPU the processor's time, which other load does not lengthen.
    now, times = time.perf_counter if device.type == "cuda" else time.thread_time, []
    for _ in range(6):  # the first warms up
        started = now()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(now() - started)
    return median(times[1:])
