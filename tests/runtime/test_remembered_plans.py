"""Requests that differ in their numbers alone share a plan, and never their numbers or their module."""

import gc
import weakref
from itertools import product

import numpy as np
import pytest
from tests.conftest import asker

from attention_contract.errors import ShapeMismatch
from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.modules import CreateModule
from attention_contract.schemas.weights import WeightsRequest
from attention_contract.wire import JSON, SAFETENSORS, from_body, to_body
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.runtime.device.plan_cache import PlanCache
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.forward import prepare

WIDTH, HEADS = 8, 2
MODELS = {"forward": ForwardRequest, "weights": WeightsRequest, "gradients": GradientsRequest}
EXTRAS = {
    "plain": lambda rng: {},
    "one sequence": lambda rng: {"query": rng.standard_normal((3, WIDTH), np.float32)},
    "cross": lambda rng: {"key": rng.standard_normal((2, 5, WIDTH), np.float32)},
    "mask": lambda rng: {"mask": rng.random((3, 3)) < 0.7},
    "bias": lambda rng: {"mask": rng.standard_normal((3, 3)).astype(np.float32)},
    "padding": lambda rng: {"key_mask": rng.random((2, 3)) < 0.7},
    "lengths": lambda rng: {"key_lengths": rng.integers(1, 4, 2)},
    "past": lambda rng: {
        "past_key": rng.standard_normal((2, HEADS, 4, WIDTH // HEADS), np.float32),
        "past_value": rng.standard_normal((2, HEADS, 4, WIDTH // HEADS), np.float32),
    },
    "upstream": lambda rng: {"upstream": rng.standard_normal((2, 3, WIDTH), np.float32)},
    "query mask": lambda rng: {"query_mask": rng.random((2, 3)) < 0.7},
}


@pytest.fixture
async def engine(tmp_path):
    """An engine with the module ``m``."""
    engine = Engine(tmp_path, Device.open("cpu"), EngineSettings(memory_budget=2**30))
    await engine.start()
    await engine.modules.create(CreateModule(name="m", config={"d_model": WIDTH, "num_heads": HEADS}))
    yield engine
    await engine.stop()


def read(model, request, media_type=SAFETENSORS):
    """A request as the server reads it."""
    body = b"".join(to_body(request, media_type, "request"))
    return from_body(model, memoryview(body), media_type, "request")


def tensors(value):
    values = dict(value) if not isinstance(value, dict) else value
    for name, each in values.items():
        if isinstance(each, np.ndarray):
            yield name, each
        elif hasattr(each, "__dict__") or isinstance(each, dict):
            yield from ((f"{name}.{inner}", x) for inner, x in tensors(each))


def same(found, expected, extra=""):
    found, expected = dict(tensors(found)), dict(tensors(expected))
    assert found.keys() == expected.keys()
    assert found
    for name, x in expected.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x, err_msg=f"{name} {extra}")


@pytest.mark.parametrize("question", MODELS)
@pytest.mark.slow
async def test_requests_alike_are_answered_by_their_own_numbers(engine, rng, question):
    model = MODELS[question]
    taken = [extra for extra in EXTRAS if EXTRAS[extra](rng).keys() <= model.model_fields.keys()]
    assert len(taken) > 7
    for extra, media_type in product(taken, [SAFETENSORS, JSON]):
        engine.device.plans = plans = PlanCache()
        for _ in range(3):
            original = model(**{"query": rng.standard_normal((2, 3, WIDTH), np.float32)} | EXTRAS[extra](rng))
            request = read(model, original, media_type)
            found = await asker(engine, question)("m", request)
            engine.device.plans = PlanCache()
            same(found, await asker(engine, question)("m", request), extra)
            engine.device.plans = plans


async def test_lists_keep_the_dtype_of_the_module(engine):
    await engine.modules.create(CreateModule(name="wide", config={"d_model": 2, "num_heads": 1, "dtype": "float64"}))
    for number in (0.5, 1.5):
        body = b'{"query": [[%f, 2.5]]}' % number
        request = from_body(ForwardRequest, body, JSON, "request")
        assert (await engine.forward("wide", request)).output.dtype == np.float64


async def test_a_wrong_shape_is_refused_each_time(engine):
    for _ in range(2):
        request = read(ForwardRequest, ForwardRequest(query=np.zeros((1, 3, WIDTH + 1), np.float32)))
        with pytest.raises(ShapeMismatch, match="query"):
            await engine.forward("m", request)


async def test_neither_a_deleted_module_nor_a_body_stays_in_memory(engine):
    request = read(ForwardRequest, ForwardRequest(query=np.ones((1, 3, WIDTH), np.float32)))
    await engine.forward("m", request)
    module, query = weakref.ref(engine.library.get("m")), weakref.ref(request.query)
    await engine.modules.delete("m")
    engine.predictions.settle()
    del request
    gc.collect()
    assert module() is None
    assert query() is None


async def test_raw_requests_differ_by_their_spec(engine, rng):
    query = rng.standard_normal((1, 1, 4, 2), np.float32)
    found = []
    for masks in ([], [{"name": "causal"}], []):
        request = read(RawForwardRequest, RawForwardRequest(query=query, spec={"masks": masks}))
        found.append(await engine.forward(None, request))
    same(found[2], found[0])
    assert not np.array_equal(found[0].output, found[1].output)


async def test_requests_that_differ_in_an_option_have_plans_of_their_own(engine):
    query = np.ones((1, 3, WIDTH), np.float32)
    kinds = {}
    for extra in (
        {},
        {"kernel": "materialized"},
        {"return_": ["output", "weights"]},
        {"return_": ["weights"], "average_heads": True},
    ):
        for _ in range(2):
            request = read(ForwardRequest, ForwardRequest(query=query, **extra))
            job = prepare(engine.library.get("m"), request, engine.device, 2**30)
            kinds.setdefault(repr(extra), set()).add(id(job.prepared))
    assert all(len(each) == 1 for each in kinds.values()), kinds
    assert len(set.union(*kinds.values())) == len(kinds)
