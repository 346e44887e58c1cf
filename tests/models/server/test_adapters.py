"""Adapters over real HTTP: variants of a resident base, beside peft's own models."""

import copy
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.conftest import live_server

from attention_client import Client, InvalidCheckpoint, InvalidRequest, ModelNotFound, NotFinite
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.loaded.checked_request import read_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.modules.checkpoints.adapter_files import AdapterFiles

pytest.importorskip("peft", reason="peft writes the adapters")
from tests.models.small_adapters import LLAMA, write_adapter

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
TEXT = "the cat sat on the mat"
CLOSE = 1e-5


def save(model, folder):
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A base, adapters of it, one without a base, refused ones, and a base with an adapter in its own folder."""
    root = tmp_path_factory.mktemp("models")
    base = tiny("llama")
    save(base, root / "org/base")
    own = {
        "sql": write_adapter(base, root / "sql-lora", base_name="org/base", **LLAMA),
        "chat": write_adapter(base, root / "chat-dora", seed=1, base_name="/home/me/base", use_dora=True, **LLAMA),
    }
    write_adapter(base, root / "lost", base_name="org/unknown", **LLAMA)
    shutil.copytree(root / "sql-lora", root / "pissa")
    entry(root / "pissa", init_lora_weights="pissa_niter_16")
    shutil.copytree(root / "sql-lora", root / "ia3")
    entry(root / "ia3", peft_type="IA3")
    shutil.copytree(root / "sql-lora", root / "pickled")
    (root / "pickled/adapter_model.safetensors").rename(root / "pickled/adapter_model.bin")
    shutil.copytree(root / "sql-lora", root / "ranks")
    entry(root / "ranks", r=8)
    shutil.copytree(root / "sql-lora", root / "stray")
    tensors = load_file(root / "stray/adapter_model.safetensors")
    for part in "AB":
        one = tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight"]
        tensors[f"base_model.model.model.layers.9.self_attn.q_proj.lora_{part}.weight"] = one.clone()
    save_file(tensors, root / "stray/adapter_model.safetensors")
    for name, number in (("hot", 3e38), ("spoiled", torch.nan)):
        shutil.copytree(root / "sql-lora", root / name)
        tensors = load_file(root / name / "adapter_model.safetensors")
        for each in (x for part, x in tensors.items() if "lora_A" in part):
            each[0] = number
        save_file(tensors, root / name / "adapter_model.safetensors")
    save(base, root / "both")
    shutil.copytree(root / "sql-lora", root / "both", dirs_exist_ok=True)
    return root, base, own


def entry(folder, **entries):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | entries))


@pytest.fixture(scope="module")
def client(repository):
    with live_server(repository[0]) as url, Client(url, timeout=120) as connected:
        yield connected


@pytest.fixture
def served(client):
    return client.models


def expected(model, text=TEXT):
    with torch.no_grad():
        return model(**tokenizer()(text, return_tensors="pt")).logits[0, -1].numpy()


def logits(reply):
    return np.asarray(reply.logits)[-1]


def test_the_list_names_variants_and_what_is_refused_before_anything_is_loaded(served):
    listed = {each.id: each for each in served.list().data}
    variant = listed["org--base:sql-lora"]
    assert (variant.base, variant.adapter, variant.checkpoint) == ("org--base", "sql-lora", "sql-lora")
    assert (variant.state, variant.takes, variant.generates, variant.refused) == ("idle", ["text"], True, None)
    assert listed["org--base:chat-dora"].base == "org--base"  # by the last part of the path
    assert {"sql-lora", "chat-dora"} < {*listed["org--base"].adapters}
    assert (listed["both"].adapter, listed["both"].adapters) == ("both", [])
    assert "its base is not in the model repository" in listed["lost"].refused
    assert "path_initial_model_for_weight_conversion" in listed["org--base:pissa"].refused
    assert "of kind IA3" in listed["org--base:ia3"].refused
    assert "only adapter_model.bin" in listed["org--base:pickled"].refused
    for name in ("pissa", "ia3", "pickled"):
        with pytest.raises(InvalidCheckpoint):
            served.forward(f"org--base:{name}", TEXT)
    with pytest.raises(InvalidCheckpoint, match="not in the model repository"):
        served.forward("lost", TEXT)
    assert served.get("org--base").state == "idle"


def test_a_variant_answers_as_peft_in_the_process_of_its_base(served, repository):
    _, base, own = repository
    plain = served.forward("org--base", TEXT, return_=["logits"])
    np.testing.assert_allclose(logits(plain), expected(base), atol=CLOSE)
    assert plain.ran.weights == "float32"
    for name, key in (("org--base:sql-lora", "sql"), ("org--base:chat-dora", "chat"), ("sql-lora", "sql")):
        reply = served.forward(name, TEXT, return_=["logits"])
        np.testing.assert_allclose(logits(reply), expected(own[key]), atol=CLOSE)
        assert reply.ran.weights == f"base + adapter {name.rpartition(':')[2]}"
    named = served.forward("org--base", TEXT, return_=["logits"], adapter="chat-dora")
    np.testing.assert_allclose(logits(named), expected(own["chat"]), atol=CLOSE)
    assert sum(each.state == "resident" and each.base is None for each in served.list().data) == 1
    assert served.get("org--base:sql-lora").state == "resident"
    with pytest.raises(InvalidRequest):
        served.forward("org--base:sql-lora", TEXT, adapter="chat-dora")
    with pytest.raises(ModelNotFound, match="no adapter 'none'"):
        served.forward("org--base", TEXT, adapter="none")


def test_every_reply_tells_the_numbers_of_its_run(served):
    """Those of OpenAI's API too, and of the similarity of two texts, which is no reply about one input."""
    for name, numbers in (("org--base", "float32"), ("org--base:sql-lora", "base + adapter sql-lora")):
        alike = served.similarity(name, [[TEXT, TEXT]], alone=True).ran
        assert (alike.weights, alike.joined) == (numbers, 1)
        assert alike.queue_ms > 0
        assert alike.peak_bytes > 0
        for reply in (served.generate(name, TEXT, max_tokens=1), served.embed(name, TEXT, alone=True)):
            assert (reply.ran.weights, reply.ran.joined) == (numbers, 1)
    assert served.similarity("org--base", [[TEXT, TEXT]], adapter="sql-lora").ran.weights == numbers
    assert served.embed("org--base", TEXT, adapter="sql-lora").ran.weights == numbers


def test_weights_gradients_edits_and_recordings_are_the_adapters(served, repository):
    _, _, own = repository
    weights = served.weights("org--base:sql-lora", TEXT)
    with torch.no_grad():
        eager = own["sql"](**tokenizer()(TEXT, return_tensors="pt"), output_attentions=True).attentions
    for layer, other in zip(weights.layers, eager, strict=True):
        np.testing.assert_allclose(layer.weights, other[0], atol=CLOSE)
    found = served.gradients("org--base:sql-lora", TEXT, wrt=["tokens", "hidden"], check=True)
    assert all(each.passed for each in found.check.values())
    assert float(found.value) == pytest.approx(
        float(torch.tensor(expected(own["sql"])).log_softmax(-1).max()), abs=1e-4
    )
    edits = {"0": [{"tap": "context", "heads": [0], "set": 0}]}
    merged = copy.deepcopy(own["sql"]).merge_and_unload()
    assert merged is not None
    changed = served.forward("org--base:sql-lora", TEXT, edits=edits, return_=["logits"], compare="unedited")
    assert np.abs(logits(changed) - expected(own["sql"])).max() > 1e-3
    kept = served.forward("org--base:sql-lora", TEXT, keep=True)
    assert kept.recording
    assert served.complexity("org--base:sql-lora", 8).prefill.flops > served.complexity("org--base", 8).prefill.flops
    assert len(served.embed("org--base:sql-lora", TEXT).data) == 1


def test_generation_is_that_of_peft_alone_and_among_others(client, served, repository):
    _, base, own = repository
    ids = tokenizer()(TEXT, return_tensors="pt")

    def tokens(model):
        found = model.generate(**ids, max_new_tokens=8, do_sample=False)
        return found[0, ids["input_ids"].shape[1] :].tolist()

    wanted = {
        "org--base": tokens(base), "org--base:sql-lora": tokens(own["sql"]), "org--base:chat-dora": tokens(own["chat"]),
    }  # fmt: skip
    assert len({*map(tuple, wanted.values())}) == 3
    fields = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "attention": {"layers": [0]}}
    for name, expected_tokens in wanted.items():
        reply = served.generate(name, **fields)
        assert ([each.id for each in reply.choices[0].attention], reply.model) == (expected_tokens, name)
    beside = served.generate("org--base", **fields, adapter="sql-lora")
    assert [each.id for each in beside.choices[0].attention] == wanted["org--base:sql-lora"]
    names = [*wanted] * 4
    replies = client.map(served.generate, [{"model": name, **fields} for name in names], concurrency=12)
    for name, reply in zip(names, replies, strict=True):
        assert [each.id for each in reply.choices[0].attention] == wanted[name]
    requests = [{"model": name, "text": TEXT} for name in names]
    replies = client.map(served.forward, requests, concurrency=12)
    assert max(reply.ran.joined for reply in replies) > 1
    for name, reply in zip(names, replies, strict=True):
        (alone,) = served.forward(name, TEXT, alone=True).predictions
        assert reply.ran.weights == ("float32" if ":" not in name else f"base + adapter {name.partition(':')[2]}")
        np.testing.assert_allclose(
            [each.logit for each in reply.predictions[0].top], [each.logit for each in alone.top], atol=CLOSE
        )


@pytest.mark.slow
def test_an_adapter_that_overflows_leaves_56_answers_of_the_base_as_they_are(client, served):
    """Of the base in its passes, and after nobody asks for the adapter any more."""
    (alone,) = served.forward("org--base", TEXT, alone=True).predictions
    generated = served.generate("org--base", TEXT, max_tokens=6, temperature=0, alone=True).choices[0].text
    names = ["org--base:hot", *["org--base"] * 7] * 8
    requests = [{"model": name, "text": TEXT} for name in names]
    found = client.map(served.forward, requests, concurrency=8, errors="return")
    found += client.map(served.forward, [{"model": "org--base", "text": TEXT}] * 8, concurrency=8)
    for name, reply in zip([*names, *["org--base"] * 8], found, strict=True):
        assert isinstance(reply, NotFinite) == (name != "org--base")
        if name == "org--base":
            (top,) = reply.predictions
            np.testing.assert_allclose([x.logit for x in top.top], [x.logit for x in alone.top], atol=CLOSE)
    requests = [{"model": name, "prompt": TEXT, "max_tokens": 6, "temperature": 0} for name in names]
    replies = client.map(served.generate, requests, concurrency=8, errors="return")
    of_base = [reply for name, reply in zip(names, replies, strict=True) if name == "org--base"]
    assert {reply.choices[0].text for reply in of_base} == {generated}


def test_an_adapter_with_nan_is_refused_by_the_name_of_its_tensor(served):
    with pytest.raises(InvalidCheckpoint, match=r"layers\.0\..*lora_A.* not finite"):
        served.forward("org--base:spoiled", TEXT)
    assert served.forward("org--base", TEXT).predictions


def test_a_tensor_without_a_place_and_a_rank_that_does_not_fit_are_refused_by_name(served):
    with pytest.raises(InvalidCheckpoint, match=r"asks for rank 8"):
        served.forward("org--base:ranks", TEXT)
    with pytest.raises(InvalidCheckpoint, match=r"changes model\.layers\.9\.self_attn\.q_proj.*no module of this name"):
        served.forward("org--base:stray", TEXT)
    served.forward("org--base", TEXT)  # which goes on


def test_an_adapter_beside_its_base_in_one_folder_applies(served, repository):
    _, _, own = repository
    reply = served.forward("both", TEXT, return_=["logits"])
    np.testing.assert_allclose(logits(reply), expected(own["sql"]), atol=CLOSE)
    assert reply.ran.weights == "base + adapter both"


def test_an_adapter_is_loaded_forgotten_and_its_memory_counted(served, repository):
    root, _, _ = repository
    served.unload("org--base")
    info = served.load("sql-lora")
    assert (info.id, info.state, info.adapter) == ("org--base:sql-lora", "resident", "sql-lora")
    assert states(served) == {"org--base": "resident", "org--base:sql-lora": "resident", "org--base:chat-dora": "idle"}
    with_adapter = served.get("org--base").bytes
    served.unload("org--base:sql-lora")
    assert states(served) == {"org--base": "resident", "org--base:sql-lora": "idle", "org--base:chat-dora": "idle"}
    assert served.get("org--base:sql-lora").state == "idle"
    with pytest.raises(ModelNotFound):
        served.unload("org--base:sql-lora")
    size = (root / "sql-lora/adapter_model.safetensors").stat().st_size
    assert with_adapter - served.get("org--base").bytes >= size
    assert served.load("org/base", adapter="chat-dora").id == "org--base:chat-dora"
    assert served.get("org--base:chat-dora").state == "resident"


def states(served):
    """The states of the base and of the adapters that can be loaded, by the list."""
    return {
        each.id: each.state for each in served.list().data if each.id.startswith("org--base") and each.refused is None
        and each.id.split(":")[-1] not in {"hot", "ranks", "spoiled", "stray"}
    }  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"pool": 2}, {"edits": {"0": [{"tap": "context", "heads": [0], "set": 0}]}}])
def test_an_adapter_is_compared_with_its_base_head_by_head(served, more):
    """In one pass of two rows, and in two passes if the question shares none."""
    reply = served.weights("org--base:sql-lora", TEXT, compare="base", top_k=2, **more)
    base, own = (served.weights(name, TEXT, top_k=2, **more) for name in ("org--base", "org--base:sql-lora"))
    assert reply.ran.weights == "base + adapter sql-lora"
    for layer, plain, changed in zip(reply.layers, base.layers, own.layers, strict=True):
        np.testing.assert_allclose(layer.weights, changed.weights, atol=CLOSE)
        np.testing.assert_allclose(layer.base.weights, plain.weights, atol=CLOSE)
        np.testing.assert_allclose(layer.differences.weights, changed.weights - plain.weights, atol=CLOSE)
        moved = layer.differences.statistics.entropy
        np.testing.assert_allclose(moved, changed.statistics.entropy - plain.statistics.entropy, atol=CLOSE)
        np.testing.assert_array_equal(layer.base.top.keys, plain.top.keys)
    assert max(np.abs(layer.differences.weights).max() for layer in reply.layers) > 0.01


@pytest.mark.parametrize("texts", [TEXT, [TEXT, "the dog"]])
def test_predictions_and_those_of_the_base_are_of_one_pass(repository, texts, monkeypatch):
    root, _, own = repository
    loaded = LoadedModel.load(root / "org/base", dtype=None, device=torch.device("cpu"), progress=lambda _: None)
    adapter = loaded.adapters.load("sql-lora", AdapterFiles.open(root / "sql-lora"))
    request = ModelForwardRequest(text=texts, compare="base", return_=["logits"])
    sizes, run = [], LoadedModel.run
    monkeypatch.setattr(
        LoadedModel, "run", lambda self, x, *a, **more: (sizes.append(len(x["input_ids"])), run(self, x, *a, **more))[1]
    )
    with loaded.adapters.using(adapter):
        checked = replace(read_request(loaded, request), adapter=adapter)
        found = forward_reply(loaded, request, checked)
        count = len(texts) if isinstance(texts, list) else 1
        assert sizes == [2 * count]
        apart = forward_reply(loaded, request.model_copy(update={"alone": True}), checked)
        assert sizes == [2 * count, count, count]
    np.testing.assert_allclose(found.logits, apart.logits, atol=CLOSE)
    for one, other in zip(found.predictions, apart.predictions, strict=True):
        assert (one.text, one.position) == (other.text, other.position)
        assert one.divergence == pytest.approx(other.divergence, abs=CLOSE)
        assert one.divergence > 0
        for each, same in zip(one.top, other.top, strict=True):
            assert (each.id, each.base_logit) == (same.id, pytest.approx(same.base_logit, abs=CLOSE))
    assert not isinstance(texts, str) or np.allclose(logits(found), expected(own["sql"]), atol=CLOSE)


def test_predictions_are_compared_with_those_of_the_base(served):
    (prediction,) = served.forward("org--base:sql-lora", TEXT, compare="base").predictions
    (plain,) = served.forward("org--base", TEXT).predictions
    found = {each.id: each for each in prediction.top}
    for each in plain.top:
        assert found[each.id].base_logit == pytest.approx(each.logit, abs=CLOSE)
        assert found[each.id].base_probability == pytest.approx(each.probability, abs=CLOSE)
    assert prediction.divergence > 0
    with pytest.raises(InvalidRequest) as caught:
        served.weights("org--base", TEXT, compare="base")
    assert caught.value.param == "compare"
