"""The device that a setting names, on machines that this one is not: what is refused, and why."""

import pytest
import torch

from attention_service.runtime.device.torch_device import resolve


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
