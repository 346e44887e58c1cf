"""The device that a setting names, on machines that this one is not: what is refused, and why."""

from contextlib import contextmanager

import pytest
import torch

from attention_service.core.kernels.fused import cuda_attention
from attention_service.cost import Rates
from attention_service.runtime.device import torch_device
from attention_service.runtime.device.torch_device import Device, resolve


@pytest.fixture
def machine(monkeypatch):
    """Make PyTorch tell of other GPUs, by their compute capabilities, and of another build of its own."""

    def of(*capabilities, cuda="13.0", hip=None, code=("sm_75", "sm_80", "sm_90a", "compute_120")):
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(code))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)

    return of


def test_a_gpu_is_taken(machine):
    machine((7, 5), (9, 0))
    assert resolve("auto") == resolve("cuda") == torch.device("cuda", 0)
    assert resolve("cuda:1") == torch.device("cuda", 1)


def test_without_a_driver_cuda_is_an_error_that_says_what_to_look_at_and_auto_is_the_cpu(machine):
    machine()
    with pytest.raises(ValueError, match=r"PyTorch finds no GPU.*580 for CUDA 13.*NVIDIA container toolkit"):
        resolve("cuda")
    assert resolve("auto") == torch.device("cpu")


def test_a_build_for_cpus_is_named(machine):
    machine(cuda=None)
    with pytest.raises(ValueError, match="this build of torch is for CPUs"):
        resolve("cuda")


def test_a_gpu_that_there_is_not(machine):
    machine((9, 0))
    with pytest.raises(ValueError, match="this machine has 1 CUDA devices"):
        resolve("cuda:1")


def test_a_gpu_for_which_the_build_has_no_code_is_refused(machine):
    machine((7, 0))
    for wanted in ("cuda", "auto"):
        with pytest.raises(ValueError, match=r"compute capability 7\.0, and this build of torch has code from 7\.5 on"):
            resolve(wanted)
    machine((7, 0), cuda="12.6", code=("sm_50", "sm_70", "sm_120"))
    assert resolve("cuda") == torch.device("cuda", 0)


def test_only_gpus_of_nvidia(machine):
    machine((9, 4), cuda=None, hip="7.0")
    with pytest.raises(ValueError, match="only GPUs of NVIDIA"):
        resolve("cuda")
    assert resolve("auto") == torch.device("cpu")


def test_kernels_are_chosen_for_the_gpu_that_is_opened_on_every_thread(machine, monkeypatch):
    machine((7, 5), (9, 0))
    capability, current = torch.cuda.get_device_capability, [0]

    @contextmanager
    def at(device):
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", at)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability(index or current[-1]))
    for name, found in {"measure_rates": Rates(1e13, 1e12, 1e-5), "_name": "GPU", "_total_bytes": 2**34}.items():
        monkeypatch.setattr(torch_device, name, lambda _, found=found: found)
    flags = [(of, of.allow_tf32) for of in (torch.backends.cuda.matmul, torch.backends.cudnn)]
    cuda_attention.generation.cache_clear()
    try:
        Device.open("cuda:1")
        assert cuda_attention.generation() == 9, "that of the thread's current device is 7"
    finally:
        cuda_attention.generation.cache_clear()
        for of, flag in flags:
            of.allow_tf32 = flag
