"""Every other operation on a GPU: no devices mixed, no blocking uploads, no more memory than planned, few waits."""

import numpy as np
import pytest

from attention_contract.schemas import gradients, weights
from attention_contract.schemas.analyses import attribution as attributions
from attention_contract.schemas.analyses import circuits as circuit_searches
from attention_contract.schemas.analyses import effects as sweeps
from attention_contract.schemas.analyses import hopfield, rollout, similarity
from attention_service.runtime.operations import attribution, circuits, effects, kept_backward
from attention_service.runtime.operations import gradients as gradients_operation
from attention_service.runtime.operations import hopfield as retrieval
from attention_service.runtime.operations import rollout as rolling
from attention_service.runtime.operations import similarity as comparison
from attention_service.runtime.operations import weights as inspection

FREE_BYTES = 2**62
SPEC = {"masks": [{"name": "causal"}], "position": {"name": "rope"}}
QUERY = np.ones((2, 9, 64), np.float32)
ONES = np.ones((4, 16, 16), np.float32)


def of_module(prepare, request, **more):
    return lambda module, device: prepare(module, request.model_validate({"query": QUERY} | more), device, FREE_BYTES)


OPERATIONS = {
    "gradients": of_module(gradients_operation.prepare, gradients.GradientsRequest, wrt=["query", "parameters"]),
    "gradients of taps": of_module(gradients_operation.prepare, gradients.GradientsRequest, wrt=["weights", "scores"]),
    "gradients of a mask": of_module(
        gradients_operation.prepare, gradients.GradientsRequest, wrt=["mask"], mask=np.ones((9, 9), np.float32)
    ),
    "weights": of_module(inspection.prepare, weights.WeightsRequest, top_k=3),
    "statistics of tokens": of_module(
        inspection.prepare, weights.WeightsRequest, statistics=["induction"], statistic_options={"tokens": np.arange(9)}
    ),
    "pooled weights": of_module(inspection.prepare, weights.WeightsRequest, pool=4, return_weights=False),
    "effects": of_module(effects.prepare, sweeps.EffectsRequest, sweep={"tap": "weights", "over": ["heads"], "set": 0}),
    "attribution": of_module(
        attribution.prepare, attributions.AttributionRequest, methods=["gradient_attention", "integrated"], steps=4
    ),
    "kept pass": of_module(kept_backward.prepare, gradients.PassRequest),
}
LOOKED_AT = {
    "checked gradients": of_module(gradients_operation.prepare, gradients.GradientsRequest, wrt=["query"], check=True),
    "hopfield": lambda module, device: retrieval.prepare(
        hopfield.HopfieldRequest(stored=ONES[None, :2, :8], states=ONES[None, :2, :3]), device
    ),
    "similarity": lambda module, device: comparison.prepare(
        similarity.SimilarityRequest(a=ONES, measure="cka"), device
    ),
    "rollout": lambda module, device: rolling.prepare(rollout.RolloutRequest(weights=ONES[None]), device),
    "circuits": lambda module, device: circuits.prepare(module, None, circuit_searches.CircuitsRequest(), device),
}
"""Operations that read numbers on their way."""


def counted(cuda, make, dtype):
    module = cuda.module(dtype, d_model=64, num_heads=4, num_kv_heads=2, spec=SPEC)
    device = cuda.device()
    job = make(module, device)
    counts = cuda.run(job, device, scalar=1.0)[1]
    assert not counts.mixed
    assert counts.launches
    assert counts.peak <= job.plan.peak_bytes
    return counts


CASES = {name: (make, "bfloat16") for name, make in OPERATIONS.items()} | {
    f"{name}, float32": (OPERATIONS[name], "float32") for name in ("gradients", "weights")
}


@pytest.mark.parametrize(("make", "dtype"), CASES.values(), ids=CASES)
@pytest.mark.slow
def test_an_operation_waits_once(cuda, make, dtype):
    counts = counted(cuda, make, dtype)
    assert len(counts.waits) == 1
    assert not counts.blocking_uploads


@pytest.mark.parametrize("make", LOOKED_AT.values(), ids=LOOKED_AT)
@pytest.mark.slow
def test_an_operation_that_reads_numbers_keeps_devices_apart(cuda, make):
    counted(cuda, make, "float32")
