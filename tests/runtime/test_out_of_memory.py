"""Memory that runs out on a real GPU: the request at fault fails alone, and the device goes on."""

import asyncio

import numpy as np
import pytest
import torch

from attention_contract.errors import NeverFits
from attention_contract.schemas.attention import RawForwardRequest
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.runtime.device.torch_device import Device

SMALL = RawForwardRequest(query=np.random.default_rng(0).standard_normal((1, 2, 8, 16)).astype(np.float32))
LARGE = RawForwardRequest(query=np.zeros((8, 8, 2048, 64), np.float32), return_=["weights"])
"""Its weights take 1 GiB."""


@pytest.mark.gpu
async def test_a_request_beyond_the_gpu_fails_alone(tmp_path):
    device = Device.open("cuda")
    engine = Engine(tmp_path, device, EngineSettings(memory_budget=2**33))  # more than the process may take
    await engine.start()
    expected = (await engine.forward(None, SMALL)).output
    torch.cuda.set_per_process_memory_fraction(2**29 / device.total_bytes)
    try:
        for _ in range(2):
            asks = [engine.forward(None, each) for each in (SMALL, LARGE, SMALL)]
            first, large, last = await asyncio.gather(*asks, return_exceptions=True)
            assert isinstance(large, NeverFits), large
            for reply in (first, last):
                np.testing.assert_allclose(reply.output, expected, rtol=1e-5, atol=1e-6)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    engine.runner.check_live()
    assert engine.budget.in_flight == 0
    await engine.stop()
