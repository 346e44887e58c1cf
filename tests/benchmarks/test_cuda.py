"""The benchmark of a GPU runs, here on a CPU and over short sequences, and ends where there is no GPU."""

import sys

import pytest
import torch

from attention_service.runtime.device.torch_device import Device
from benchmarks import cuda


@pytest.mark.slow
def test_every_table_is_made():
    text = "\n".join(cuda.tables(Device.open("cpu"), [8, 64], 1000, 3))
    assert text.count("## ") == 4
    assert "| 64 |" in text
    assert "1000 tokens in one request" in text
    assert "graphs on" in text
    assert "copies" in text


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks.cuda"])
    cuda.main()
    assert "no CUDA device" in capsys.readouterr().out
