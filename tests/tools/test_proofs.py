"""The long checks, shortly: the document under schemathesis, a soak of a minute, and each fault once."""

import subprocess
import sys
from collections import Counter

import httpx
import numpy as np
import pytest
from tools.fuzz.__main__ import ROOT
from tools.proof import chaos
from tools.proof.chaos import EXPERIMENTS, Outcome, error_statuses, haproxy
from tools.proof.openapi_walk import only_drew_nothing
from tools.proof.walkers import FaultError, Walker


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=580)


def test_an_unexpected_status_and_wrong_numbers_are_faults():
    async def served(request: httpx.Request) -> httpx.Response:
        return httpx.Response(500 if request.url.path == "/broken" else 200, json={})

    async def ask(path: str, allowed: set[int]) -> None:
        async with httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(served)) as http:
            await Walker(http, 0, counts).ask("kind", "GET", path, allowed)

    import asyncio

    counts: Counter[tuple[str, int]] = Counter()
    asyncio.run(ask("/sound", {200}))
    with pytest.raises(FaultError, match="500"):
        asyncio.run(ask("/broken", {200}))
    assert counts == {("kind", 200): 1, ("kind", 500): 1}
    walker = Walker(httpx.AsyncClient(), 0, counts)
    walker.check("kind", np.ones(2), [1.0, 1.0])
    for found in ([1.0, 1.1], [1.0], [1.0, float("nan")]):
        with pytest.raises(FaultError):
            walker.check("kind", found, [1.0, 1.0])


def test_a_broken_promise_is_reported_and_counted(monkeypatch, capsys):
    def breaks(folder, rounds):
        outcome = Outcome("nothing", f"{rounds} rounds")
        outcome.expect(True, "this holds")
        outcome.expect(False, "this does not")
        return outcome

    monkeypatch.setitem(EXPERIMENTS, "breaks", breaks)
    assert chaos.chaos(["breaks"], 3) == 1
    assert "| breaks | nothing | 3 rounds | this does not |" in capsys.readouterr().out
    assert error_statuses(Counter({200: 1000, 0: 2})) == "closed: 2, 200: 1,000"


def test_only_an_array_that_schemathesis_cannot_draw_is_passed_over():
    error = "Schema Error\n\nCannot generate an array with 1 demanded elements\n"
    summary = "Errors:\n  🚫 Schema Error: 1\n"
    assert only_drew_nothing(error + summary)
    assert not only_drew_nothing(summary)  # of another schema
    assert not only_drew_nothing(error + "Errors:\n  🚫 Schema Error: 2\n")
    assert not only_drew_nothing(error + "Errors:\n  🚫 Network Error: 1\n  🚫 Schema Error: 1\n")
    assert not only_drew_nothing(f"==== FAILURES ====\n{error}{summary}")
    assert not only_drew_nothing("Failures:\n  ❌ Server error: 1\n")


@pytest.mark.slow
def test_schemathesis_finds_no_failure_in_the_document():
    ended = run("tools.proof.openapi_walk", "--seconds", "120", "--examples", "15", "--seed", "1")
    assert ended.returncode == 0, ended.stdout[-8000:]


@pytest.mark.slow
def test_a_minute_of_everything_leaves_nothing_behind():
    ended = run("tools.proof.soak", "--minutes", "1", "--users", "12", "--growth", "0.15")
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_promises_hold_under_faults(experiment, tmp_path):
    if experiment == "one of two" and haproxy() is None:
        pytest.skip("needs HAProxy: apt-get install haproxy")
    outcome = EXPERIMENTS[experiment](tmp_path, 4)
    broken = [each for each in outcome.broken if "health took" not in each]  # other tests run on the same cores
    assert not broken, outcome
