"""Completion in a shell: names of the server, and silence without one."""

import socket
import time

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from attention_client.cli import app
from tests.conftest import live_server


@pytest.fixture
def complete(server):
    def complete(line, url=server):
        words = line.split(" ")
        environment = {"_ATTENTION_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        result = CliRunner().invoke(app, env=environment | {"ATTENTION_URL": url}, prog_name="attention")
        # The server of these tests logs in this process, and so on the same standard error.
        assert [line for line in result.stderr.splitlines() if "operation=" not in line] == []
        return [word for word in result.stdout.split("\n") if word]

    return complete


def test_names_are_completed_from_the_server(complete, client):
    client.modules.create("completed", {"d_model": 8, "num_heads": 2}, seed=0)
    assert "completed" in complete("attention forward comp")
    assert "completed" in complete("attention modules show comp")
    assert complete("attention forward completed --kernel fu") == ["fused"]
    assert complete("attention modules parameters completed q_proj.w") == ["q_proj.weight"]
    assert complete("attention gradients completed --wrt q_proj.w") == ["q_proj.weight"]
    assert complete("attention forward completed --return mas") == ["masked_scores"]
    assert {"completed", "compiled"} & {*complete("attention compare comp")} == {"completed"}


@pytest.mark.slow
def test_checkpoints_and_their_layers_are_completed(complete, tmp_path):
    (tmp_path / "net").mkdir()
    save_file(torch.nn.MultiheadAttention(8, 2).state_dict(), tmp_path / "net" / "model.safetensors")
    with live_server(tmp_path) as url:
        assert complete("attention import n", url) == ["net"]
        assert complete("attention import net --layer ", url) == ["0"]
        assert "net#" in complete("attention compare ne", url)
        assert complete("attention compare net#", url) == ["net#0"]


@pytest.mark.slow
def test_a_server_that_does_not_answer_completes_nothing_and_soon(complete):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        began = time.monotonic()
        assert complete("attention forward x", f"http://127.0.0.1:{silent.getsockname()[1]}") == []
        assert time.monotonic() - began < 10
    assert complete("attention forward x", "not a URL") == []
