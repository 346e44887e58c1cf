"""The protocol by an application in this process: states that a live server is in for a moment, limits, siblings."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import numpy as np
import pytest

from attention_service.api.app import create_app
from attention_service.settings import Settings
from tests.api.doors.oip.envelopes import LENGTH, binary, read, refused, tensor

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
REQUEST = {"inputs": [tensor("query", X)]}
MADE = {"name": "demo", "config": {"d_model": 8, "num_heads": 2}}


@asynccontextmanager
async def application(models_dir, **settings):
    """A client of an application that is ready, and its engine."""
    app = create_app(
        Settings(_env_file=None, models_dir=models_dir, calibrate=False, oip=True, **settings), wait_until_ready=True
    )
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            yield http, app.state.engine


@pytest.mark.parametrize("state", ["loading", "draining"])
async def test_a_server_that_takes_no_work_is_live_and_not_ready(tmp_path, state):
    async with application(tmp_path) as (http, engine):
        await http.post("/v1/modules", json=MADE)
        engine.runner.state = state
        assert (await http.get("/v2/health/live")).json() == {"live": True}
        refusal = refused(await http.get("/v2/health/ready"), 503)
        assert refusal["ready"] is False
        refused(await http.get("/v2/models/demo/ready"), 503)
        refused(await http.get("/v2/models/_attention/ready"), 503)
        refused(await http.post("/v2/models/demo/infer", json=REQUEST), 503)
        refused(await http.post("/v2/repository/index"), 503)
        engine.runner.state = "ready"
        assert (await http.get("/v2/health/ready")).json() == {"ready": True}


async def test_a_module_of_another_process_is_found_at_once(tmp_path):
    async with AsyncExitStack() as stack:
        here, _ = await stack.enter_async_context(application(tmp_path, replicas=2))
        there, _ = await stack.enter_async_context(application(tmp_path, replicas=2))
        made = await there.post("/v1/modules", json=MADE)
        outputs, head = read(await here.post("/v2/models/demo/infer", json=REQUEST))
        assert head["parameters"]["version"] == made.json()["version"]
        config = json.dumps({"config": MADE["config"]})
        load = {"parameters": {"config": config}}
        refused(await here.post("/v2/repository/models/brief/load", json=load), 400, "durable")
        load = {"parameters": {"config": json.dumps({"config": MADE["config"], "durable": True})}}
        assert (await here.post("/v2/repository/models/brief/load", json=load)).status_code == 200
        same, _ = read(await there.post("/v2/models/brief/infer", json=REQUEST))
        assert np.array_equal(same["output"], outputs["output"])


async def test_limits_of_bodies_hold_for_the_json_object_and_for_all(tmp_path):
    async with application(tmp_path, max_json_bytes=2048, max_body_bytes=8192, max_json_values=1024) as (http, _):
        await http.post("/v1/modules", json=MADE)
        infer = "/v2/models/demo/infer"
        long = np.zeros((40, 8), np.float32)
        body, headers = binary({"query": long})
        assert (await http.post(infer, content=body, headers=headers)).status_code == 200
        refused(await http.post(infer, json={"inputs": [tensor("query", long)], "id": "x" * 900}), 413)
        body, headers = binary({"query": long}, id="x" * 1000, parameters={"edits": "[" + " " * 2000 + "]"})
        refused(await http.post(infer, content=body, headers=headers), 413, "JSON object")
        body, headers = binary({"query": np.zeros((300, 8), np.float32)})
        refused(await http.post(infer, content=body, headers=headers), 413)


async def test_many_at_once_each_get_their_own(tmp_path):
    async with application(tmp_path) as (http, _):
        await http.post("/v1/modules", json=MADE)
        inputs = [np.full((2, 8), n, np.float32) for n in range(16)]

        async def ask(x):
            body, headers = binary({"query": x}, parameters={"binary_data_output": True})
            return read(await http.post("/v2/models/demo/infer", content=body, headers=headers))[0]["output"]

        together = await asyncio.gather(*map(ask, inputs))
        for x, output in zip(inputs, together, strict=True):
            np.testing.assert_allclose(output, await ask(x), rtol=1e-5, atol=1e-6)
        (entry,) = (await http.get("/v2/models/demo/stats")).json()["model_stats"]
        assert entry["inference_count"] == 32
        assert 1 <= entry["execution_count"] <= 32


async def test_a_module_that_is_deleted_meanwhile_is_an_unknown_model(tmp_path):
    async with application(tmp_path) as (http, engine):
        await http.post("/v1/modules", json=MADE)
        kept = engine.library.get("demo")
        await http.delete("/v1/modules/demo")
        engine.modules.get = lambda name, version=None: kept
        refused(await http.post("/v2/models/demo/infer", json=REQUEST), 404, "Request for unknown model: 'demo'")


async def test_an_empty_length_is_refused(tmp_path):
    async with application(tmp_path) as (http, _):
        await http.post("/v1/modules", json=MADE)
        answer = await http.post("/v2/models/demo/infer", json=REQUEST, headers={LENGTH: ""})
        refused(answer, 400, LENGTH)
