"""Completion in a shell: names of the server, and silence without one."""

import os
import socket
import subprocess
import sys
import time

import pytest

from attention_client import Client

PROGRAM = "from attention_client.cli import app; app(prog_name='attention')"


@pytest.fixture
def complete(server):
    def complete(line, url=server):
        words = line.split(" ")
        environment = {
            **os.environ, "_ATTENTION_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1),
            "ATTENTION_URL": url,
        }  # fmt: skip
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=30, check=False
        )
        assert ended.stderr == ""
        return ended.stdout.split("\n")

    return complete


def test_names_are_completed_from_the_server(complete, server):
    with Client(server) as client:
        client.modules.create("completed", {"d_model": 8, "num_heads": 2}, seed=0)
    assert "completed" in complete("attention forward comp")
    assert "fused" in complete("attention forward completed --kernel fu")
    assert "q_proj.weight" in complete("attention gradients completed --wrt q_")
    assert "masked_scores" in complete("attention forward completed --return mas")


def test_a_server_that_does_not_answer_completes_nothing_and_soon(complete):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        began = time.monotonic()
        assert [
            word for word in complete("attention forward x", f"http://127.0.0.1:{silent.getsockname()[1]}") if word
        ] == []
        assert time.monotonic() - began < 10
