"""Recordings whose attention runs in modules that the server imports from the model's own checkpoint."""

from dataclasses import replace

import numpy as np
import pytest

from attention_client import Client
from attention_client.recording import Recording, record
from attention_client.recording.checkpoint_model import path_in_repository
from attention_transformers.model_layers import UnsupportedModel
from tests.client import tiny_models
from tests.client.cli.command_line import invoke
from tests.conftest import live_server
from tests.modules.checkpoints.test_families import TINY, built

TEXT, TARGET = "the cat sat on the mat", "die Katze saß"
TAPS = ("q", "k", "v", "scores", "weights", "context")
FAMILIES = [("bert", None), ("gpt2", None), ("llama", None), ("t5", TARGET), ("bart", TARGET)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def url(root):
    with live_server(root) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with Client(url) as client:
        yield client


def compared(remote, local):
    """Compare a recording with that of eager attention."""
    assert remote.attentions == local.attentions
    assert remote.facts.tokens == local.facts.tokens
    for name, expected in local.tensors.items():
        tolerance = 5e-6 if name.endswith("weights") else 2e-5  # a later layer has the roundings of those before
        np.testing.assert_allclose(remote.tensors[name], expected, atol=tolerance, rtol=0, err_msg=name)


@pytest.mark.sampled(family=2)
@pytest.mark.parametrize(("family", "target"), FAMILIES)
def test_modules_of_the_checkpoint_give_the_numbers_of_eager_attention(family, target, tokenizer, client, root):
    model = tiny_models.model(family)
    model.save_pretrained(root / family)
    local = record(model, tokenizer, TEXT, target=target)
    remote = record(model, tokenizer, TEXT, taps=TAPS, target=target, client=client, checkpoint=family)
    compared(remote, local)
    assert (local.facts.computed, remote.facts.computed) == ("local", "modules")
    for attention in remote.attentions:
        kinds = {name.rpartition(".")[2] for name in remote.tensors if name.rpartition(".")[0] == attention.name}
        assert kinds >= set(TAPS)
    assert client.modules.list().modules == []
    raw = record(model, tokenizer, TEXT, target=target, client=client)
    assert raw.facts.computed == "raw"
    compared(raw, local)


TEXT_MODELS = {
    tiny.family: tiny for tiny in reversed(TINY) if tiny.model_type is not None and "input_ids" in tiny.inputs
}
"""One model of each family that reads a text."""
UNRECORDED = {"longformer"}
"""Families that pad the text."""


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(TEXT_MODELS) - UNRECORDED))
def test_every_family_that_reads_a_text_runs_in_modules(family, tokenizer, client, root):
    model = built(TEXT_MODELS[family])
    model.save_pretrained(root / f"every-{family}")
    target = TARGET if model.config.is_encoder_decoder else None
    local = record(model, tokenizer, TEXT, target=target)
    remote = record(model, tokenizer, TEXT, target=target, client=client, checkpoint=f"every-{family}")
    assert remote.facts.computed == "modules"
    compared(remote, local)


def test_a_family_that_pads_the_text_is_refused_and_not_recorded_wrong(tokenizer, client, root):
    tiny = TEXT_MODELS["longformer"]  # six tokens become eight, of which each layer takes four at once
    model = built(replace(tiny, build=replace(tiny.build, options=tiny.build.options | {"attention_window": [4, 4]})))
    model.save_pretrained(root / "padded")
    with pytest.raises(UnsupportedModel, match="attention interface"):  # nor can it send q, k and v
        record(model, tokenizer, TEXT, client=client, checkpoint="padded")
    assert client.modules.list().modules == []


def test_resident_modules_of_the_same_content_are_used_and_stay(tokenizer, client, root):
    model = tiny_models.model("gpt2")
    model.save_pretrained(root / "kept")
    kept = client.modules.import_("kept", layer=0)
    other = client.modules.create("kept.1", {"d_model": 8, "num_heads": 2})
    seen = []
    forward, client.forward = (
        client.forward,
        lambda name, *args, **more: seen.append(name) or forward(name, *args, **more),
    )
    try:
        remote = record(model, tokenizer, TEXT, client=client, checkpoint="kept")
    finally:
        del client.forward
    assert seen[0] == "kept.0"
    assert seen[1].startswith("recording-")
    assert {module.name: module.version for module in client.modules.list().modules} == {
        "kept.0": kept.version,
        "kept.1": other.version,
    }
    compared(remote, record(model, tokenizer, TEXT))
    client.modules.delete("kept.0")
    client.modules.delete("kept.1")


def unknown(root):
    return tiny_models.model("gpt2"), "no-such"


def of_another_model(root):
    tiny_models.model("gpt2", initializer_range=0.1).save_pretrained(root / "other")
    return tiny_models.model("gpt2"), "other"


def of_other_names(root):
    tiny_models.model("llama").save_pretrained(root / "named")
    return tiny_models.model("gpt2"), "named"


def outside(root):
    return tiny_models.model("gpt2"), "/etc"


@pytest.mark.sampled(case=2)
@pytest.mark.parametrize("case", [unknown, of_another_model, of_other_names, outside])
def test_a_checkpoint_that_is_not_the_models_leaves_its_own_q_k_and_v(case, tokenizer, client, root):
    model, checkpoint = case(root)
    remote = record(model, tokenizer, TEXT, client=client, checkpoint=checkpoint)
    assert remote.facts.computed == "raw"
    compared(remote, record(model, tokenizer, TEXT))
    assert client.modules.list().modules == []


def test_a_failing_pass_leaves_no_module_and_the_models_own_attention(tokenizer, client, root):
    model = tiny_models.model("gpt2")
    model.save_pretrained(root / "failing")
    hook = model.ln_f.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        record(model, tokenizer, TEXT, client=client, checkpoint="failing")
    hook.remove()
    assert client.modules.list().modules == []
    compared(record(model, tokenizer, TEXT), record(tiny_models.model("gpt2"), tokenizer, TEXT))


@pytest.mark.slow
def test_the_command_runs_modules_of_the_checkpoint(tokenizer, url, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTENTION_MODELS_DIR", str(root))
    tiny_models.model("gpt2").save_pretrained(root / "org" / "gpt2")
    tokenizer.save_pretrained(root / "org" / "gpt2")
    for place in ("org/gpt2", str(root / "org" / "gpt2")):
        result = invoke(["--url", url, "record", place, TEXT], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        assert "in modules of the checkpoint" in result.output
        assert Recording.load("recording.safetensors").facts.computed == "modules"


def test_the_path_in_the_repository(tmp_path, monkeypatch):
    (tmp_path / "models" / "org" / "net").mkdir(parents=True)
    (tmp_path / "net").mkdir()
    monkeypatch.chdir(tmp_path)
    for given, expected in [
        ("models/org/net", "org/net"),
        (str(tmp_path / "models" / "org" / "net"), "org/net"),
        ("org/net", "org/net"),
        ("net", "net"),
        ("models", "models"),
    ]:
        assert path_in_repository(given, tmp_path / "models") == expected
