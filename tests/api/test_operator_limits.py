"""Limits that the operator sets: each is shown, and each refusal names it and what was asked."""

import httpx
import pytest

from tests.api.talk import problem
from tests.conftest import live_server

SETTINGS = {
    "max_json_values": 1024, "max_sweep": 3, "max_modules": 1, "max_sessions": 1, "max_headers": 50,
    "max_compression_ratio": 7.0, "idle_timeout_s": 33,
}  # fmt: skip
MODULE = {"name": "one", "config": {"d_model": 8, "num_heads": 2}}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    """A client of a server with narrow limits."""
    with (
        live_server(tmp_path_factory.mktemp("models"), **SETTINGS) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def test_every_limit_is_shown(http):
    limits = http.get("/v1").json()["limits"]
    assert {name: limits[name] for name in SETTINGS} == SETTINGS
    assert limits.pop("caller") == {}
    assert all(value > 0 for value in limits.values())


@pytest.mark.parametrize(
    ("path", "body", "status", "name", "actual"),
    [
        (
            "/v1/attention/complexity",
            {"shape": {"queries": 4}, "num_heads": 1, "head_dim": 2, "sweep": {"values": [1, 2, 3, 4]}},
            422,
            "max_sweep",
            4,
        ),
        ("/v1/modules", MODULE | {"name": "two"}, 507, "max_modules", 2),
        ("/v1/modules/one/sessions", {}, 429, "max_sessions", 2),
        ("/v1/attention/forward", {"query": [[0.5] * 2000]}, 413, "at most 1024. Send large tensors as base64", None),
    ],
)
def test_what_exceeds_a_limit_is_refused_by_its_name(http, path, body, status, name, actual):
    assert http.post("/v1/modules", json=MODULE).status_code in {200, 201}
    if path.endswith("sessions"):
        assert http.post(path, json=body).status_code == 201
    document = problem(http.post(path, json=body))
    assert document["status"] == status
    assert name in document["detail"]
    assert document["limit"] == SETTINGS.get(name, 1024)
    assert document["actual"] == actual or document["actual"] > 2000
