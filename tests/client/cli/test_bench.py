"""``attention bench`` against a live server."""

import asyncio
import json

import numpy as np
import pytest

from attention_client.cli.compare.load import measure
from attention_contract.errors import Overloaded
from tests.client.cli.command_line import invoke

FEW = ("--requests", "6", "--warm-up", "2", "--queries", "5")


@pytest.fixture
def bench(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def bench(*arguments, code=0):
        result = invoke(["bench", server, *FEW, *arguments])
        assert result.exit_code == code, result.output
        return result

    return bench


@pytest.mark.parametrize("operation", ["forward", "weights", "gradients"])
def test_every_level_is_measured(bench, operation):
    printed = bench("--operation", operation, "--concurrency", "1,3", "--heads", "2", "--json").stdout
    levels = json.loads(printed)["levels"]
    assert [one["concurrency"] for one in levels] == [1, 3]
    for one in levels:
        assert (one["succeeded"], one["errors"]) == (6, {})
        assert 0 < one["p50_ms"] <= one["p90_ms"] <= one["p99_ms"] <= one["max_ms"] <= 1e3 * one["seconds"]
        assert one["requests_per_second"] == pytest.approx(6 / one["seconds"])
        assert 0 < one["compute_ms"] < one["max_ms"]


def test_a_module_a_spec_and_a_request_file_are_sent(bench, client):
    client.modules.create("measured", {"d_model": 8, "num_heads": 2}, seed=0)
    shown = bench("--module", "measured", "--concurrency", "2", "--media-type", "json").stdout
    assert "p99 ms" in shown
    assert "6 requests succeeded" in shown
    bench("--spec", '{"score": {"name": "bilinear"}}', "--concurrency", "1", "--heads", "2", "--head-dim", "4")
    np.savez("in.npz", query=np.ones((1, 3, 8), np.float32), key_mask=np.array([[True, True, False]]))
    bench("--module", "measured", "--request", "in.npz", "--concurrency", "1")


def test_failures_are_counted_by_their_code(bench):
    printed = bench("--kernel", "absent", "--concurrency", "1", "--json", code=1).stdout
    (level,) = json.loads(printed)["levels"]
    assert (level["succeeded"], level["p50_ms"]) == (0, None)
    assert sum(level["errors"].values()) == 6


async def test_so_many_requests_are_in_flight_and_no_more():
    flying, most, sent = 0, 0, 0

    async def send():
        nonlocal flying, most, sent
        sent += 1
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.001)
        flying -= 1
        raise Overloaded("full")

    done = []
    measured = await measure(send, 3, 10, lambda: done.append(1))
    assert (most, sent, len(done)) == (3, 10, 10)
    assert measured.errors == {Overloaded.code: 10}


def test_a_server_that_is_not_there_is_one_error():
    result = invoke(["--timeout", "2", "bench", "http://127.0.0.1:9", *FEW])
    assert result.exit_code == 1
    assert result.stderr.count("No connection to the server") == 1


def test_bad_options_are_named(bench):
    assert "--concurrency" in bench("--concurrency", "1,x", code=2).stderr
    assert "--concurrency" in bench("--concurrency", "101", code=2).stderr
    assert "--dtype" in bench("--dtype", "float31", code=2).stderr
