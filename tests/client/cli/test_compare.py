"""``attention compare`` against a live server: kernels, modules, specs, files, and what is refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file as save_state

from attention_client import Client
from attention_client.cli.compare.differences import compare as differences
from tests.client.cli.command_line import invoke
from tests.conftest import live_server


@pytest.fixture
def compare(server):
    def compare(*arguments, code=0):
        small = ("--queries", "9", "--keys", "7", "--head-dim", "8")
        result = invoke(["--url", server, "compare", *arguments, *small])
        assert result.exit_code == code, result.output
        return result

    return compare


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_an_exact_kernel_passes_in_every_dtype(compare, dtype):
    printed = compare(
        "blocked", "--dtype", dtype, "--spec", '{"masks": [{"name": "causal"}]}', "--kv-heads", "2"
    ).stdout
    assert printed.count("passed") == 4


def test_an_error_beyond_the_tolerance_fails(compare):
    found = json.loads(compare("fused", "--dtype", "float16", "--tolerance", "1e-9", "--json", code=1).stdout)
    assert not found["passed"]
    relative = {one["tensor"]: one["relative"] for one in found["differences"]}
    assert 1e-9 < relative["output"] < 1e-2
    assert {*relative} == {"output", "∂L/∂query", "∂L/∂key", "∂L/∂value"}


def test_the_output_may_be_compared_alone(compare):
    found = json.loads(compare("fused", "--no-gradients", "--json").stdout)
    assert [one["tensor"] for one in found["differences"]] == ["output"]
    assert {*found["compute_ms"]} == {"fused", "materialized"}


def test_a_name_that_is_not_known_is_answered_with_one_that_is_meant(compare):
    assert "did you mean 'fused'" in compare("fussed", code=1).stderr


# ── modules, specs, files ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def pair(client):
    """Two modules: the second differs from the first in head 1's values alone. The torch module of the first."""
    torch.manual_seed(0)
    reference = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    state = {name: x.detach().numpy() for name, x in reference.state_dict().items()}
    weights, biases = np.split(state["in_proj_weight"], 3), np.split(state["in_proj_bias"], 3)
    parameters = {f"{role}_proj.weight": x for role, x in zip("qkv", weights, strict=True)}
    parameters |= {f"{role}_proj.bias": x for role, x in zip("qkv", biases, strict=True)}
    parameters |= {"o_proj.weight": state["out_proj.weight"], "o_proj.bias": state["out_proj.bias"]}
    other = parameters["v_proj.weight"].copy()
    other[4:] += 0.5
    config = {"d_model": 8, "num_heads": 2}
    client.modules.create("pair.a", config, parameters=parameters)
    client.modules.create("pair.b", config, parameters=parameters | {"v_proj.weight": other})
    return reference, parameters


def message(result):
    """The words on standard error, without the box around them."""
    return " ".join(result.stderr.replace("│", " ").split())


def by_tensor(result):
    return {one["tensor"]: one for one in json.loads(result.stdout)["differences"]}


def test_modules_differ_where_they_differ(compare, pair):
    found = by_tensor(compare("pair.a", "pair.b", "--json", code=1))
    same = {"q", "k", "scores", "masked_scores", "weights"}
    assert {name for name, one in found.items() if one["max_abs"] == 0} >= same
    for tap in ("v", "context"):
        assert found[tap]["where"]["head"] == 1
        assert found[tap]["max_abs"] > 0.01
    assert found["∂L/∂query"]["relative"] > 1e-5
    compare("pair.a", "pair.b", "--tolerance", "1e6")
    assert "head 1" in compare("pair.a", "pair.b", code=1).stdout


def test_a_version_is_held(compare, pair, client):
    version = client.modules.get("pair.a").version
    compare(f"pair.a@{version}", "module:pair.a")
    assert "version" in compare("pair.a@abc", "pair.a", code=1).stderr


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_parameters_that_were_saved_are_an_earlier_version(compare, pair, server, tmp_path, suffix, client):
    path = str(tmp_path / f"earlier.{suffix}")
    saved = invoke(["--url", server, "modules", "parameters", "pair.a", "-o", path])
    assert (saved.exit_code, saved.stdout) == (0, "")
    held = load_file(path) if suffix == "safetensors" else dict(np.load(path))
    assert held.keys() == pair[1].keys()
    for name, array in pair[1].items():
        np.testing.assert_array_equal(held[name], array)
    if suffix == "safetensors":
        compare("pair.a", path)
        assert by_tensor(compare("pair.b", path, "--json", code=1))["v"]["where"]["head"] == 1
    names = [one.name for one in client.modules.list().modules]
    assert not [name for name in names if name.startswith("compare.")]


def test_a_local_torch_module_gives_the_same_numbers(compare, pair, tmp_path):
    state, code = str(tmp_path / "state.safetensors"), tmp_path / "made.py"
    save_state(pair[0].state_dict(), state)
    found = by_tensor(compare("pair.a", state, "--heads", "2", "--json"))
    assert {*found} == {"weights", "output", "∂L/∂query", "∂L/∂key", "∂L/∂value"}
    code.write_text(
        "import torch\nfrom safetensors.torch import load_file\n"
        "def make():\n    module = torch.nn.MultiheadAttention(8, 2)\n"
        f"    module.load_state_dict(load_file({state!r}))\n    return module\n"
        "def wrong():\n    return 3\n"
    )
    compare(f"{code}:make", "pair.a")
    assert by_tensor(compare("pair.b", f"{code}:make", "--json", code=1))["weights"]["relative"] < 1e-5
    assert "expected a torch.nn.Module" in message(compare("pair.a", f"{code}:wrong", code=2))
    assert "has no 'absent'" in message(compare("pair.a", f"{code}:absent", code=2))
    assert "give --heads" in message(compare("pair.a", state, code=2))


@pytest.mark.slow
def test_a_layer_of_a_checkpoint_is_compared_with_the_torch_module_that_it_came_from(pair, tmp_path):
    (tmp_path / "net").mkdir()
    state = str(tmp_path / "net" / "model.safetensors")
    save_state(pair[0].state_dict(), state)
    options = ("--heads", "2", "--spec", '{"masks": [], "add_zero_attn": false}')
    with live_server(tmp_path) as url:
        result = invoke(["--url", url, "compare", "net#0", state, *options])
        assert result.exit_code == 0, result.output
        assert result.stdout.count("passed") == 3  # weights, output, ∂L/∂query
        with Client(url) as client:
            assert client.modules.list().modules == []


@pytest.mark.slow
def test_specs_differ_from_the_tap_on_that_they_change(compare):
    found = by_tensor(compare('{"softcap": 1.0}', "{}", "--json", code=1))
    assert found["scores"]["max_abs"] == 0
    assert found["capped_scores"]["relative"] > 1e-3
    same = compare('{"masks": [{"name": "causal"}]}', '{"masks": [{"name": "sliding_window", "right": 0}]}', "--json")
    assert by_tensor(same)["masked_scores"]["max_abs"] == 0  # −∞ is −∞
    found = by_tensor(compare('{"method": {"name": "linear"}}', "spec:{}", "--json", code=1))
    assert {"q", "k", "v", "context", "output"} <= {*found}


def test_kernels_are_compared_on_a_module(compare, pair):
    compare("fused", "materialized", "--module", "pair.a")


def test_inputs_may_come_from_a_file(compare, pair, tmp_path):
    path = str(tmp_path / "in.npz")
    np.savez(path, query=np.ones((1, 3, 8)), key_mask=np.array([[True, True, False]]))
    assert by_tensor(compare("pair.a", "pair.b", "--inputs", path, "--json", code=1))["q"]["max_abs"] == 0


def test_what_cannot_be_compared_is_refused(compare, pair):
    assert "one is a module" in message(compare("pair.a", "fused", code=2))
    assert "only a kernel has a default" in message(compare("pair.a", code=2))
    assert "minilm#3" in message(compare("minilm#x", "pair.a", code=2))
    assert "checkpoint" in compare("nothing-there#0", "pair.a", code=1).stderr


def test_shapes_and_numbers_that_are_not_finite_are_differences():
    one = np.ones((1, 2, 2))
    broken = one.copy()
    broken[0, 1, 0] = np.nan
    (found,) = differences({"output": broken}, {"output": one})
    assert (found.max_abs, found.where) == (np.inf, {"sequence": 0, "query": 1, "at": 0})
    (found,) = differences({"output": one}, {"output": one[0]})
    assert "shapes differ" in found.note
