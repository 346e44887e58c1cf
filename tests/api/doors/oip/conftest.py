"""A live server with the Open Inference Protocol, and keys of its callers."""

from typing import NamedTuple

import httpx
import pytest

from attention_contract.schemas.server import CallerLimits
from attention_service.api.access.api_keys import create_key
from tests.conftest import live_server

CONFIG = {"d_model": 8, "num_heads": 2}


class Door(NamedTuple):
    """The address of the server, and keys to it: one that may do all, and others of one scope or with a limit."""

    url: str
    key: str
    infer: str
    inspect: str
    limited: str


@pytest.fixture(scope="package")
def door(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    keys = (
        create_key(root, "app", ["infer", "inspect", "manage", "metrics"]),
        create_key(root, "caller", ["infer"]),
        create_key(root, "reader", ["inspect"]),
        create_key(root, "seldom", ["infer"], CallerLimits(requests_per_s=0.01)),
    )
    with live_server(root, require_keys=True, oip=True, max_head_bytes=8192) as url:
        with client(url, keys[0]) as http:
            for name, dtype in (("demo", "float32"), ("half", "float16"), ("brain", "bfloat16")):
                body = {"name": name, "config": CONFIG | {"dtype": dtype}, "seed": 3}
                assert http.post("/v1/modules", json=body).status_code == 201
        yield Door(url, *keys)


def client(url, key):
    return httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {key}"})


@pytest.fixture(scope="package")
def http(door):
    """A client with the key that may do all."""
    with client(door.url, door.key) as http:
        yield http
