"""Requests of one outline share their binding and their plan, and never their numbers or their module."""

import asyncio
import gc
import weakref

import numpy as np
import pytest

from attention_contract.errors import ShapeMismatch
from attention_contract.json_reading import measure_text
from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.modules import CreateModule
from attention_contract.schemas.weights import WeightsRequest
from attention_contract.wire import JSON, SAFETENSORS, request_from_body, to_body
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.engine import Engine

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


def play(tmp_path, story):
    async def acts():
        engine = Engine(tmp_path, Device.open("cpu"), 2**30)
        await engine.start()
        await engine.modules.create(CreateModule(name="m", config={"d_model": WIDTH, "num_heads": HEADS}))
        try:
            await story(engine)
        finally:
            await engine.stop()

    asyncio.run(acts())


def tensors(value):
    values = dict(value) if not isinstance(value, dict) else value
    for name, each in values.items():
        if isinstance(each, np.ndarray):
            yield name, each
        elif hasattr(each, "__dict__") or isinstance(each, dict):
            yield from ((f"{name}.{inner}", x) for inner, x in tensors(each))


def same(found, expected):
    found, expected = dict(tensors(found)), dict(tensors(expected))
    assert found.keys() == expected.keys()
    assert found
    for name, x in expected.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x, err_msg=name)


@pytest.mark.parametrize("media_type", [SAFETENSORS, JSON])
@pytest.mark.parametrize("question", MODELS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_requests_of_one_outline_are_answered_by_their_own_numbers(tmp_path, rng, question, extra, media_type):
    model = MODELS[question]
    if not EXTRAS[extra](rng).keys() <= model.model_fields.keys():
        pytest.skip("the question takes no such tensor")

    async def story(engine):
        for _ in range(3):
            asked = model(**{"query": rng.standard_normal((2, 3, WIDTH), np.float32)} | EXTRAS[extra](rng))
            body = b"".join(to_body(asked, media_type, "request"))
            size = measure_text(body) if media_type == JSON else None
            request, outline = request_from_body(model, memoryview(body), media_type, size)
            answer = getattr(engine, question)
            same(await answer("m", request, outline=outline), await answer("m", request))

    play(tmp_path, story)


def test_lists_keep_the_dtype_of_the_module(tmp_path):
    async def story(engine):
        await engine.modules.create(
            CreateModule(name="wide", config={"d_model": 2, "num_heads": 1, "dtype": "float64"})
        )
        for number in (0.5, 1.5):
            body = b'{"query": [[%f, 2.5]]}' % number
            request, outline = request_from_body(ForwardRequest, body, JSON, measure_text(body))
            assert outline is not None
            assert (await engine.forward("wide", request, outline=outline)).output.dtype == np.float64

    play(tmp_path, story)


def test_a_wrong_shape_is_refused_each_time(tmp_path):
    async def story(engine):
        for _ in range(2):
            asked = ForwardRequest(query=np.zeros((1, 3, WIDTH + 1), np.float32))
            body = b"".join(to_body(asked, SAFETENSORS, "request"))
            request, outline = request_from_body(ForwardRequest, memoryview(body), SAFETENSORS)
            with pytest.raises(ShapeMismatch, match="query"):
                await engine.forward("m", request, outline=outline)

    play(tmp_path, story)


def test_neither_a_deleted_module_nor_a_body_stays_in_memory(tmp_path):
    async def story(engine):
        array = np.ones((1, 3, WIDTH), np.float32)
        body = bytearray(b"".join(to_body(ForwardRequest(query=array), SAFETENSORS, "request")))
        request, outline = request_from_body(ForwardRequest, memoryview(body), SAFETENSORS)
        await engine.forward("m", request, outline=outline)
        module, query = weakref.ref(engine.library.get("m")), weakref.ref(request.query)
        await engine.modules.delete("m")
        engine.predictions.settle()
        del request
        gc.collect()
        assert module() is None
        assert query() is None

    play(tmp_path, story)


def test_raw_requests_differ_by_their_spec(tmp_path, rng):
    async def story(engine):
        query = rng.standard_normal((1, 1, 4, 2), np.float32)
        for masks in ([], [{"name": "causal"}], []):
            asked = RawForwardRequest(query=query, spec={"masks": masks})
            body = b"".join(to_body(asked, SAFETENSORS, "request"))
            request, outline = request_from_body(RawForwardRequest, memoryview(body), SAFETENSORS)
            same(await engine.forward(None, request, outline=outline), await engine.forward(None, request))

    play(tmp_path, story)
