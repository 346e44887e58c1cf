"""Plans of circuits and similarities: memory is bounded before it is allocated, long work is refused or stopped."""

import numpy as np
import pytest
import torch
from tests.cost.peaks import peaks

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.circuits import CircuitsRequest
from attention_contract.schemas.analyses.similarity import SimilarityRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_service.core.cancellation import Abandoned, Cancellation, cancellable
from attention_service.core.multihead import Sizes, initial_parameters, parameter_shapes
from attention_service.cost import Rates, Roofline, SimilarityWork
from attention_service.modules.resident import Module, complete
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import similarity
from attention_service.runtime.operations.circuits import prepare

DEVICE = Device(torch.device("cpu"), "a cpu", 2**40, Roofline(Rates(1e11, 1e10, 3e-5)))


def module(**config):
    made = complete(ModuleConfig(**{"d_model": 96, "num_heads": 4, **config}))
    sizes = Sizes.of(made)
    return Module("a", made, sizes, initial_parameters(sizes, 0, torch.float32), "v")


CASES = {
    "everything": ({}, {}, False),
    "vectors": ({"num_kv_heads": 2}, {"vectors": True, "parts": ["qk", "ov"]}, False),
    "one head": ({"spec": {"score": {"name": "bilinear"}}}, {"heads": [1], "vectors": True, "parts": ["qk"]}, False),
    "composition": ({"num_kv_heads": 1}, {"parts": ["ov"]}, True),
    "a spectrum alone": ({"d_model": 160}, {"parts": ["spectra"]}, False),
}
COMPARED = {
    "heads of one model": ((8, 40, 100), None, "jensen_shannon"),
    "heads of two models": ((8, 40, 100), (3, 40, 100), "jensen_shannon"),
    "many tiles": ((2, 9, 200_000), None, "jensen_shannon"),
    "features": ((4, 200, 64), (4, 200, 20), "cka"),
    "wide features": ((2, 64, 2100), None, "cka"),
}


@pytest.mark.slow  # the profiler takes a second
def test_the_plan_bounds_what_is_held():
    jobs = {}
    for name, (config, fields, composed) in CASES.items():
        of = module(**config)
        jobs[name] = prepare(of, of if composed else None, CircuitsRequest(**fields), DEVICE)
    for name, (shape, others, measure) in COMPARED.items():
        a, b = (None if each is None else np.ones(each, np.float32) for each in (shape, others))
        jobs[name] = similarity.prepare(SimilarityRequest(a=a, b=b, measure=measure), DEVICE)
    held = peaks([job.run for job in jobs.values()])
    for (name, job), most in zip(jobs.items(), held, strict=True):
        assert most <= job.plan.peak_bytes <= 5 * most, name


def test_more_work_is_predicted_to_take_longer():
    small, large = (prepare(module(d_model=width), None, CircuitsRequest(), DEVICE).plan for width in (96, 192))
    assert large.flops > 4 * small.flops
    assert large.predicted.median > small.predicted.median > 0


def test_a_decomposition_that_nothing_could_stop_is_refused():
    config = complete(ModuleConfig(d_model=8192, num_heads=64))
    shapes = parameter_shapes(Sizes.of(config))
    parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    wide = Module("a", config, Sizes.of(config), parameters, "v")
    with pytest.raises(InvalidRequest, match=r"q_proj.weight \[8192, 8192\] is too large") as refused:
        prepare(wide, None, CircuitsRequest(), DEVICE)
    assert refused.value.param == "parts"
    assert prepare(wide, None, CircuitsRequest(parts=["qk", "ov"]), DEVICE).plan.flops > 0


def test_long_sequences_are_compared_within_little_memory():
    heads = (32_768,) * 12
    assert SimilarityWork(32_768, heads, heads, features=False, same=True).peak_bytes < 2**25
    assert SimilarityWork(32_768, (64,) * 144, (64,) * 144, features=True, same=True).peak_bytes < 2**28


@pytest.mark.parametrize("operation", ["circuits", "jensen_shannon", "cka"])
def test_work_that_nobody_waits_for_stops_at_the_next_head(operation):
    if operation == "circuits":
        job = prepare(module(), None, CircuitsRequest(), DEVICE)
    else:
        job = similarity.prepare(SimilarityRequest(a=np.ones((2, 3, 4)), measure=operation), DEVICE)
    cancellation = Cancellation()
    cancellation.cancel()
    with cancellable(cancellation), pytest.raises(Abandoned):
        job.run()
