"""``attention explain`` against a live server: its numbers against PyTorch's, for any spec."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.client.cli.command_line import invoke

SPECS = {
    "plain": {},
    "capped and biased": {
        "softcap": 5.0,
        "position": {"name": "relative_bias", "num_buckets": 8, "max_distance": 8},
        "masks": [{"name": "causal"}],
    },
    "alibi": {"position": {"name": "alibi"}, "masks": [{"name": "sliding_window", "left": 1, "right": 0}]},
    "rope": {"position": {"name": "rope"}, "qk_norm": {}},
    "bilinear": {"score": {"name": "bilinear"}, "normalizer": {"name": "sparsemax"}},
    "additive": {"score": {"name": "additive", "hidden": 3}, "normalizer": {"name": "sigmoid"}},
    "sinks": {"normalizer": {"name": "softmax", "sinks": True}, "add_zero_attn": True},
    "linear": {"method": {"name": "linear"}},
    "delta": {"method": {"name": "linear", "rule": "gated_delta"}, "masks": [{"name": "causal"}]},
    "nystrom": {"method": {"name": "nystrom", "landmarks": 2}},
    "linformer": {"method": {"name": "linformer", "rank": 2, "length": 4}},
}


@pytest.fixture
def explained(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def explained(*arguments, code=0):
        result = invoke(["--url", server, "explain", *arguments])
        assert result.exit_code == code, result.output
        return result

    return explained


@pytest.fixture(scope="module")
def module(client):
    client.modules.create("told", {"d_model": 8, "num_heads": 4, "num_kv_heads": 2}, seed=3)
    return "told"


def steps(found, direction):
    return {step["symbol"]: np.array(step["values"], np.float64) for step in found[direction]}


def test_every_step_has_pytorchs_numbers(explained):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 3, 5, 4))
    upstream = rng.normal(size=(2, 3, 5, 4))
    np.savez("in.npz", query=q, key=k, value=v)
    np.save("up.npy", upstream)
    options = ("in.npz", "--sequence", "1", "--head", "2", "--row", "3", "--upstream", "up.npy", "--json")
    found = json.loads(explained("--raw", "--inputs", *options, "--spec", '{"softcap": 2.0}').stdout)

    at = [torch.tensor(x[1, 2], requires_grad=True) for x in (q, k, v)]
    row = at[0][3].detach().requires_grad_()
    raw = at[1] @ row
    scores = raw / 2
    capped = 2 * torch.tanh(scores / 2)
    weights = torch.softmax(capped, 0)
    context = weights @ at[2]
    kept = {"s": scores, "c(s)": capped, "w": weights, "c": context}
    for tensor in kept.values():
        tensor.retain_grad()
    context.backward(torch.tensor(upstream[1, 2, 3]))
    kept |= {"q": row, "k": at[1], "v": at[2]}
    forward, backward = steps(found, "forward"), steps(found, "backward")
    for symbol, tensor in kept.items():
        np.testing.assert_allclose(forward[symbol], tensor.detach(), atol=1e-12)
        np.testing.assert_allclose(backward[f"∂L/∂{symbol}"], tensor.grad, atol=1e-12)
    np.testing.assert_allclose(forward["q·k"], raw.detach(), atol=1e-12)
    np.testing.assert_allclose(forward["o"], context.detach(), atol=1e-12)
    assert found["consistent"]
    assert len(found["checks"]) == 2


@pytest.mark.sampled(spec=4)
@pytest.mark.parametrize("spec", SPECS)
def test_any_spec_is_explained_on_built_in_inputs(explained, spec):
    found = json.loads(explained("--spec", json.dumps(SPECS[spec]), "--json").stdout)
    assert found["consistent"]
    names = [step["tap"] for step in found["forward"]]
    if "method" in SPECS[spec]:
        assert names == ["q", "k", "v", "context", "output"]
        assert "no weight for a pair" in found["notes"][0]
    else:
        assert {"scores", "masked_scores", "weights"} <= {*names}
    assert all(step["formula"] for step in found["forward"] + found["backward"])
    assert all(re.fullmatch(r"[A-Z].+\.", step["sentence"]) for step in found["forward"] + found["backward"])


def test_a_module_is_explained_on_its_own_inputs(explained, module, client):
    found = json.loads(explained(module, "--head", "3", "--row", "1", "--seed", "5", "--json").stdout)
    assert "sums over the 2 query heads" in found["notes"][0]
    x = np.random.default_rng(5).normal(size=(1, 4, 8)).round(1).astype(np.float32)
    reply = client.forward(module, x, return_=["output", "weights"])
    upstream = np.zeros_like(x)
    upstream[0, 1] = 1
    gradients = client.gradients(module, x, upstream=upstream, wrt=["k", "scores"]).gradients
    forward, backward = steps(found, "forward"), steps(found, "backward")
    np.testing.assert_allclose(forward["w"], reply.weights[0, 3, 1], atol=1e-6)
    np.testing.assert_allclose(forward["o"], reply.output[0, 1], atol=1e-6)
    np.testing.assert_allclose(backward["∂L/∂k"], gradients["k"][0, 1], atol=1e-6)
    np.testing.assert_allclose(backward["∂L/∂s"], gradients["scores"][0, 3, 1], atol=1e-6)


@pytest.mark.parametrize("layout", ["[L, D]", "[H, L, D]", "[B, L, H·D]", "[L, H·D]"])
def test_every_layout_is_explained(explained, layout):
    x = np.random.default_rng(1).normal(size=(2, 3, 4))  # [H, L, D]
    flat = x.transpose(1, 0, 2).reshape(3, 8)
    sent = {"[L, D]": x[1], "[H, L, D]": x, "[B, L, H·D]": flat[None], "[L, H·D]": flat}[layout]
    np.save("x.npy", sent)
    same = ("--raw", "--query", "x.npy", "--key", "x.npy", "--value", "x.npy", "--row", "1", "--json")
    heads = ("--num-heads", "2") if "H·D" in layout else ()
    head = () if layout == "[L, D]" else ("--head", "1")
    found = json.loads(explained(*same, *heads, *head).stdout)
    assert found["consistent"]
    scores = x[1] @ x[1, 1] / 2
    weights = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(steps(found, "forward")["w"], weights, atol=1e-12)
    np.testing.assert_allclose(steps(found, "forward")["c"], weights @ x[1], atol=1e-12)
    np.testing.assert_allclose(steps(found, "backward")["∂L/∂w"], x[1].sum(-1), atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_the_checks_know_the_dtype_of_a_module(explained, client, dtype):
    name = f"told.{dtype}"
    client.modules.create(name, {"d_model": 16, "num_heads": 2, "dtype": dtype}, seed=1)
    found = json.loads(explained(name, "--json").stdout)
    assert found["consistent"]


def test_people_read_formulas_numbers_and_checks(explained):
    shown = explained("--spec", '{"masks": [{"name": "causal"}]}', "--row", "1").stdout
    for text in ("query 1 of head 0", "forward", "backward", "∂L/∂w", "−∞", "exp(s_j/T)", "Σ_j w_j v_j = c holds"):
        assert text in shown


@pytest.mark.slow
def test_the_steps_are_drawn(explained, module):
    explained("--keys", "2", "--figure", "steps.svg")
    assert b"<?xml" in Path("steps.svg").read_bytes()[:200]
    explained(module, "--keys", "1", "--spec", "{}", "--figure", "steps.png", code=2)  # the spec is the module's
    explained(module, "--keys", "1", "--figure", "steps.png")
    assert Path("steps.png").read_bytes().startswith(b"\x89PNG")


def test_an_edit_is_explained_as_the_edit_says(explained):
    edits = '[{"tap": "weights", "keys": [0], "set": 0}]'
    found = json.loads(explained("--edits", edits, "--json").stdout)
    assert steps(found, "forward")["w"][0] == 0
    assert [*found["checks"]] == ["Σ_j w_j v_j = c"]


def test_bad_requests_name_the_option(explained, module):
    assert "row: there is no 9; the output has 4" in explained("--row", "9", code=1).stderr
    assert "sequence" in explained(module, "--sequence", "2", code=1).stderr
    assert "head" in explained("--head", "7", code=1).stderr
    np.save("up.npy", np.ones(3))
    assert "expected the output's shape [1, 2, 4, 4], got [3]" in explained("--upstream", "up.npy", code=1).stderr
    assert ".svg" in explained("--figure", "steps.txt", code=2).stderr


def test_sentences_name_the_keys_of_the_largest_numbers(explained):
    query, keys, values = [[1.0, 0.0]], [[1.0, 0.0], [3.0, 0.0], [2.0, 0.0]], [[0.0], [1.0], [0.0]]
    Path("in.json").write_text(json.dumps({"query": query, "key": keys, "value": values}))
    spec = {"score": {"name": "dot"}, "masks": [{"name": "sliding_window", "left": None, "right": 1}]}
    found = json.loads(explained("--inputs", "in.json", "--spec", json.dumps(spec), "--json").stdout)
    sentences = {step["symbol"]: step["sentence"] for step in found["forward"] + found["backward"]}
    assert "key 1 (3) and the next of key 2 (2)" in sentences["s"]
    assert "1 of 3 keys are hidden" in sentences["m"]
    assert "key 1 (0.8808) and the next of key 0 (0.1192)" in sentences["w"]
    assert "key 1 raises the loss most (1)" in sentences["∂L/∂w"]
    assert "key 1 raises the loss most (0.105), key 0 lowers it most (-0.105)" in sentences["∂L/∂m"]


@pytest.mark.slow
def test_a_whole_model_is_explained_by_one_of_its_layers(explained, client):
    pytest.importorskip("transformers")
    text = "Kate met Tom. Then Kate"
    options = ("tiny", "--layer", "2", "--head", "1", "--row", "5", "--text", text, "--json")
    found = json.loads(explained(*options).stdout)
    assert found["consistent"]
    assert found["checks"]["w = the weights of tiny"] < 1e-6
    assert "layer 2 of tiny; tokens: 0 '<|begin|>' 1 'Kate'" in found["notes"][0]
    reply = client.models.forward("tiny", text, layers=[2], return_=["weights", "v"], top_k=0)
    weights, values = reply.layers[0].weights[1, 5], reply.layers[0].v[1]
    np.testing.assert_allclose(steps(found, "forward")["w"], weights, atol=1e-6)
    np.testing.assert_allclose(steps(found, "forward")["c"], weights @ values, atol=1e-5)
    np.testing.assert_allclose(steps(found, "backward")["∂L/∂w"], values.sum(-1), atol=1e-5)
    assert "Together they are 1." in explained("tiny").stdout  # every option has a default
    behind = json.loads(explained("tiny", text, *options[1:-3], "--json").stdout)
    assert behind == found
    assert "given twice" in explained("tiny", text, "--text", text, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "detail"),
    [
        (("nobody",), "no module is named 'nobody'"),
        (("tiny", "--layer", "9"), "has no attention '9'"),
        (("tiny", "--layer", "x"), "layers"),
        (("tiny", "--head", "7"), "there is no 7"),
        (("--text", "x"), "NAME is none"),
        (("nobody", "the cat sat"), "no model 'nobody'"),
        (("tiny", "missing.npy"), "missing.npy: No such file"),
    ],
)
def test_a_model_or_a_layer_that_is_not_there_is_reported(explained, arguments, detail):
    pytest.importorskip("transformers")
    code = 2 if "NAME" in detail or "file" in detail else 1
    assert detail in " ".join(explained(*arguments, code=code).output.split())
