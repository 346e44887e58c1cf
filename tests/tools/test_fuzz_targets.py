"""A short run of every fuzz target: its seeds are accepted, and what is made of them is accepted or refused."""

import random
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tools.fuzz.__main__ import ROOT, SHARES
from tools.fuzz.seeds import bend, seeds
from tools.fuzz.targets import TARGETS, PropertyError, refused

from attention_contract.errors import InternalError, InvalidRequest

# CI gives the same targets 20,000 inputs (`make fuzz`).
short = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
targets = pytest.mark.parametrize("name", TARGETS)


def test_every_target_has_a_share_of_the_inputs():
    assert set(SHARES) == set(TARGETS)
    assert sum(SHARES.values()) == 100


@targets
def test_sound_inputs_are_accepted_and_survive(name):
    accepted = [TARGETS[name](data) for data in seeds(name)]
    odd = name in {"tensor", "negotiated_headers"}  # among theirs are some that are refused
    assert accepted.count(True) >= (2 if odd else len(accepted))


@targets
@short
@given(st.data())
def test_what_is_made_of_sound_inputs_is_accepted_or_refused(name, data):
    """Bytes are replaced, removed and added, and parts of the JSON; a target raises if its property does not hold."""
    body = bytearray(data.draw(st.sampled_from(seeds(name))))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, max(len(body) - 1, 0)))
        body[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    TARGETS[name](bytes(body))
    bent = bend(bytes(body), random.Random(data.draw(st.integers(0, 2**32))))
    if bent is not None:
        TARGETS[name](bent)


@targets
@short
@given(st.binary(max_size=100))
def test_any_bytes_are_accepted_or_refused(name, data):
    TARGETS[name](data)


def test_a_refusal_that_blames_the_server_or_is_long_is_a_fault():
    assert refused(InvalidRequest("short")) is False
    long = InvalidRequest("short")
    long.detail = "x" * 2000  # one that is made so is cut
    for error in (InternalError("the server failed"), long):
        with pytest.raises(PropertyError):
            refused(error)


@pytest.mark.slow
def test_libfuzzer_finds_no_fault():
    sizes = {"inputs": 20_000, "requests": 800, "folders": 200, "loads": 8, "seed": 7}
    command = [sys.executable, "-m", "tools.fuzz", *(f"--{name}={size}" for name, size in sizes.items())]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-5000:]
    assert "| all | 21,008 |" in ended.stdout
