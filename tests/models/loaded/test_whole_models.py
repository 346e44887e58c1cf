"""Whole models of transformers over real HTTP: the numbers of their eager selves, refusals, memory and costs."""

import asyncio
import json

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.conftest import live_server
from tests.models.inputs.images import small_prompts as prompts
from tests.models.inputs.images.small_encoders import noise, png, processor, sent, sharp
from tests.modules.checkpoints.forms.towers.plain_towers import CLIP, openclip_tensors, write_openclip, write_timm
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPConfig, CLIPModel

from attention_client import Client, InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.model_requests import ModelWeightsRequest
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.folders.model_catalogue import find_folder
from attention_service.models.server import worker_process
from attention_service.models.server.model_environment import KeptPrefixes
from attention_service.runtime.device.freed_memory import MUCH, private_bytes

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns, if another test of this process imported it
TEXT = "the cat sat on the mat"
FAMILIES = ("llama", "t5", "deepseek_v32")
TEXT_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client of a server with small models, one of them with Python files that its config names."""
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        tiny(family).save_pretrained(root / family)
        tokenizer().save_pretrained(root / family)
    add_code(root / "llama")
    save_clip(root / "clip")
    prompts.save(root / "gemma3", "gemma3")
    with live_server(root) as url, Client(url, timeout=120) as client:
        with pytest.MonkeyPatch.context() as patch:  # one process starts as the service starts it, which takes seconds
            patch.setattr(worker_process, "create_subprocess_exec", asyncio.create_subprocess_exec)
            client.models.forward("llama", TEXT)
        client.models.root = root
        yield client


@pytest.fixture(scope="module")
def models(client):
    return client.models


def add_code(folder):
    """Add Python files that leave a trace if they run: the classes of the config, and modules that others import."""
    for name in ("code", "numpy", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "code.Own", "AutoConfig": "code.OwnConfig"}
    (folder / "config.json").write_text(json.dumps(config))


def save_clip(folder):
    """Save both halves of a CLIP, with the tokenizer of the one and the image processor of the other."""
    sizes = {**TEXT_SIZES, "image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config=TEXT_SIZES, vision_config=sizes, projection_dim=24)
    sharp(CLIPModel, config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    processor("clip_vision_model").save_pretrained(folder)


@pytest.fixture
def eager():
    return tiny("llama")


def ids():
    return torch.tensor([tokenizer()(TEXT)["input_ids"]])


def test_logits_and_weights_are_those_of_the_eager_model(models, eager):
    with torch.no_grad():
        expected = eager(ids(), output_attentions=True)
    reply = models.forward("llama", TEXT, return_=["logits", "weights"], positions=[*range(6)])
    np.testing.assert_allclose(reply.logits, expected.logits[0], atol=1e-5)
    assert [layer.layer for layer in reply.layers] == [0, 1]
    for layer, weights in zip(reply.layers, expected.attentions, strict=True):
        np.testing.assert_allclose(layer.weights, weights[0], atol=1e-6)
    assert reply.labels.tokens == TEXT.split()
    assert reply.ran.model == "llama"
    looked = models.weights("llama", [TEXT, TEXT], select={"heads": [2], "queries": [3]}, layers=[1], top_k=2)
    (layer,) = looked.layers
    np.testing.assert_allclose(layer.weights[:, 0, 0], expected.attentions[1][[0, 0], 2, 3], atol=1e-6)


def test_each_layer_says_what_it_answers(models):
    models.forward("llama", TEXT)
    info = models.get("llama")
    assert [(layer.layer, layer.kind, layer.refused) for layer in info.layers] == [
        (0, "attention", {}), (1, "attention", {}),
    ]  # fmt: skip
    assert {"weights", "context", "hidden"} <= {*info.layers[0].taps}
    assert {"weights", "output"} <= {*info.layers[0].edits} & {*info.layers[0].gradients}
    assert info.without_weights == {}


@pytest.mark.slow
def test_the_keys_that_an_indexer_chose_are_reported_and_changed(models):
    answer = models.forward("deepseek_v32", TEXT, return_=["index_scores", "chosen", "weights"]).layers[0]
    assert "chosen" in models.get("deepseek_v32").layers[0].taps
    assert answer.chosen.dtype == bool
    assert answer.chosen.shape == answer.index_scores.shape == (6, 6)
    assert (answer.chosen.sum(-1) == [1, 2, 3, 3, 3, 3]).all()  # of the keys that it may see, index_topk
    assert (answer.chosen == (answer.weights > 0).any(0)).all()
    edits = {"0": [{"tap": "index_scores", "keys": [0], "set": 1e4}]}
    changed = models.forward("deepseek_v32", TEXT, return_=["chosen"], layers=[0], edits=edits).layers[0]
    assert changed.chosen[:, 0].all()
    looked = models.weights("deepseek_v32", TEXT, statistics=["chosen_share"], layers=[0])
    assert (looked.layers[0].chosen == answer.chosen).all()
    assert "weights of the keys that each query may look at" in looked.plot("svg").data.decode()
    shares = looked.layers[0].statistics.chosen_share
    assert ((shares > 0) & (shares < 1)).all()
    with pytest.raises(InvalidRequest, match="chosen_share needs"):
        models.weights("llama", TEXT, statistics=["chosen_share"])


def test_edits_of_one_layer_change_what_the_model_predicts(models):
    edits = {"1": [{"tap": "context", "heads": [0], "set": 0}]}
    reply = models.forward("llama", TEXT, edits=edits, compare="unedited")
    assert reply.predictions[0].divergence > 0
    assert models.forward("llama", TEXT, edits={"1": []}, compare="unedited").predictions[0].divergence == 0


def test_effects_of_heads_are_those_of_single_edits(models):
    sweep = {"tap": "context", "over": ["layers", "heads"], "set": 0}
    reply = models.effects("llama", TEXT, sweep=sweep, of={"token": 5}, encoding="base64")
    assert reply.swept == {"layers": [0, 1], "heads": [0, 1, 2, 3]}
    edits = {"1": [{"tap": "context", "heads": [2], "set": 0}]}
    single = models.forward("llama", TEXT, edits=edits, compare="unedited", return_=["logits"])
    logits = np.asarray(single.logits[0], float)
    value = logits[5] - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(reply.effects.value[1, 2], value - reply.baseline, atol=1e-4)
    np.testing.assert_allclose(reply.effects.divergence[1, 2], single.predictions[0].divergence, atol=1e-5)
    assert (reply.labels.tokens, reply.token, reply.ran.model) == (TEXT.split(), [5], "llama")
    assert b"<svg" in reply.plot(width=500).data
    with pytest.raises(InvalidRequest, match="context has no keys") as fault:
        models.effects("llama", TEXT, sweep=sweep | {"over": ["keys"]})
    assert fault.value.param == "sweep.over.0"
    cost = models.complexity("llama", 6, sweep=sweep).sweep
    assert (cost.edits, cost.passes) == (8, 3)
    assert cost.peak_bytes == reply.ran.peak_bytes
    with pytest.raises(InvalidRequest, match="context has no keys"):
        models.complexity("llama", 6, sweep=sweep | {"over": ["keys"]})
    several = models.effects("llama", [TEXT, "the cat"], sweep=sweep, layers=[1])
    assert several.effects.value.shape == (2, 1, 4)


def test_paths_between_heads_over_http(models):
    other = " ".join(reversed(TEXT.split()))
    paths = {"from_": {"layer": 0, "text": other}, "to": {"layer": 1}}
    reply = models.effects("llama", TEXT, **paths, of={"token": 5}, encoding="base64")
    assert [str(end) for end in reply.swept["from"]] == ["0.0", "0.1", "0.2", "0.3"]
    ends = [*(f"1.{head} q" for head in range(4)), *(f"1.{head} {part}" for part in "kv" for head in range(2))]
    assert [str(end) for end in reply.swept["to"]] == ends
    assert reply.effects.value.shape == reply.effects.divergence.shape == (4, 8)
    assert np.isfinite(reply.effects.value).all()
    assert b"<svg" in reply.plot(width=500).data
    cost = models.complexity("llama", 6, **paths).sweep
    assert (cost.edits, cost.passes) == (32, 8)  # two texts, and two passes each for queries, keys and values
    assert cost.peak_bytes == reply.ran.peak_bytes
    direct = models.effects("llama", [TEXT, other], from_={"parts": ["heads", "mlps", "embeddings"], "set": "mean"})
    assert direct.effects.value.shape == (2, 11, 1)
    with pytest.raises(InvalidRequest, match="no attention") as fault:
        models.effects("llama", TEXT, from_={"layer": 7})
    assert fault.value.param == "from.layer"
    with pytest.raises(InvalidRequest, match="no attention"):
        models.complexity("llama", 6, from_={"layer": 7})


@pytest.mark.slow
def test_gradients_are_those_of_the_eager_model(models, eager):
    table = eager.get_input_embeddings()(ids()).detach().requires_grad_()
    value = eager(inputs_embeds=table).logits[0, -1].log_softmax(-1)[5]
    (expected,) = torch.autograd.grad(value, table)
    reply = models.gradients("llama", TEXT, of={"token": 5}, wrt=["tokens", "embeddings", "weights"], check=True)
    np.testing.assert_allclose(reply.embeddings, expected[0], atol=1e-4)
    np.testing.assert_allclose(reply.value, value.item(), rtol=1e-5)
    assert [layer.gradients["weights"].shape for layer in reply.layers] == [(4, 6, 6)] * 2
    assert all(each.passed for each in reply.check.values())


def test_a_head_that_is_knocked_out_is_zero_before_the_projection(models, eager):
    answer = models.forward(
        "llama", TEXT, edits={"1": [{"tap": "context", "heads": [2], "set": 0}]}, compare="unedited", top_k=3
    ).predictions[0]
    with torch.no_grad():
        before = eager(ids()).logits[0, -1].double()
        width = eager.config.head_dim
        hook = eager.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
            lambda _, inputs: (inputs[0].index_fill(-1, torch.arange(2 * width, 3 * width), 0.0),)
        )
        after = eager(ids()).logits[0, -1].double()
        hook.remove()
    chosen = [token.id for token in answer.top]
    assert set(chosen) == {*before.topk(3).indices.tolist(), *after.topk(3).indices.tolist()}
    np.testing.assert_allclose([token.logit for token in answer.top], after[chosen], atol=1e-5)
    np.testing.assert_allclose(
        [token.unedited_probability for token in answer.top], before.softmax(-1)[chosen], atol=1e-6
    )
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    assert answer.divergence == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)


@pytest.mark.slow  # a process of its own; without one, test_loaded_model has the numbers of T5
def test_pairs_answer_too(models):
    reply = models.weights("t5", TEXT, target="die Katze", layers=["cross.1"])
    assert reply.layers[0].weights.shape[-1] == len(reply.encoder_labels.ids)
    info = models.get("t5")
    assert {"text", "target"} <= set(info.takes)
    assert [layer.layer for layer in info.layers][:2] == ["encoder.0", "encoder.1"]


@pytest.mark.sampled(name=1)
@pytest.mark.parametrize("name", ["llama", "clip", pytest.param("t5", marks=pytest.mark.slow)])
def test_an_idle_model_says_what_it_takes_and_whether_it_generates(models, name):
    idle, resident = find_folder(models.root, name).info(name, None), models.load(name)
    assert (idle.state, resident.state) == ("idle", "resident")
    assert (sorted(idle.takes), idle.generates) == (sorted(resident.takes), resident.generates)
    tiny = find_folder(models.root, "tiny").info("tiny", None)
    assert (tiny.takes, tiny.generates) == (["text", "messages"], True)


@pytest.mark.slow
def test_an_image_goes_in_and_attention_comes_out(client, models, tmp_path):
    image, path = Image.fromarray(noise()), tmp_path / "noise.png"
    path.write_bytes(png(noise()))
    reply = models.weights("clip", images=[path], top_k=1)
    made = processor("clip_vision_model")(images=[image], return_tensors="pt")
    whole = CLIPModel.from_pretrained(models.root / "clip", attn_implementation="eager")
    with torch.no_grad():
        expected = whole.vision_model(**made, output_attentions=True).attentions
        vector = whole.get_image_features(**made).pooler_output
    for layer, weights in zip(reply.layers, expected, strict=True):
        np.testing.assert_allclose(layer.weights, weights[0], atol=1e-6)
    assert reply.labels.tokens[:2] == ["CLS", "[0,0]"]
    assert len(reply.labels.rectangles) == 17
    large = path.read_bytes() + bytes(13 * 2**20)  # more than a header of safetensors holds
    pooled = [
        models.forward("clip", images=[each], return_=["pooled"]).pooled for each in (path.read_bytes(), image, large)
    ]
    for each in pooled:
        np.testing.assert_allclose(each, vector[0], atol=1e-5)
    assert models.get("clip").takes == ["text", "images"]
    drawn = client.plot("png", view="image", width=400).of(models.weights, "clip", images=[image], layers=["vision.1"])
    assert drawn.data[:4] == b"\x89PNG"
    assert len(reply.request_names.images) == 1
    with pytest.raises(InvalidRequest) as caught:
        client.plot(view="image").of(models.weights, "llama", TEXT, layers=[1])
    assert caught.value.param == "view"


def test_a_text_and_an_image_are_compared(models, tmp_path):
    image, path = Image.fromarray(noise()), tmp_path / "noise.png"
    path.write_bytes(png(noise()))
    reply = models.similarity("clip", [[TEXT, path], [image, "the cat"]])
    whole = CLIPModel.from_pretrained(models.root / "clip", attn_implementation="eager")
    made = processor("clip_vision_model")(images=[image], return_tensors="pt")
    with torch.no_grad():
        seen = whole.get_image_features(**made).pooler_output
        read = [
            whole.get_text_features(torch.tensor([tokenizer()(each)["input_ids"]])).pooler_output
            for each in (TEXT, "the cat")
        ]
        expected = torch.nn.functional.cosine_similarity(torch.cat(read), seen)
    np.testing.assert_allclose(reply.similarity, expected, atol=1e-5)
    assert reply.labels[0][1].rectangles == reply.labels[1][0].rectangles
    assert [len(side) for side in reply.tokens[0]] == [len(side.tokens) for side in reply.labels[0]]
    both = models.weights("clip", TEXT, images=[path])
    assert [layer.layer for layer in both.layers] == [0, 1, "vision.0", "vision.1"]
    assert (both.labels.tokens[0], both.image_labels[0].tokens[0]) == (TEXT.split(maxsplit=1)[0], "CLS")
    for pairs, param in (([[TEXT, path], [TEXT, b"no image"]], "pairs.1.1"), ([[TEXT, "the " * 99]], "pairs.0.1")):
        with pytest.raises(InvalidRequest) as caught:
            models.similarity("clip", pairs)
        assert caught.value.param == param
    with pytest.raises(InvalidRequest, match="puts no image into one space") as caught:
        models.similarity("llama", [[TEXT, path]])
    assert caught.value.param == "pairs"


@pytest.mark.slow  # processes of their own; without these, tests/modules/checkpoints/forms/towers has the numbers
@pytest.mark.parametrize("name", ["timm", "openclip"])
def test_a_folder_of_another_library_is_listed_loaded_and_answers(models, name):
    if name == "timm":
        write_timm(models.root / name, "dinov2-registers")
    else:
        write_openclip(models.root / name, CLIP, openclip_tensors())
    (idle,) = [each for each in models.list().data if each.id == name]
    resident, image = models.load(name), [png(noise())]
    assert (idle.takes, idle.architecture, idle.stored) == (["images"], resident.architecture, resident.stored)
    reply = models.weights(name, images=image)
    assert reply.ran.weights == idle.stored
    assert reply.ran.architecture == idle.architecture


@pytest.mark.slow  # a process of its own; without one, images/test_prompts and test_image_generation have the numbers
def test_a_word_and_a_generated_token_look_at_an_image(models):
    name = "gemma3"
    fields = {"images": [png(noise(60, 44))]}
    reply = models.weights(name, "what is on the mat", **fields, layers=[1, "vision.0"])
    expected = weights_reply(
        prompts.loaded("gemma3"),
        ModelWeightsRequest(text="what is on the mat", images=[sent(noise(60, 44))], layers=[1, "vision.0"]),
    )
    for layer, own in zip(reply.layers, expected.layers, strict=True):
        np.testing.assert_allclose(layer.weights, own.weights, atol=1e-6)
    assert reply.labels.tokens[:3] == ["<boi>", "[0,0]", "[0,1]"]
    assert reply.tokens_of("vision.0")[0].tokens[:2] == ["[0,0]", "[0,1]"]
    assert models.get(name).takes == ["text", "messages", "images"]
    url = f"data:image/png;base64,{sent(noise(60, 44))['base64']}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is on the mat"}]
    answer = models.chat(name, [{"role": "user", "content": parts}], max_tokens=2, attention={"top_k": 1})
    labels = models.forward(name, messages=[{"role": "user", "content": parts}]).labels
    assert answer.choices[0].attention[0].position == len(labels.tokens)


@pytest.mark.parametrize(
    ("images", "param"),
    [
        ([bytes(9)], "images.0"),
        ([png(noise()), png(Image.new("1", (9000, 9000)))], "images.1"),
        (["no.png"], "images.0"),
    ],
)
def test_images_that_cannot_be_read_are_named(models, images, param):
    with pytest.raises(InvalidRequest) as caught:
        models.forward("clip", images=images)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"layers": [7], "return_": ["weights"]}, "layers.0"),
        ({"edits": {"9": []}}, "edits.9"),
        ({"select": {"heads": [4]}, "return_": ["weights"]}, "select.heads"),
        ({"edits": {"0": [{"tap": "weights", "heads": [9], "set": 0}]}}, "edits.0.0.heads"),
        ({"positions": [99]}, "positions.0"),
        ({"text": None, "tokens": [10**6]}, "tokens"),
        ({"target": "die"}, "target"),
        ({"images": [png(noise())]}, "images"),
        ({"text": "the cat " * 40}, "text"),
    ],
)
def test_what_a_model_does_not_have_is_named(models, more, param):
    with pytest.raises(InvalidRequest) as caught:
        models.forward("llama", **{"text": TEXT} | more)
    assert caught.value.param == param


def test_a_kept_run_is_a_recording_with_the_models_numbers(client, models, eager):
    kept = models.forward("llama", TEXT, keep=True, return_=["q", "context"]).recording
    recording = client.recordings.download(kept)
    with torch.no_grad():
        expected = eager(ids(), output_attentions=True, output_hidden_states=True)
    for number, weights in enumerate(expected.attentions):
        np.testing.assert_allclose(recording.tensors[f"layers.{number}.weights"], weights[0], atol=1e-6)
    assert recording.tensors["layers.1.q"].shape == recording.tensors["layers.1.context"].shape == (4, 6, 8)
    np.testing.assert_allclose(recording.tensors["layers.0.hidden"], expected.hidden_states[1][0], atol=1e-5)


def test_no_python_file_of_a_checkpoint_runs(models):
    """Checkpoints are data, also one whose config names code of its own."""
    assert models.forward("llama", tokens=[1, 2]).predictions
    assert (models.root / "llama/code.py").exists()
    assert not (models.root / "llama/ran").exists()


def test_a_type_that_only_its_own_code_knows_is_refused(models):
    folder = models.root / "coded"
    tiny("llama").save_pretrained(folder)
    add_code(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    with pytest.raises(InvalidCheckpoint, match="no code of a checkpoint is run"):
        models.forward("coded", tokens=[1, 2])
    assert not (folder / "ran").exists()


def test_the_cost_of_a_pass_is_that_of_its_matrix_products(models, eager):
    length = 48
    costs = models.complexity("llama", length, new_tokens=8)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        eager(torch.ones(1, length, dtype=torch.int64), logits_to_keep=1)
    config = eager.config
    pairs = length * length - length * (length + 1) // 2  # that the causal mask forbids
    forbidden = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    assert costs.prefill.flops == counter.get_total_flops() - forbidden
    assert costs.parameters == sum(each.numel() for each in eager.parameters())
    assert (
        costs.cache_bytes_per_token == 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    )
    assert costs.cache_bytes == (length + 8) * costs.cache_bytes_per_token
    assert costs.max_length == 64
    assert costs.max_batch > 1000
    assert costs.total_ms == pytest.approx(costs.prefill.predicted_ms + 8 * costs.per_token.predicted_ms)


def test_a_process_holds_what_was_estimated(models):
    """That of the model whose process started as the service starts it; the others share their imports."""
    for _ in range(3):
        models.weights("llama", [TEXT] * 8)
    children = [each for each in psutil.Process().children() if each.cmdline()[-1].endswith(".process")]
    (held,) = map(private_bytes, children)
    (estimate,) = [each.bytes for each in models.list().data if each.id == "llama"]
    kept = MUCH + KeptPrefixes(2**29).of(0)  # for the next requests
    assert held / 1.2 < estimate < 1.2 * (held + kept)  # a small model takes little beside its imports


@pytest.mark.slow
def test_twenty_loads_and_evictions_leave_nothing(models):
    """In the server's process, besides what the first rounds leave."""
    process, held = psutil.Process(), []
    others = set(process.children())
    for _ in range(23):
        models.load("llama", name="passing")
        models.weights("passing", [TEXT] * 8)
        models.unload("passing")
        held.append(process.memory_info().rss)
    assert held[-1] <= 1.02 * held[2]
    assert set(process.children()) <= others
