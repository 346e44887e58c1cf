"""A GPU that is not there: an H100 to plan for, modules on it, and passes that are counted."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from attention_contract.schemas.modules import ModuleConfig
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.cost import Rates, Roofline
from attention_service.modules.resident import Module, complete
from attention_service.runtime.device.cuda_graphs import Graphs
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.scheduling.jobs import Job
from attention_service.runtime.scheduling.passes import run_alone
from tests.fake_cuda.counting import Counts
from tests.fake_cuda.device_guard import fake_device
from tests.fake_cuda.modes import DeviceSide, HostSide

CUDA = torch.device("cuda:0")
BYTES = 80 * 2**30
H100 = Rates(flops_per_s=5e13, bytes_per_s=2.6e12, overhead_s=1.2e-4, link_bytes_per_s=8e9)


class Machine:
    """One fake GPU."""

    def __init__(self) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def device(self, *, graphs: Graphs | None = None) -> Device:
        """The device as a server opens it; it captures no graphs unless some are given."""
        device = Device(CUDA, "H100", BYTES, Roofline(H100))
        device.graphs = Graphs(limit=0) if graphs is None else graphs
        return device

    @contextlib.contextmanager
    def counted(self, *, scalar: float = 0.0) -> Iterator[Counts]:
        """Count what the block does. Each number that comes back from the device is ``scalar``."""
        counts = Counts()
        with fake_device(), driver(counts), modes(counts, self.fake, scalar):
            yield counts

    def module(self, dtype: str = "float32", **config: Any) -> Module:
        """A module that is resident on the device."""
        whole = complete(ModuleConfig.model_validate({"dtype": dtype} | config))
        parameters = initial_parameters(Sizes.of(whole), 0, TORCH_DTYPES[dtype])
        with self.counted():
            return Module.of("m", whole, parameters, version="0" * 32).on(CUDA)

    def run(self, job: Job, device: Device, *, scalar: float = 0.0) -> tuple[dict[str, Any], Counts]:
        """The fields of a job's reply, and what its pass did."""
        with self.counted(scalar=scalar) as counts:
            fields, _ = run_alone(job, device.clock, device)
        return fields, counts


@contextlib.contextmanager
def modes(counts: Counts, fake: FakeTensorMode, scalar: float = 0.0) -> Iterator[None]:
    """Count what this thread does, whose tensors on the device are all of one fake mode."""
    with HostSide(), DeviceSide(counts, fake, scalar):
        yield


def _address(storage: torch.UntypedStorage) -> int:
    """A number of the storage's own: a fake one has no memory."""
    return int(storage._cdata)


@contextlib.contextmanager
def driver(counts: Counts) -> Iterator[None]:
    """The functions of ``torch.cuda`` that a pass calls, without a driver."""

    def statistics(device: object = None) -> dict[str, dict[str, dict[str, int]]]:
        counts.statistics += 1
        return {"allocated_bytes": {"all": {"current": 0, "peak": 0}}}

    stream = mock.MagicMock()
    stream.synchronize = lambda: counts.wait("synchronizes its stream")
    functions = {
        "_lazy_init": lambda: None,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "synchronize": lambda device=None: counts.wait("synchronizes the device"),
        "is_current_stream_capturing": lambda: counts.capturing,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats_as_nested_dict": statistics,
    }
    with contextlib.ExitStack() as patched:
        for name, function in functions.items():
            patched.enter_context(mock.patch.object(torch.cuda, name, function))
        patched.enter_context(mock.patch.object(torch.UntypedStorage, "data_ptr", _address))
        # A real one copies all numbers at once.
        patched.enter_context(mock.patch.object(FakeTensor, "tolist", lambda self: self.cpu().tolist()))
        yield
