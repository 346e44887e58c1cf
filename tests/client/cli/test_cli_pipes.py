"""Tensors through standard input and output of the command, against a live server."""

import subprocess
import sys
from io import BytesIO

import numpy as np
import pytest
from safetensors.numpy import load, save

from tests.client.cli.command_line import invoke

ATTENTION = f"{sys.executable} -c 'from attention_client.cli import main; main()'"
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 3, 8)


@pytest.fixture(scope="module")
def piped(client):
    client.modules.create("piped", {"d_model": 8, "num_heads": 2}, seed=0)
    return client


@pytest.fixture
def run(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments, stdin=None, code=0):
        result = invoke(["--url", server, *arguments], input=stdin)
        assert result.exit_code == code, result.output
        return result

    return run


def as_npy(array):
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()


def as_npz(**arrays):
    file = BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


FORMATS = {
    "npy": as_npy(X),
    "npz": as_npz(query=X),
    "one tensor of any name": as_npz(x=X),
    "safetensors": save({"query": X}),
    "json": str(X.tolist()).encode(),
    "a reply": save({"output": X, "weights": X[0]}),
}


@pytest.mark.parametrize("form", FORMATS)
def test_standard_input_is_read_in_every_format(run, piped, form):
    printed = run("forward", "piped", "-", "--output", "-.npy", stdin=FORMATS[form])
    expected = piped.forward("piped", X).output
    np.testing.assert_allclose(np.load(BytesIO(printed.stdout_bytes)), expected, atol=1e-6)


def test_standard_output_holds_the_reply_and_nothing_else(run, piped):
    printed = run("forward", "piped", "-", "--return", "output", "--return", "weights", "-o", "-", stdin=save({"q": X}))
    reply = piped.forward("piped", X, return_=["output", "weights"])
    found = load(printed.stdout_bytes)
    assert {*found} == {"output", "weights"}
    np.testing.assert_allclose(found["weights"], reply.weights, atol=1e-6)
    as_json = run("gradients", "piped", "-", "-o", "-.json", stdin=as_npy(X)).stdout
    assert as_json.startswith('{"')


def test_raw_attention_reads_all_its_inputs_from_the_pipe(run):
    q = X.reshape(1, 1, 3, 8)
    stdin = as_npz(query=q, key=q + 1, value=q - 1)
    found = load(run("forward", "-", "-o", "-", stdin=stdin).stdout_bytes)
    assert found["output"].shape == (1, 1, 3, 8)


def test_what_cannot_be_read_is_an_error_of_the_command_line(run):
    assert "no 'query' and no 'output'" in run("forward", "-", stdin=save({"a": X, "b": X}), code=2).stderr
    assert "standard input is empty" in run("forward", "-", stdin=b"", code=2).stderr
    assert "does not read as .json" in run("forward", "-", stdin=b"neither", code=2).stderr
    assert "would both write" in run("forward", "-", "-o", "-", "--json", stdin=FORMATS["npy"], code=2).stderr
    assert "does not read as .npy" in run("forward", "-", stdin=FORMATS["npy"][:40], code=2).stderr


@pytest.mark.long
def test_commands_are_joined_by_a_real_pipe(piped, server):
    python = "import sys, numpy as np; np.save(sys.stdout.buffer, np.linspace(-1, 1, 24, dtype='f4').reshape(1, 3, 8))"
    forward = f"{ATTENTION} --url {server} forward piped -"
    line = f'{sys.executable} -c "{python}" | {forward} --output - | {forward} --output -.npy'
    ended = subprocess.run(["/bin/sh", "-c", line], capture_output=True, timeout=60, check=True)
    expected = piped.forward("piped", piped.forward("piped", X).output).output
    np.testing.assert_allclose(np.load(BytesIO(ended.stdout)), expected, atol=1e-6)
    assert ended.stderr == b""


def test_a_file_that_cannot_be_written_ends_in_one_sentence(run, piped, tmp_path):
    (tmp_path / "out.npy").mkdir()
    result = run("forward", "piped", "--query", "-", "-o", "out.npy", stdin=as_npy(X), code=1)
    assert result.stderr == "out.npy: Is a directory\n"
