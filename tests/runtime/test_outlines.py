"""Plain requests of a module are bound and planned once: what is looked up later is what would be made anew."""

import gc
import weakref
from dataclasses import fields

import numpy as np
import pytest
import torch

from attention_contract.errors import InvalidRequest, ShapeMismatch
from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest, Select
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.tensors import Untyped
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.cost import Rates, Roofline
from attention_service.modules.resident import Module, complete
from attention_service.runtime.device import Device
from attention_service.runtime.operations import forward

ROOM = 2**40


def module(seed=0):
    config = complete(ModuleConfig(d_model=8, num_heads=2))
    return Module.of("m", config, initial_parameters(Sizes.of(config), seed, torch.float32))


@pytest.fixture
def device():
    return Device(torch.device("cpu"), "test", 2**34, Roofline(Rates(1e11, 1e10, 1e-5)))


@pytest.fixture
def bound(monkeypatch):
    """Which requests were bound."""
    seen, real = [], forward.bind
    monkeypatch.setattr(forward, "bind", lambda *given: seen.append(given) or real(*given))
    return seen


def numbers(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("shape", [(2, 5, 8), (5, 8)])
def test_what_is_looked_up_is_what_would_be_made_anew(device, bound, rng, shape):
    here = module()
    for _ in range(3):
        request = ForwardRequest(query=numbers(rng, *shape), key=numbers(rng, *shape), edits=[], mask=None)
        job = forward.prepare(here, request, device, ROOM)
        anew = forward.prepare(here, request, Device(device.torch, "test", 2**34, device.clock), ROOM)
        for name in (each.name for each in fields(job.part.bound) if each.name != "arrays"):
            assert getattr(job.part.bound, name) == getattr(anew.part.bound, name)
        assert (job.plan, job.dtype, job.watched, job.module) == (anew.plan, anew.dtype, anew.watched, here)
        np.testing.assert_array_equal(job.run()["output"], anew.run()["output"])
    assert len(bound) == 3 + 1


def test_whatever_bears_on_more_than_numbers_is_looked_at_anew(device, bound, rng):
    here, x = module(), numbers(rng, 2, 5, 8)
    forward.prepare(here, ForwardRequest(query=x), device, ROOM)
    others = [
        {"query": x[:1]},
        {"query": x[0]},
        {"query": x.astype(np.float64)},
        {"query": x.astype(np.float64).view(Untyped)},
        {"key": x},
        {"value": x},
        {"return": ["context"]},
        {"kernel": "materialized"},
        {"return": ["weights"], "average_heads": True},
    ]
    for count, more in enumerate(others, 2):
        for _ in range(2):
            forward.prepare(here, ForwardRequest(**{"query": x} | more), device, ROOM)
        assert len(bound) == count, more
    for more in ({"select": Select(heads=[0])}, {"key_lengths": np.array([3, 4])}, {"offsets": np.array(2)}):
        before = len(bound)
        for _ in range(2):
            forward.prepare(here, ForwardRequest(query=x, **more), device, ROOM)
        assert len(bound) == before + 2, more


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (3, 5, 4), (5, 4)])
@pytest.mark.parametrize("spec", [{}, {"masks": [{"name": "sliding_window", "left": 2}], "score": {"name": "cosine"}}])
def test_raw_attention_is_looked_up_by_its_spec(device, bound, rng, shape, spec):
    for _ in range(3):
        request = RawForwardRequest(query=numbers(rng, *shape), key=numbers(rng, *shape), spec=spec)
        job = forward.prepare(None, request, device, ROOM)
        anew = forward.prepare(None, request, Device(device.torch, "test", 2**34, device.clock), ROOM)
        for name in (each.name for each in fields(job.part.bound) if each.name != "arrays"):
            assert getattr(job.part.bound, name) == getattr(anew.part.bound, name)
        assert (job.plan, job.dtype, job.watched) == (anew.plan, anew.dtype, anew.watched)
        np.testing.assert_array_equal(job.run()["output"], anew.run()["output"])
    assert len(bound) == 3 + 1


def test_whatever_bears_on_more_than_numbers_of_raw_attention_is_looked_at_anew(device, bound, rng):
    x = numbers(rng, 2, 5, 8)
    others = [
        {},
        {"query": x[:1]},
        {"num_heads": 2},
        {"num_heads": 4},
        {"num_heads": 2, "num_kv_heads": 1, "key": x[..., :4], "value": x[..., :4]},
        {"spec": {"masks": [{"name": "causal"}]}},
        {"spec": {"normalizer": {"name": "softmax", "temperature": 2.0}}},
        {"return": ["context"]},
    ]
    for count, more in enumerate(others, 1):
        for _ in range(2):
            forward.prepare(None, RawForwardRequest(**{"query": x} | more), device, ROOM)
        assert len(bound) == count, more
    biased = {"spec": {"add_bias_kv": True}, "parameters": {name: np.ones(16) for name in ("bias_k", "bias_v")}}
    for more in ({"key_lengths": np.array(3)}, biased):
        before = len(bound)
        for _ in range(2):
            forward.prepare(None, RawForwardRequest(query=x, **more), device, ROOM)
        assert len(bound) == before + 2, more
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="version"):
            forward.prepare(None, RawForwardRequest(query=x, version="1"), device, ROOM)


def test_other_parameters_are_those_that_are_computed_with(device, rng):
    request = ForwardRequest(query=numbers(rng, 2, 5, 8))
    first, second = (forward.prepare(module(seed), request, device, ROOM).run()["output"] for seed in (0, 1))
    assert not np.allclose(first, second)


def test_nothing_of_a_request_or_its_module_is_kept(device, rng):
    here, x = module(), numbers(rng, 2, 5, 8)
    gone = [weakref.ref(here), weakref.ref(x)]
    forward.prepare(here, ForwardRequest(query=x), device, ROOM).run()
    assert len(device.plans) > 0
    del here, x
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_a_refusal_is_not_remembered(device, bound, rng):
    for _ in range(2):
        with pytest.raises(ShapeMismatch):
            forward.prepare(module(), ForwardRequest(query=numbers(rng, 2, 5, 7)), device, ROOM)
    assert len(bound) == 2
    assert len(device.plans) == 0
