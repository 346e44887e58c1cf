"""Servers on one store: each notices the changes of the others within a second."""

import httpx
import pytest

from tests.conftest import eventually, live_server


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """HTTP clients of two servers on one folder."""
    models = tmp_path_factory.mktemp("shared")
    with (
        live_server(models) as one,
        live_server(models) as two,
        httpx.Client(base_url=one) as first,
        httpx.Client(base_url=two) as second,
    ):
        yield first, second


def test_a_change_on_one_server_is_seen_on_the_other(replicas):
    first, second = replicas
    made = first.post("/v1/modules", json={"name": "m", "config": {"d_model": 4, "num_heads": 2}, "seed": 1}).json()
    assert eventually(lambda: (got := second.get("/v1/modules/m")).status_code == 200 and got.json()) == made
    parameters = {
        f"{role}_proj.{kind}": [[0.5] * 4] * 4 if kind == "weight" else [0.0] * 4
        for role in "qkvo"
        for kind in ("weight", "bias")
    }
    changed = second.put("/v1/modules/m/parameters", json={"parameters": parameters}).json()
    assert changed["version"] != made["version"]
    eventually(lambda: first.get("/v1/modules/m").json() == changed)
    assert second.delete("/v1/modules/m").status_code == 204
    eventually(lambda: first.get("/v1/modules/m").status_code == 404)


def test_a_change_between_two_looks_is_a_conflict_and_never_lost(replicas):
    first, second = replicas
    config = {"d_model": 4, "num_heads": 2}
    made = first.post("/v1/modules", json={"name": "both", "config": config, "seed": 1})
    again = second.post("/v1/modules", json={"name": "both", "config": config, "seed": 1})
    other = second.post("/v1/modules", json={"name": "both", "config": config, "seed": 2})
    assert (made.status_code, again.json(), other.status_code) == (201, made.json(), 409)
