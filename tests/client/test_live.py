"""Both clients against a real server."""

import asyncio

import ml_dtypes
import numpy as np
import pytest
import torch

from attention_client import AsyncClient, Client, ModuleNotFound, VersionMismatch


@pytest.mark.parametrize("media_type", ["safetensors", "json"])
def test_a_module_lives_its_life(server, rng, media_type):
    name, x = f"client.{media_type}", rng.standard_normal((2, 5, 8)).astype(np.float32)
    with Client(server, media_type=media_type) as client:
        made = client.modules.create(name, {"d_model": 8, "num_heads": 2}, seed=1)
        assert client.modules.get(name) == made
        reply = client.forward(name, x, return_=["output", "weights"])
        assert (reply.output.shape, reply.weights.shape) == ((2, 5, 8), (2, 2, 5, 5))
        by_torch = client.forward(name, torch.from_numpy(x).bfloat16().requires_grad_())
        assert by_torch.output.dtype == ml_dtypes.bfloat16
        by_list = client.forward(name, x.tolist(), version=made.version)
        np.testing.assert_allclose(by_list.output, reply.output, atol=1e-6)

        head = client.modules.parameter(name, "q_proj.weight", head=1)
        assert head.value.shape == (4, 8)
        wrt = ["query", "parameters"]
        gradients = client.gradients(name, x, wrt=wrt, check=True)
        assert all(check.passed for check in gradients.check.values())
        assert client.weights(name, x, top_k=2).top.keys.shape == (2, 2, 5, 2)
        assert len(client.complexity(name, 16, [16, 32], memory_bytes=2**20).costs) == 2

        names = [info.name for info in client.modules.parameters(name).parameters]
        parameters = {one: client.modules.parameter(name, one).value * 2 for one in names}
        replaced = client.modules.replace_parameters(name, parameters, version=made.version)
        with pytest.raises(VersionMismatch):
            client.modules.delete(name, made.version)
        client.modules.delete(name, replaced.version)
        with pytest.raises(ModuleNotFound):
            client.modules.get(name)


async def test_calls_run_side_by_side(server, rng):
    q, k, v = rng.standard_normal((3, 2, 4, 6, 8)).astype(np.float32)
    async with AsyncClient(server) as client:
        spec = {"masks": [{"name": "causal"}]}
        attended, weights, ready, info = await asyncio.gather(
            client.attention.forward(q, k, v, spec=spec),
            client.attention.weights(q, k),
            client.server.ready(),
            client.server.info(),
        )
    assert attended.output.shape == (2, 4, 6, 8)
    assert weights.statistics.entropy.shape == (2, 4)
    assert (ready.status, info.name) == ("ready", "attention-service")
