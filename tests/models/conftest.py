"""A server whose models are stand-ins, in processes of their own."""

import json
import sys

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.conftest import live_server

from attention_service.models.server import worker_process


@pytest.fixture(scope="module")
def stand_ins():
    """Start stand-ins in the place of models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_process, "COMMAND", (sys.executable, "-m", "tests.models.stand_in"))
        patch.setenv("ATTENTION_API_KEY", "secret")
        yield


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A model repository with some checkpoints of 64 KiB."""
    tmp_path = tmp_path_factory.mktemp("models")
    for name in ("one", "org/two", "slow", "broken", "stands"):
        write_checkpoint(tmp_path / name)
    (tmp_path / "bare").mkdir()
    save_file({"x": np.zeros(4, np.float32)}, tmp_path / "bare/model.safetensors")
    return tmp_path


def write_checkpoint(folder, size=2**16):
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": np.zeros(size // 4, np.float32)}, folder / "model.safetensors")


@pytest.fixture(scope="module")
def http(stand_ins, repository):
    with live_server(repository) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client
