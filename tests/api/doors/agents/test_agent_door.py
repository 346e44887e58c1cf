"""The door for agents over real HTTP: tools and their schemas, levels of detail, sizes, access, errors, arrays."""

import asyncio
import base64
import json
import signal

import httpx
import jsonschema
import numpy as np
import pytest
from mcp import MCPError
from safetensors.numpy import load

from attention_client import Client
from attention_service import start_checks
from attention_service.settings import Settings
from tests.api.doors.agents.conftest import OTHER, REPEATED, TEXT, answer, connected, opened, refusal
from tests.api.processes import process
from tests.conftest import eventually, live_server

TOOLS = [
    "open_input", "rank_heads", "look_at_head", "effect_of_edit", "gradient_of_prediction", "estimate_cost",
    "compare_inputs", "explain_weight",
]  # fmt: skip
CHARACTERS_A_TOKEN = 3
"""Fewer than JSON has in any tokenizer in use, so that counts of tokens come out too large."""
MODES = ["auto", "legacy"]
"""The specification of 2026-07-28, and that of 2025-11-25 with its handshake."""
LONG = " ".join([REPEATED] * 12)
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}
ACCEPT = {"accept": "application/json, text/event-stream"}


def by(key):
    return {"authorization": f"Bearer {key}"}


def message(method, **params):
    """A message of 2026-07-28: each tells its protocol, and there is no handshake."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
    }
    headers = {"mcp-protocol-version": "2026-07-28", "mcp-method": method} | ACCEPT
    if "name" in params:
        headers["mcp-name"] = params["name"]
    return {
        "json": {"jsonrpc": "2.0", "id": 1, "method": method, "params": params | {"_meta": meta}},
        "headers": headers,
    }


async def calls(client, text):
    """Arguments for every tool, about one text."""
    handle, other = await opened(client, text), await opened(client, OTHER)
    about = {"input": handle}
    return {
        "open_input": {"text": text},
        "rank_heads": about | {"statistic": "induction", "count": 16},
        "look_at_head": about | {"layer": 1, "head": 0, "top_k": 8},
        "effect_of_edit": about | {"heads": [{"layer": 1, "head": 0}, {"layer": 0, "head": 0}]},
        "gradient_of_prediction": about | {"count": 16},
        "estimate_cost": {"attention": {"num_heads": 4, "head_dim": 16}, "length": 512},
        "compare_inputs": about | {"other": other, "count": 16},
        "explain_weight": about | {"layer": 1, "head": 0},
    }


@pytest.mark.parametrize("mode", MODES)
async def test_every_tool_is_listed_with_its_schemas_in_few_tokens(agents, mode):
    async with connected(agents.url, agents.key, mode) as client:
        assert client.protocol_version == {"auto": "2026-07-28", "legacy": "2025-11-25"}[mode]
        assert "open_input" in client.instructions
        listed = (await client.list_tools()).tools
    assert [tool.name for tool in listed] == TOOLS
    for tool in listed:
        assert tool.title
        assert len(tool.description) > 100
        assert tool.annotations.read_only_hint
        jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        jsonschema.Draft202012Validator.check_schema(tool.output_schema)
        assert tool.input_schema["properties"]["detail"]["enum"] == ["concise", "detailed"]
        assert tool.output_schema["properties"]["summary"]["type"] == "string"
        fields = tool.input_schema["properties"].items()
        documented = [name for name, field in fields if "description" in field]
        assert set(tool.input_schema["properties"]) - set(documented) <= {"text", "batch", "attention"}
    whole = json.dumps([tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in listed])
    assert len(whole) / CHARACTERS_A_TOKEN < 11_000


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
async def test_every_tool_answers_as_its_schema_says_in_both_levels_of_detail(agents, mode):
    async with connected(agents.url, agents.key, mode) as client:
        schemas = {tool.name: tool.output_schema for tool in (await client.list_tools()).tools}
        for tool, arguments in (await calls(client, LONG)).items():
            sizes = []
            for detail in ("concise", "detailed"):
                result = await client.call_tool(tool, arguments | {"detail": detail})
                assert not result.is_error, result.content[0].text
                jsonschema.validate(result.structured_content, schemas[tool])
                assert json.loads(result.content[0].text) == result.structured_content
                assert result.structured_content["summary"].endswith(".")
                sizes.append(len(result.content[0].text) / CHARACTERS_A_TOKEN)
            assert sizes[0] <= sizes[1]
            assert sizes[0] < 2000
            assert sizes[1] < 8000


def test_it_is_closed_by_default(server):
    answered = httpx.post(f"{server}/mcp", json=INITIALIZE, headers=ACCEPT)
    assert answered.status_code == 404


def test_a_start_without_the_package_says_what_to_install(monkeypatch, capsys):
    assert Settings(_env_file=None).mcp is False
    monkeypatch.setattr(start_checks, "find_spec", lambda _: None)
    assert start_checks.checked_settings(Settings, ["--mcp", "true"]) is None
    assert "pip install 'attention-service[mcp]'" in capsys.readouterr().err


def test_an_initialize_of_2025_11_25_is_answered_without_a_session(agents):
    answered = httpx.post(f"{agents.url}/mcp", json=INITIALIZE, headers=by(agents.key) | ACCEPT)
    assert answered.status_code == 200
    assert "mcp-session-id" not in answered.headers
    data = next(line for line in answered.text.splitlines() if line.startswith("data:"))
    result = json.loads(data.removeprefix("data:"))["result"]
    assert result["protocolVersion"] == "2025-11-25"
    assert result["serverInfo"]["name"] == "attention-service"
    assert set(result["capabilities"]) == {"tools", "resources"}


def test_there_is_no_stream_of_its_own_to_open_and_no_session_to_end(agents):
    for method in ("GET", "DELETE"):
        answered = httpx.request(method, f"{agents.url}/mcp", headers=by(agents.key) | ACCEPT)
        assert answered.status_code == 405
        assert "POST" in answered.headers["allow"]


def test_a_message_needs_a_key_and_a_host_of_the_server(agents):
    fields = message("tools/list")
    assert httpx.post(f"{agents.url}/mcp", **fields).status_code == 401
    fields["headers"] |= by(agents.key)
    assert httpx.post(f"{agents.url}/mcp", **fields).status_code == 200
    fields["headers"]["origin"] = "https://elsewhere.test"
    assert httpx.post(f"{agents.url}/mcp", **fields).status_code == 403


async def test_the_refusal_of_a_key_names_the_scope_that_it_needs(agents):
    async with connected(agents.url, agents.reader) as client:
        message = await refusal(client, "open_input", text=TEXT)
        assert "model_forward needs a key with scope infer; this one has inspect" in message
        assert "attention keys create NAME --scope infer" in message
        found = await answer(client, "estimate_cost", attention={"num_heads": 4, "head_dim": 16}, length=64)
        assert found["low_ms"] < found["predicted_ms"] < found["high_ms"]
    async with connected(agents.url, agents.metrics) as client:
        assert len((await client.list_tools()).tools) == len(TOOLS)
        assert "scope infer or inspect" in await refusal(client, "estimate_cost", model="tiny")


@pytest.mark.parametrize("mode", MODES)
async def test_an_input_belongs_to_the_key_that_opened_it(agents, mode):
    text = f"{TEXT} {mode}"  # which nobody else has opened
    async with connected(agents.url, agents.key, mode) as client:
        handle = await opened(client, text)
        assert await opened(client, text) == handle
    async with connected(agents.url, agents.one_at_a_time, mode) as client:
        message = await refusal(client, "rank_heads", input=handle, statistic="induction")
        assert message.startswith(f"input: there is no open input '{handle}'")
        assert "Call open_input" in message
        assert await opened(client, text) == handle  # a key with one request at a time may ask, too


def test_messages_count_as_requests_of_their_caller(agents):
    fields = message("tools/list")
    fields["headers"] |= by(agents.slow)
    answered = [httpx.post(f"{agents.url}/mcp", **fields) for _ in range(3)]
    assert [each.status_code for each in answered] == [200, 429, 429]
    assert answered[1].json()["code"] == "caller_limit"
    assert int(answered[1].headers["retry-after"]) >= 1


async def test_questions_are_requests_in_the_metrics(agents, tmp_path):
    def count(operation):
        return sum(
            float(line.rpartition(" ")[2])
            for line in httpx.get(f"{agents.url}/metrics", headers=by(agents.metrics)).text.splitlines()
            if line.startswith("attention_requests_total") and f'operation="{operation}"' in line
        )

    async with connected(agents.url, agents.key) as client:
        handle = await opened(client)
        before = {name: count(name) for name in ("mcp", "model_weights")}
        await answer(client, "rank_heads", input=handle, statistic="induction")
    assert eventually(lambda: count("model_weights") == before["model_weights"] + 1)
    assert eventually(lambda: count("mcp") >= before["mcp"] + 1)


@pytest.mark.sampled(arguments=8, hint=8)
@pytest.mark.parametrize(
    ("tool", "arguments", "hint"),
    [
        ("open_input", {}, "text: expected a text or an image"),
        ("open_input", {"text": "x", "model": "nope"}, "Call open_input with model one of: tiny, "),
        ("open_input", {"image": "AAAA"}, "image"),
        ("open_input", {"text": "a " * 2000}, "512"),
        ("open_input", {"text": 5}, "text"),
        ("rank_heads", {"input": "x", "statistic": "entropy"}, "input"),
        ("rank_heads", {"statistic": "inductoin"}, "did you mean 'induction'?"),
        ("rank_heads", {"statistic": "classes"}, "which no tool takes; name another one"),
        ("rank_heads", {"statistic": "entropy", "layers": [9]}, "layers.0: the model has no attention '9'; it has 0"),
        ("rank_heads", {"statistic": "entropy", "count": 1000}, "count"),
        ("rank_heads", {"statistic": "entropy", "cuont": 10}, "did you mean 'count'? Correct the argument"),
        ("look_at_head", {"layer": 1, "head": 7}, "head: 7 is out of range; there are 4 heads"),
        ("look_at_head", {"layer": 1, "head": 0, "queries": [99]}, "queries: 99 is out of range"),
        ("look_at_head", {"layer": 1}, "head"),
        ("effect_of_edit", {"heads": []}, "heads"),
        ("effect_of_edit", {"heads": [{"layer": 1, "head": 9}]}, "heads: 9 is out of range"),
        ("effect_of_edit", {"heads": [{"layer": 9, "head": 0}]}, "heads: "),
        ("effect_of_edit", {"heads": [{"layer": 1, "head": 0}], "positions": [99]}, "positions: 99 is out of range"),
        ("effect_of_edit", {"heads": [{"layer": 1, "head": 0}], "action": "patch"}, "call open_input with the other"),
        ("effect_of_edit", {"heads": [{"layer": 1, "head": 0}], "source": "in_000000000000"}, "knock_out takes none"),
        (
            "effect_of_edit",
            {"heads": [{"layer": 1, "head": 0}], "action": "patch", "source": "in_000000000000"},
            "source: there is no open input",
        ),
        ("gradient_of_prediction", {"of": {"token": "zzzq"}}, "of.token: 'zzzq' is 4 tokens"),
        ("estimate_cost", {"model": "tiny", "module": "x"}, "expected one of input, model, module and attention"),
        ("estimate_cost", {"module": "x"}, "Call estimate_cost with attention"),
        ("estimate_cost", {"attention": {"num_heads": 4, "head_dim": 16, "spec": {"masks": [{"name": "x"}]}}}, "spec"),
        ("compare_inputs", {"other": "in_000000000000"}, "other: there is no open input"),
        ("explain_weight", {"layer": 1, "head": 0, "position": 99}, "position: 99 is out of range"),
    ],
)  # fmt: skip
async def test_the_refusal_of_a_wrong_call_names_the_next_one(agents, tool, arguments, hint):
    async with connected(agents.url, agents.key) as client:
        if tool not in {"open_input", "estimate_cost"}:
            arguments = {"input": await opened(client)} | arguments
        text = await refusal(client, tool, **arguments)
        assert hint in text
        assert text.endswith(".")
        assert "all" in text  # Call …, or: make the same call again
        assert len(text) < 700


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.slow
async def test_no_value_of_an_argument_makes_the_server_fail(agents, tool):
    async with connected(agents.url, agents.key) as client:
        usual = (await calls(client, TEXT))[tool]
        known = next(each for each in (await client.list_tools()).tools if each.name == tool)
        for name in known.input_schema["properties"]:
            for value in (
                None,
                True,
                -1,
                10**30,
                1.5,
                "",
                "x",
                [],
                [0],
                [[]],
                {},
                {"layer": 0},
                [{"layer": 0, "head": 9}],
            ):
                text = (await client.call_tool(tool, usual | {name: value})).content[0].text
                assert "the server failed" not in text, (name, value)


async def test_the_refusal_of_an_unknown_tool_or_array_lists_what_there_is(agents):
    async with connected(agents.url, agents.key) as client:
        with pytest.raises(MCPError, match="call one of open_input, rank_heads"):
            await client.call_tool("nope", {})
        handle = await opened(client)
        for uri, hint in (
            ("attention://inputs/x", "Call look_at_head"),
            (f"attention://inputs/{handle}/layers/1/heads/0/nope", "Call look_at_head"),
            (f"attention://inputs/{handle}/layers/1/heads/9/weights", "there are 4 heads"),
            ("attention://inputs/in_000000000000/layers/1/heads/0/weights", "Call open_input"),
        ):
            with pytest.raises(MCPError, match=hint):
                await client.read_resource(uri)


async def test_linked_arrays_are_those_of_the_api(agents):
    async with connected(agents.url, agents.key) as client:
        handle = await opened(client)
        looked = await client.call_tool("look_at_head", {"input": handle, "layer": 1, "head": 2})
        explained = await client.call_tool("explain_weight", {"input": handle, "layer": 1, "head": 2})
        links = {link.uri: link for result in (looked, explained) for link in result.content[1:]}
        assert [uri.rpartition("/")[2] for uri in links] == ["weights", "q", "k", "v", "scores", "context"]
        template = (await client.list_resource_templates()).resource_templates[0]
        assert template.uri_template.startswith("attention://inputs/{input}")
        assert (await client.list_resources()).resources == []
        with Client(agents.url, api_key=agents.key, timeout=60) as native:
            reply = native.models.forward(
                "tiny", TEXT, layers=[1], select={"heads": [2]}, return_=["weights", "q", "k", "v", "scores", "context"]
            )
        for uri, link in links.items():
            assert link.mime_type == "application/vnd.safetensors"
            content = (await client.read_resource(uri)).contents[0]
            tap = uri.rpartition("/")[2]
            arrays = load(base64.b64decode(content.blob))
            assert np.array_equal(arrays[f"layers.0.{tap}"], getattr(reply.layers[0], tap))


async def test_a_picture_comes_on_request(agents):
    async with connected(agents.url, agents.key) as client:
        fields = {"input": await opened(client), "layer": 1, "head": 0}
        kinds = [each.type for each in (await client.call_tool("look_at_head", fields)).content]
        assert kinds == ["text", "resource_link"]
        drawn = await client.call_tool("look_at_head", fields | {"picture": True})
        assert [each.type for each in drawn.content] == ["text", "image", "resource_link"]
        assert drawn.content[1].mime_type == "image/png"
        assert base64.b64decode(drawn.content[1].data).startswith(b"\x89PNG")


@pytest.mark.slow
async def test_a_caller_who_leaves_while_a_model_loads_is_noticed(agents):
    def left():
        answered = httpx.get(f"{agents.url}/metrics", headers=by(agents.metrics)).text
        return 'attention_requests_cancelled_total{operation="model_forward"} 1.0' in answered.splitlines()

    def loads():
        return httpx.get(f"{agents.url}/v1/models/unasked", headers=by(agents.key)).json()["state"] == "loading"

    async with connected(agents.url, agents.key) as client:
        call = asyncio.create_task(client.call_tool("open_input", {"model": "unasked", "text": "the cat"}))
        assert await asyncio.to_thread(eventually, loads)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(eventually, left)  # meanwhile this loop closes the connection


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_a_server_that_stops_answers_first(tmp_path, mode):
    def loads():
        return httpx.get(f"{url}/v1/models/tiny").json()["state"] == "loading"

    flags = "--threads", "1", "--mcp", "true", "--drain-seconds", "120"
    with process(tmp_path, *flags) as (server, url):
        async with connected(url, "none", mode) as client:
            loading = asyncio.create_task(client.call_tool("open_input", {"text": TEXT}))
            await asyncio.to_thread(eventually, loads)
            server.send_signal(signal.SIGTERM)
            text = (await loading).content[0].text
        assert "the server is stopping" in text  # by its second question, after the model was loaded
        assert text.endswith("make the same call again.")
        assert server.wait(60) == 0


def test_a_message_counts_in_the_memory_of_bodies(tmp_path):
    with live_server(tmp_path, mcp=True, memory_budget=2**22) as url:
        fields = message("tools/call", name="open_input", arguments={"image": "A" * 2**23})
        answered = httpx.post(f"{url}/mcp", **fields)
        assert (answered.status_code, answered.json()["code"]) == (413, "over_budget")
        assert httpx.post(f"{url}/mcp", **message("tools/list")).status_code == 200


@pytest.mark.slow
def test_a_server_without_keys_answers_everybody(tmp_path):
    with live_server(tmp_path, mcp=True) as url:
        fields = message("tools/call", name="estimate_cost", arguments={"attention": {"num_heads": 2, "head_dim": 8}})
        reply = httpx.post(f"{url}/mcp", **fields).json()["result"]
        assert reply["structuredContent"]["subject"] == "attention"
        assert not reply.get("isError")


@pytest.mark.slow
async def test_an_image_is_opened_and_looked_at(agents):
    from tests.models.inputs.images.small_encoders import noise, sent

    async with connected(agents.url, agents.key) as client:
        found = await answer(client, "open_input", model="seer", image=sent(noise())["base64"])
        assert found["tokens"][:2] == ["CLS", "[0,0]"]
        assert found["token_count"] == 17
        about = {"input": found["input"]}
        assert len((await answer(client, "rank_heads", **about, statistic="entropy"))["heads"]) == 5
        looked = await answer(client, "look_at_head", **about, layer=1, head=2, queries=[0])
        assert looked["rows"][0]["token"] == "CLS"
        effect = await answer(client, "effect_of_edit", **about, heads=[{"layer": 1, "head": 2}])
        assert "loss_change" not in effect
        assert effect["divergence"] > 0
        assert (await answer(client, "gradient_of_prediction", **about))["tokens"]
        assert (await answer(client, "explain_weight", **about, layer=0, head=0, position=0))["error"] < 1e-5
        message = await refusal(client, "estimate_cost", **about)
        assert "Call estimate_cost with model, length and images" in message
        sizes = [{"width": 96, "height": 64}]
        assert (await answer(client, "estimate_cost", model="seer", images=sizes))["flops"] > 0
        assert "is of model tiny" in await refusal(client, "compare_inputs", **about, other=await opened(client))
        turned = await answer(client, "open_input", model="seer", image=sent(noise()[::-1])["base64"])
        compared = await answer(client, "compare_inputs", **about, other=turned["input"])
        assert compared["differing"] == []
        assert compared["divergence"] > 0


@pytest.mark.slow
async def test_a_model_that_predicts_nothing_is_looked_at_and_compared(agents):
    async with connected(agents.url, agents.key) as client:
        found = await answer(client, "open_input", model="encoder", text="the cat sat on the mat")
        assert found["predicted"] == []
        about = {"input": found["input"]}
        assert (await answer(client, "look_at_head", **about, layer=0, head=1))["rows"]
        other = await opened(client, "the dog sat on the mat", model="encoder")
        compared = await answer(client, "compare_inputs", **about, other=other)
        assert len(compared["differing"]) == 1
        assert "divergence" not in compared
        assert "no tool takes" in await refusal(client, "compare_inputs", **about, other=other, statistic="classes")
        effect = await answer(client, "effect_of_edit", **about, heads=[{"layer": 0, "head": 1}])
        assert effect["predicted"] == []
        assert (await answer(client, "explain_weight", **about, layer=0, head=1))["error"] < 1e-5
