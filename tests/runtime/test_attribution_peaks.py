"""Attributions and effects against their plans' peak memory, measured by PyTorch's profiler on the CPU."""

import numpy as np
import pytest
import torch
from tests.cost.peaks import peaks
from tools.peak_walk import DEVICE, as_on_a_device

from attention_contract.schemas.analyses.attribution import AttributionRequest
from attention_contract.schemas.analyses.effects import EffectsRequest, RawEffectsRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.modules.resident import Module
from attention_service.runtime.operations import attribution, effects

SLACK = 2**17
METHODS = ["gradient_attention", "integrated", "relevance", "norm", "head_importance"]
EDITS = [{"tap": "weights", "heads": [1], "set": 0.0}, {"tap": "context", "heads": [1], "scale": 2.0}]
READOUT = {"weight": np.ones((300, 32), np.float32), "targets": np.zeros((2, 200), np.int64)}


@pytest.fixture(autouse=True)
def on_a_device():
    with as_on_a_device():
        yield


@pytest.fixture
def module():
    config = ModuleConfig.model_validate({"d_model": 32, "num_heads": 4, "num_kv_heads": 2})
    sizes = Sizes.of(config)
    return Module("m", config, sizes, dict(initial_parameters(sizes, 0, torch.float32)), "v")


def test_the_plan_is_no_less_than_the_memory_held(module, rng):
    query = rng.normal(size=(2, 200, 32)).astype(np.float32)
    requests = [
        *({"methods": [method]} for method in METHODS), {"methods": METHODS},
        {"methods": METHODS, "edits": EDITS, "compare": "unedited"}, {"methods": METHODS, "readout": READOUT},
        {"methods": ["integrated"], "readout": READOUT, "steps": 9},
        {"methods": METHODS, "select": {"heads": [3, 0], "queries": [5, 6]}},
    ]  # fmt: skip
    jobs = [
        attribution.prepare(module, AttributionRequest.model_validate({"query": query, **each}), DEVICE.exact(), 2**40)
        for each in requests
    ]
    for each, job, held in zip(requests, jobs, peaks([job.run for job in jobs]), strict=True):
        assert 0.98 * held <= job.plan.peak_bytes <= 1.02 * held + SLACK, each


SWEEPS = [
    {"tap": "context", "set": 0}, {"tap": "weights", "set": 0}, {"tap": "scores", "scale": 0.5, "over": ["queries"]},
    {"tap": "k", "set": 0, "over": ["heads", "keys"]}, {"tap": "v", "scale": 2.0, "heads": [1, 0]},
    {"tap": "masked_scores", "set": 0, "over": ["heads", "queries"], "queries": [3, 4]},
]  # fmt: skip


@pytest.mark.parametrize(
    "more", [pytest.param({}, marks=pytest.mark.slow), {"return_differences": True}, {"queries": [0, 7]}]
)
def test_the_plan_of_a_sweep_is_no_less_than_the_memory_held(module, rng, more):
    query = rng.normal(size=(2, 200, 32)).astype(np.float32)
    requests = [{"query": query, "sweep": sweep, **more} for sweep in (SWEEPS[:2] if more else SWEEPS)]
    jobs = [effects.prepare(module, EffectsRequest.model_validate(each), DEVICE.exact(), 2**40) for each in requests]
    raw = {"query": query, "num_heads": 4, "sweep": SWEEPS[0], "spec": {"masks": [{"name": "causal"}]}, **more}
    jobs.append(effects.prepare(None, RawEffectsRequest.model_validate(raw), DEVICE.exact(), 2**40))
    for each, job, held in zip([*requests, raw], jobs, peaks([job.run for job in jobs]), strict=True):
        assert 0.98 * held <= job.plan.peak_bytes <= 1.05 * held + SLACK, each["sweep"]


def test_the_edits_of_a_sweep_are_counted_whichever_are_rehearsed(rng):
    raw = {"query": rng.normal(size=(1, 16, 64, 8)).astype(np.float32), "sweep": {"tap": "weights", "set": 0}}
    whole = effects.prepare(None, RawEffectsRequest.model_validate(raw), DEVICE.exact(), 2**40).plan
    half = raw | {"sweep": raw["sweep"] | {"heads": [*range(8)]}}
    less = effects.prepare(None, RawEffectsRequest.model_validate(half), DEVICE.exact(), 2**40).plan
    none = effects.prepare(
        None, RawEffectsRequest.model_validate(raw | {"sweep": raw["sweep"] | {"heads": [0]}}), DEVICE.exact(), 2**40
    ).plan
    assert whole.flops - less.flops == pytest.approx(less.flops - none.flops, rel=0.2)
    assert whole.predicted.median - less.predicted.median == pytest.approx(
        less.predicted.median - none.predicted.median, rel=0.3
    )
