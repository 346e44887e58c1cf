"""A live server with its door for agents, a model, and keys of its callers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from attention_contract.schemas.server import CallerLimits
from attention_service.api.access.api_keys import create_key
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.conftest import live_server
from tests.models.inputs.images import small_encoders

TEXT = "Kate met Tamiro in the park. Then Tam"
OTHER = "Kate met Rodovu in the park. Then Rod"
REPEATED = "Vubupe, Soduri, Napi, Kunu, Rodovu. Vubupe, Soduri, Napi, Kunu, Rodovu."


class Agents(NamedTuple):
    """The address of the server, and keys to it: one that may do all, and others of one scope or with a limit."""

    url: str
    key: str
    reader: str
    metrics: str
    one_at_a_time: str
    slow: str


@pytest.fixture(scope="package")
def agents(tmp_path_factory):
    """The server: all share it, for a model takes seconds to load."""
    root = tmp_path_factory.mktemp("models")
    for part in (small_encoders.eager("vit"), small_encoders.processor("vit")):
        part.save_pretrained(root / "seer")
    for part in (tiny("bert"), tokenizer()):
        part.save_pretrained(root / "encoder")
        part.save_pretrained(root / "unasked")
    keys = (
        create_key(root, "agent", ["infer", "inspect"]),
        create_key(root, "reader", ["inspect"]),
        create_key(root, "watcher", ["metrics"]),
        create_key(root, "single", ["infer"], CallerLimits(concurrent=1)),
        create_key(root, "slow", ["infer"], CallerLimits(requests_per_s=0.01)),
    )
    with live_server(root, require_keys=True, mcp=True) as url:
        yield Agents(url, *keys)


@asynccontextmanager
async def connected(url: str, key: str, mode: str = "auto") -> AsyncIterator[Any]:
    """The protocol's own client with an API key."""
    async with (
        httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


async def answer(client, tool, /, **arguments):
    """The structured answer of a call that succeeds."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content[0].text
    return result.structured_content


async def refusal(client, tool, /, **arguments):
    """The text of a call that is refused."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return result.content[0].text


async def opened(client, text=TEXT, **arguments):
    """The handle of a text."""
    return (await answer(client, "open_input", text=text, **arguments))["input"]
