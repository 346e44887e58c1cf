"""Memory of a real GPU: no pass of PyTorch's fused kernels holds more than its plan, their workspace too."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.spec import AttentionSpec, Causal, SlidingWindow
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import forward, gradients

CAUSAL = AttentionSpec(masks=[Causal()])
WINDOW = AttentionSpec(masks=[Causal(), SlidingWindow(left=511)])
CASES = {
    "causal": ((1, 16, 2048, 128), None, CAUSAL),
    "few queries, whose keys are split": ((2, 4, 1024, 64), None, AttentionSpec()),
    "one head": ((1, 1, 8192, 64), None, CAUSAL),
    "grouped": ((1, 16, 2048, 128), 4, CAUSAL),
    "narrow": ((1, 8, 2048, 100), None, CAUSAL),
    "a width between those of flash": ((1, 8, 2048, 136), None, CAUSAL),
    "a wider one": ((1, 4, 2048, 200), None, CAUSAL),
    "window": ((1, 8, 4096, 64), None, WINDOW),
    "wide": ((1, 2, 1024, 300), None, AttentionSpec()),
}


@pytest.mark.gpu
@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize(("shape", "kv_heads", "spec"), CASES.values(), ids=CASES)
def test_no_pass_holds_more_than_its_plan(shape, kv_heads, spec, dtype, differentiated):
    device, rng = Device.open("cuda"), np.random.default_rng(0)
    tensors = {"query": rng.standard_normal(shape, np.float32).astype(dtype)}
    if kv_heads is not None:
        fewer = (shape[0], kv_heads, *shape[2:])
        tensors |= {name: rng.standard_normal(fewer, np.float32).astype(dtype) for name in ("key", "value")}
    if differentiated:
        job = gradients.prepare(None, RawGradientsRequest(**tensors, spec=spec, wrt=[*tensors]), device, 2**40)
    else:
        job = forward.prepare(None, RawForwardRequest(**tensors, spec=spec), device, 2**40)
    assert job.plan.kernel == "fused"
    for _ in range(2):
        meter = device.peak_meter()
        job.run()
        assert meter() <= job.plan.peak_bytes
