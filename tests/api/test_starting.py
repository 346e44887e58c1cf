"""A server is ready, and answers lists of numbers, also while what reads them is compiled, or where it can't be."""

import subprocess
import threading

import httpx
import numpy as np
import pytest

from attention_contract import lists
from tests.conftest import live_server

QUERY = np.random.default_rng(0).standard_normal((1, 3, 8)).tolist()


def ask(url):
    """What is answered to lists of numbers: the same, whoever reads them."""
    return httpx.post(f"{url}/v1/attention/forward", json={"query": QUERY, "key": QUERY, "value": QUERY}).json()[
        "output"
    ]


@pytest.fixture
def expected(server):
    return ask(server)


def loading(monkeypatch, work):
    """Have the second to load, which is the server after ``live_server``, do this; the list of those who did."""
    times = []

    def load():
        times.append(work)
        if len(times) == 2:
            work()

    monkeypatch.setattr(lists, "load", load)
    monkeypatch.setattr(lists._Code, "linked", None)
    return times


def test_it_is_ready_before_its_code_is_compiled(tmp_path, expected, monkeypatch):
    compiled = threading.Event()
    times = loading(monkeypatch, lambda: compiled.wait(60))
    monkeypatch.setattr(lists, "give_up", compiled.set)
    with live_server(tmp_path) as url:
        np.testing.assert_allclose(ask(url), expected, rtol=1e-6)
        assert not compiled.is_set()
    assert compiled.is_set()  # it stops what compiles, and with it itself
    assert len(times) == 2


def test_it_is_ready_where_its_code_cannot_be_compiled(tmp_path, expected, monkeypatch, capfd):
    def fail():
        raise subprocess.CalledProcessError(1, ["compiler"])

    times = loading(monkeypatch, fail)
    with live_server(tmp_path) as url:
        np.testing.assert_allclose(ask(url), expected, rtol=1e-6)
    assert len(times) == 2
    assert "could not be compiled" in "".join(capfd.readouterr())
