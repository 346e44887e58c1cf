"""A forward pass on a GPU: what it makes the GPU and the host do."""

import numpy as np

from attention_contract.schemas.attention import ForwardRequest
from attention_service.runtime.operations import forward
from tests.fake_cuda.machine import Machine


def _forward(cuda: Machine, module, shape, **more):
    request = ForwardRequest.model_validate({"query": np.zeros(shape, np.float32)} | more)
    device = cuda.device()
    return cuda.run(forward.prepare(module, request, device, 2**62), device)


def test_a_small_pass_copies_up_once_and_down_once(cuda):
    module = cuda.module(d_model=64, num_heads=4)
    _forward(cuda, module, (1, 16, 64))  # kernels are compared once
    fields, counts = _forward(cuda, module, (1, 16, 64))
    assert fields["output"].shape == (1, 16, 64)
    assert [each.blocking for each in counts.uploads] == [False]
    assert [each.blocking for each in counts.downloads] == [False]
    assert counts.launches.total() <= 8
    assert len(counts.waits) <= 2
    assert not counts.mixed
