"""What the model repository holds, the import of whole checkpoints, and the hub, over live servers."""

import json
import os
import pickle
import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from attention_client import CheckpointNotFound, Client, Forbidden, InvalidCheckpoint, InvalidRequest, Unavailable
from attention_service.modules.checkpoints.catalogue import described, paths
from tests.api.hub import hub
from tests.api.processes import process
from tests.conftest import live_server

GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 3}


def gpt2(folder, layers=3, damaged=None):
    """Save the attention of a tiny GPT-2."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    tensors = {}
    for layer in range(layers):
        at = f"transformer.h.{layer}.attn"
        tensors |= {f"{at}.c_attn.weight": torch.randn(8, 24), f"{at}.c_attn.bias": torch.randn(24)}
        tensors |= {f"{at}.c_proj.weight": torch.randn(8, 8), f"{at}.c_proj.bias": torch.randn(8)}
    if damaged is not None:
        tensors[f"transformer.h.{damaged}.attn.c_proj.weight"] = torch.randn(8, 5)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(GPT2))


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    gpt2(root / "org" / "tiny")
    gpt2(root / "damaged", damaged=2)
    save_file(nn.MultiheadAttention(8, 2).state_dict(), root / "bare.safetensors")
    pickled = root / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps(GPT2))
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    (root / ".hidden").mkdir()
    save_file({"x": torch.ones(1)}, root / ".hidden" / "model.safetensors")
    return root


@pytest.fixture(scope="module")
def client(repository):
    with live_server(repository) as url, Client(url) as client:
        yield client


def test_every_checkpoint_is_listed_and_modules_are_not(client):
    client.modules.create("resident", {"d_model": 8, "num_heads": 2})
    found = {each.path: each for each in client.checkpoints.list().checkpoints}
    assert set(found) == {"tiny", "org/tiny", "damaged", "bare.safetensors", "pickled"}
    tiny = found["org/tiny"]
    assert (tiny.family, tiny.model_type, tiny.layers, tiny.heads, tiny.d_model) == ("gpt2", "gpt2", 3, 2, 8)
    assert tiny.bytes > 3 * 4 * (8 * 32)
    assert "safetensors" in found["pickled"].problem


def test_a_checkpoint_tells_the_spec_of_each_layer_before_it_is_loaded(client):
    found = client.checkpoints.get("org/tiny")
    assert [each.name for each in found.attentions] == ["tiny.0", "tiny.1", "tiny.2"]
    assert all(each.config.spec.masks[0].name == "causal" for each in found.attentions)
    made = client.modules.import_("org/tiny", layer=1, name="one")
    assert made.config == found.attentions[1].config
    assert made.bytes == found.attentions[1].bytes
    at = "transformer.h.1.attn"
    assert {name: tensor for name, tensor in found.attentions[1].tensors.items() if name.endswith("weight")} == {
        **{f"{role}_proj.weight": f"{at}.c_attn.weight" for role in "qkv"},
        "o_proj.weight": f"{at}.c_proj.weight",
    }
    client.modules.delete("one")


@pytest.mark.slow
def test_the_model_that_ships_is_imported_like_any_other(client):
    pytest.importorskip("transformers")
    found = client.checkpoints.get("tiny")
    assert [each.name for each in found.attentions] == ["tiny.0", "tiny.1", "tiny.2", "tiny.3"]
    made = client.modules.import_("tiny", layer=2, name="shipped")
    assert made.source.checkpoint == "tiny"
    assert made.bytes == found.attentions[2].bytes
    # What the layer gets, by the stream before it and the norm in the file, gives the weights of the whole model.
    reply = client.models.forward("tiny", "Kate met Tom. Kate", return_=["hidden", "weights"], layers=[1, 2], top_k=0)
    folder = files("attention_service") / "tiny_model"
    epsilon = json.loads((folder / "config.json").read_text())["rms_norm_eps"]
    stream = reply.layers[0].hidden
    with safe_open(str(folder / "model.safetensors"), "np") as tensors:
        scale = tensors.get_tensor("model.layers.2.input_layernorm.weight").astype(np.float32)
    normed = stream / np.sqrt(np.mean(stream**2, -1, keepdims=True) + epsilon) * scale
    weights = client.forward("shipped", normed, return_=["weights"]).weights
    assert weights == pytest.approx(reply.layers[1].weights, abs=2e-3)  # the module computes in float16
    assert len(client.circuits("shipped", parts=["ov"]).ov.copying) == 4
    client.modules.delete("shipped")


def test_a_checkpoint_of_the_repository_goes_before_the_one_that_ships(tmp_path):
    gpt2(tmp_path / "tiny")
    assert described(tmp_path, "tiny").family == "gpt2"
    assert [*paths(tmp_path)] == ["tiny"]


def test_what_a_checkpoint_does_not_tell_is_listed(client):
    (bare,) = client.checkpoints.get("bare.safetensors").attentions
    assert bare.config is None
    assert bare.missing
    with pytest.raises(InvalidRequest, match=r"bare\.0: the checkpoint does not state num_heads, spec\.masks"):
        client.modules.import_all("bare.safetensors")
    spec = {"masks": [], "add_zero_attn": False}
    (made,) = client.modules.import_all("bare.safetensors", num_heads=2, spec=spec)
    assert made.name == "bare.0"
    client.modules.delete("bare.0")


@pytest.mark.parametrize("path", ["modules/resident", "modules", "org/../modules/resident", "recordings"])
def test_what_the_server_keeps_is_no_checkpoint(client, path):
    client.modules.create("resident", {"d_model": 8, "num_heads": 2})
    with pytest.raises(CheckpointNotFound):
        client.checkpoints.get(path)
    with pytest.raises(CheckpointNotFound):
        client.modules.import_(path)


@pytest.mark.parametrize("path", ["nothing", "../etc", "org/nothing", "org"])
def test_an_unknown_checkpoint_is_not_found(client, path):
    with pytest.raises((CheckpointNotFound, InvalidCheckpoint, InvalidRequest)):
        client.checkpoints.get(path)


def test_every_layer_is_imported_with_its_progress(client):
    seen = []
    made = client.modules.import_all("org/tiny", on_imported=lambda module, *at: seen.append((module.name, *at)))
    assert [module.name for module in made] == ["tiny.0", "tiny.1", "tiny.2"]
    assert seen == [("tiny.0", 1, 3), ("tiny.1", 2, 3), ("tiny.2", 3, 3)]
    assert client.modules.import_all("org/tiny") == made  # again: the same modules
    for module in made:
        client.modules.delete(module.name)


def test_a_layer_that_cannot_be_imported_stops_all_before_the_first(client):
    names = {module.name for module in client.modules.list().modules}
    with pytest.raises(InvalidCheckpoint, match=r"damaged\.2"):
        client.modules.import_all("damaged")
    assert {module.name for module in client.modules.list().modules} == names


def test_a_failure_on_the_way_removes_what_was_imported_and_nothing_else(client):
    kept = client.modules.import_("org/tiny", layer=0)
    client.modules.create("tiny.2", {"d_model": 8, "num_heads": 2})  # something else has the name
    with pytest.raises(Exception, match=r"tiny\.2"):
        client.modules.import_all("org/tiny")
    assert {module.name for module in client.modules.list().modules} >= {kept.name, "tiny.2"}
    assert "tiny.1" not in {module.name for module in client.modules.list().modules}
    client.modules.delete("tiny.0")
    client.modules.delete("tiny.2")


def attention(*arguments, **env):
    """Run the command in a process of its own."""
    command = [sys.executable, "-c", "from attention_client.cli import main; main()", *arguments]
    environment = os.environ | env
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_the_hub_is_used_only_where_the_operator_allows_it(tmp_path):
    store, mirror = tmp_path / "models", tmp_path / "hub"
    store.mkdir()
    gpt2(mirror / "org" / "net")
    (mirror / "org" / "net" / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    (mirror / "org" / "net" / "modeling.py").write_text("raise SystemExit\n")
    with hub(mirror) as served:
        endpoint, taken = served.address, served.taken
        with (
            process(store, HF_ENDPOINT=endpoint) as (_, url),
            Client(url) as client,
            pytest.raises(Forbidden, match="ATTENTION_HUB"),
        ):
            client.checkpoints.fetch("org/net")
        with process(store, "--hub", "true", HF_ENDPOINT=endpoint) as (_, url), Client(url) as client:
            with pytest.raises(CheckpointNotFound, match="org/none"):
                client.checkpoints.fetch("org/none")
            with pytest.raises(InvalidRequest):
                client.checkpoints.fetch("../net")
            done = attention("--url", url, "import", "org/net", "--all", "--json", HF_ENDPOINT=endpoint)
            assert done.returncode == 0, done.stderr
            assert [module["name"] for module in json.loads(done.stdout)["modules"]] == ["net.0", "net.1", "net.2"]
            assert sorted(taken) == ["config.json", "model.safetensors"]
            assert client.checkpoints.fetch("org/net").family == "gpt2"  # there already
        assert sorted(file.name for file in (store / "org" / "net").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.slow
def test_the_command_fetches_where_the_server_does_not(tmp_path):
    store, mirror = tmp_path / "models", tmp_path / "hub"
    store.mkdir()
    gpt2(mirror / "org" / "net")
    with hub(mirror) as served, process(store) as (_, url):
        endpoint = served.address
        done = attention(
            "--url", url, "import", "org/net", "--layer", "2", HF_ENDPOINT=endpoint, ATTENTION_MODELS_DIR=str(store)
        )
        assert done.returncode == 0, done.stderr
        assert "net.2" in done.stdout
        listed = attention("--url", url, "checkpoints")
        assert "org/net" in listed.stdout
        assert "causal" in attention("--url", url, "checkpoints", "org/net").stdout


@pytest.mark.slow
def test_an_offline_machine_says_so(tmp_path):
    with (
        process(tmp_path, "--hub", "true", HF_ENDPOINT="http://127.0.0.1:9") as (_, url),
        Client(url, retries=0) as client,
        pytest.raises(Unavailable, match="cannot be reached"),
    ):
        client.checkpoints.fetch("org/net")
