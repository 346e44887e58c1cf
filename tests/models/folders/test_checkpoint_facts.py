"""What the files of a checkpoint tell before a process is started: inputs, refusals, and one row for each folder."""

import json
import struct
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from tests.api.talk import post, refuse
from tests.client.tiny_models import tokenizer
from tests.models.conftest import write_checkpoint
from tests.models.inputs.sounds.small_sounds import HEARS
from tools.models_walk.small_configs import small_config
from transformers.models.auto import configuration_auto, modeling_auto

from attention_contract.errors import CheckpointNotFound, InvalidCheckpoint
from attention_service.models.folders import checkpoint_facts, model_catalogue
from attention_service.models.folders.input_kinds import HEARD, READS
from attention_service.models.folders.model_catalogue import find_folder
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.modules.checkpoints import catalogue

WHISPER = {
    "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True,
}  # fmt: skip
needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs the extra offload")
SOUND = {"feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": 16000, "feature_size": 80}


def checkpoint(folder, config=None, files=(), tensors=("x",)):
    """Write a checkpoint of a Llama with other entries of its config, and other files beside."""
    write_checkpoint(folder)
    kept = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(kept | (config or {})))
    save_file(dict.fromkeys(tensors, np.zeros(4, np.float32)), folder / "model.safetensors")
    for name, content in dict(files).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def quantized(**entries):
    return {"quantization_config": entries}


REFUSED = {
    "audio": (
        {"config": {"model_type": "encodec"}, "files": {"preprocessor_config.json": SOUND}},
        "encodec read audio",
    ),
    "no-type": ({"config": {"model_type": None}}, "has no model_type"),
    "own-code": ({"config": {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}}, "no code of a check"),
    "newer": ({"config": {"model_type": "of-next-year"}}, "does not know model_type 'of-next-year'"),
    "too-many-layers": ({"config": {"num_hidden_layers": 2**31}}, "num_hidden_layers 2147483648, and its files have"),
    "too-many-experts": ({"config": {"text_config": {"num_experts": 1e300}}}, "says num_experts 1e+300"),
    "4-bit": ({"config": quantized(load_in_4bit=True)}, "FP4; this server reads NF4"),
    "gptq": ({"config": quantized(quant_method="gptq", bits=3)}, "GPTQ of 3 bits is not read"),
    "in-text": ({"config": {"text_config": quantized(quant_method="awq")}}, "AWQ of None bits"),
    "of-package": ({"config": quantized(quant_method="quark")}, "transformers needs quark for it"),
    "unheard": ({"config": quantized(quant_method="of-mine")}, "of-mine is none of compressed-tensors"),
    "spared-by-expression": (
        {"config": quantized(quant_method="mxfp4", modules_to_not_convert=["lm_head", "(a+)+b"])},
        "modules_to_not_convert of its quantization_config has '(a+)+b'"
        if find_spec("accelerate")
        else "needs accelerate",
    ),
    "spared-otherwise": (
        {"config": quantized(quant_method="mxfp4", modules_to_not_convert={"lm_head": 1})},
        "is no list of names" if find_spec("accelerate") else "needs accelerate",
    ),
    "scales": (
        {"tensors": ["layers.0.q_proj.weight", "layers.0.q_proj.weight_scale"]},
        "weight_scale belongs to quant",
    ),
    "lora": ({"tensors": ["q.weight", "base_model.model.q.lora_A.weight"]}, "lora_A.weight belongs to an adapter"),
    "adapter": (
        {"files": {"adapter_config.json": {}}},
        "of the adapter beside the model: its adapter_config.json has no r",
    ),
    "adapter-weights": ({"files": {"adapter_model.safetensors": ""}}, "adapter_model.safetensors lies beside"),
    "distributed": ({"files": {"shard-00001-model-00001-of-00002.safetensors": ""}}, "distributed checkpoint"),
}


def test_files_of_other_names_are_refused(tmp_path):
    (checkpoint(tmp_path / "net") / "model.safetensors").rename(tmp_path / "net" / "weights.safetensors")
    assert find_folder(tmp_path, "net").refused.startswith("transformers reads model.safetensors or")


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_files_tell_is_refused_before_a_process_is_started(tmp_path, name):
    made, words = REFUSED[name]
    checkpoint(tmp_path / "net", **made)
    (row,) = (each for each in model_catalogue.listed(tmp_path) if each.id == "net")
    assert words in row.refused
    folder = find_folder(tmp_path, "net")
    assert words in folder.info("net", None).refused
    with pytest.raises(InvalidCheckpoint) as caught:
        folder.check()
    assert words in caught.value.detail


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dtype": ["float32"]},
        {"auto_map": {"AutoConfig": "own.Config"}},
        pytest.param(quantized(quant_method="mxfp4"), marks=needs_accelerate),
        pytest.param(
            quantized(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.embed_tokens"]),
            marks=needs_accelerate,
        ),
    ],
)
def test_what_a_process_can_read_is_not_refused(tmp_path, config):
    """Code of a checkpoint whose type transformers knows is left alone, and MXFP4 is expanded (with accelerate)."""
    checkpoint(tmp_path / "net", config)
    assert find_folder(tmp_path, "net").refused is None


def test_scales_are_taken_where_the_config_says_how(tmp_path):
    checkpoint(tmp_path / "net", quantized(quant_method="fp8"))
    stored = {"q.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn), "q.weight_scale_inv": torch.ones(1, 1)}
    save_torch(stored, tmp_path / "net" / "model.safetensors")
    assert find_folder(tmp_path, "net").refused is None


@pytest.mark.parametrize(
    ("config", "files", "takes"),
    [
        (WHISPER, {"preprocessor_config.json": SOUND, "tokenizer.json": "{}"}, ["audio", "target"]),
        ({}, {"tokenizer.json": "{}", "processor_config.json": {"feature_extractor": SOUND}}, ["text"]),
        ({}, {"tokenizer.json": "{}", "processor_config.json": {"image_processor": {"do_resize": True}}},
         ["text", "images"]),
        ({}, {"preprocessor_config.json": {"feature_extractor_type": "ViTFeatureExtractor", "image_mean": [0.5]}},
         ["images"]),
        ({"is_encoder_decoder": True}, {"tokenizer.json": "{}"}, ["text", "target"]),
    ],
)  # fmt: skip
def test_the_inputs_are_those_of_the_files(tmp_path, config, files, takes):
    checkpoint(tmp_path / "net", config, files)
    assert find_folder(tmp_path, "net").takes == takes


def test_a_decoder_with_an_encoder_of_images_inside_takes_the_same_before_and_after_its_load(tmp_path):
    folder = tmp_path / "git"
    transformers.GitForCausalLM(small_config("git")).eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    images = {"image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    loaded = LoadedModel.load(folder, dtype=None, device=torch.device("cpu"), progress=lambda _: None)
    assert find_folder(tmp_path, "git").takes == loaded.reader.takes == ["text"]


def test_models_that_hear_need_their_extra(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "net", WHISPER, {"preprocessor_config.json": SOUND})
    assert find_folder(tmp_path, "net").refused is None
    monkeypatch.setattr(checkpoint_facts, "find_spec", lambda name: None if name == "soundfile" else find_spec(name))
    assert "attention-service[sound]" in find_folder(tmp_path, folder.name).refused


def test_the_half_of_a_translator_of_speech_that_reads_texts_is_opened_by_its_class(tmp_path):
    made = transformers.SeamlessM4TForTextToText(small_config("seamless_m4t")).eval()
    made.save_pretrained(tmp_path / "texts")
    tokenizer().save_pretrained(tmp_path / "texts")
    listed = find_folder(tmp_path, "texts")
    assert listed.refused is None
    assert listed.takes == ["text", "target"]
    loaded = LoadedModel.load(tmp_path / "texts", dtype=None, device=torch.device("cpu"), progress=lambda _: None)
    assert type(loaded.model) is transformers.SeamlessM4TForTextToText
    assert len(loaded.places) == 6
    checkpoint(tmp_path / "net", {"model_type": "seamless_m4t", "architectures": ["SeamlessM4TModel"]})
    assert "ForTextToText" in find_folder(tmp_path, "net").refused


def test_every_type_that_hears_is_tried():
    assert {family for _, family, *_ in HEARS.values()} == HEARD - {"whisper", "parakeet_encoder", "lasr_ctc"}


@pytest.mark.slow
def test_the_types_that_read_other_things_are_those_of_transformers():
    speech = modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    reads = {}
    for kind in {*modeling_auto.MODEL_MAPPING_NAMES, *speech}:
        names = speech.get(kind) or modeling_auto.MODEL_MAPPING_NAMES[kind]
        try:
            made = getattr(transformers, names if isinstance(names, str) else names[0])
            reads[kind] = made.main_input_name
        except (ImportError, AttributeError):  # it needs another package, or is no model by itself
            continue
    others = {kind for kind, name in reads.items() if name not in ("input_ids", "pixel_values")}
    assert READS.keys() >= HEARD
    # One needs another package, and one reads tokens too.
    assert others <= READS.keys() <= others | {"higgs_audio_v2_tokenizer", "voxtral_realtime"}


def test_the_types_that_transformers_knows_are_read_from_its_source():
    assert checkpoint_facts._known_types() == {*configuration_auto.CONFIG_MAPPING_NAMES}


def part_of_sentence_transformers(root):
    """A folder of sentence-transformers: its transformer lies in the folder itself, and parts in folders below."""
    checkpoint(root / "net", files={"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}})
    (root / "net" / "2_Dense").mkdir()
    save_file({"linear.weight": np.zeros((2, 2), np.float32)}, root / "net" / "2_Dense" / "model.safetensors")
    (root / "net" / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 2, "out_features": 2}))


def test_a_part_of_a_model_is_no_model(tmp_path):
    part_of_sentence_transformers(tmp_path)
    assert [each.id for each in model_catalogue.listed(tmp_path)] == ["tiny", "net"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"net.Q4_K_M.gguf": "GGUF"}, "net.Q4_K_M.gguf is not a readable GGUF file"),
        ({"config.json": {"model_type": "llama"}, "pytorch_model.bin": "?"}, "holds no .safetensors file (only .bin)"),
    ],
)
def test_a_folder_of_another_form_is_a_row_that_says_so(tmp_path, files, words):
    (tmp_path / "net").mkdir()
    for name, content in files.items():
        (tmp_path / "net" / name).write_text(content if isinstance(content, str) else json.dumps(content))
    (row,) = (each for each in model_catalogue.listed(tmp_path) if each.id == "net")
    assert words in row.refused
    with pytest.raises(InvalidCheckpoint) as caught:
        model_catalogue.find_name(tmp_path, "net")
    assert words in caught.value.detail


def pointing(folder):
    """An index that names a text file, which transformers would read by another way than safetensors."""
    (folder / "model.safetensors").unlink()
    (folder / "notes.txt").write_text("a secret")
    index = {"metadata": {}, "weight_map": {"x": "notes.txt"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def empty(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


def nested(folder):
    (folder / "config.json").write_text('{"a":' * 100_000)


def looped(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")


@pytest.mark.parametrize("spoil", [pointing, empty, nested, looped])
def test_the_fault_of_one_folder_is_one_row(tmp_path, spoil):
    for name in ("good", "spoilt"):
        checkpoint(tmp_path / name)
    spoil(tmp_path / "spoilt")
    rows = {each.id: each for each in model_catalogue.listed(tmp_path)}
    assert (rows["good"].refused, bool(rows["spoilt"].refused)) == (None, True)
    assert {each.path: bool(each.problem) for each in catalogue.listed(tmp_path).checkpoints}["spoilt"]


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/x.jinja", "sub"])
def test_a_link_out_of_the_repository_is_refused_by_its_name(tmp_path, name):
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("{}")
    checkpoint(root / "net")
    link = root / "net" / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside / "secret" if "." in name else outside)
    assert find_folder(root, "net").refused.startswith(f"{name} is a link, and not to a file inside")
    link.unlink()
    (root / "inside.json").write_text("{}")
    link.symlink_to(root / "inside.json")  # as a cache of the hub has them
    assert find_folder(root, "net").refused is None


@pytest.mark.parametrize("path", ["net/", "./net", "org/../net", "../models/net", "alias"])
def test_a_checkpoint_has_one_path_however_it_is_written(tmp_path, path):
    root = tmp_path / "models"
    checkpoint(root / "net")
    (root / "org").mkdir()
    (root / "alias").symlink_to(root / "net")
    found = find_folder(root, path)
    assert (found.checkpoint, found.name) == ("net", "net")
    with pytest.raises(CheckpointNotFound):
        find_folder(root, "../net")


def test_a_refused_model_is_shown_and_its_requests_end_at_once(http, repository):
    encodec = {"model_type": "encodec", "architectures": ["EncodecModel"]}
    checkpoint(repository / "hears", encodec, {"preprocessor_config.json": SOUND})
    try:
        shown = http.get("/v1/models/hears").json()
        assert (shown["state"], shown["takes"]) == ("idle", ["audio"])
        assert "read audio" in shown["refused"]
        loads = http.get("/metrics").text.count("loads")
        for path, body in (("/v1/models/hears/forward", {"text": "a"}), ("/v1/models", {"checkpoint": "hears"})):
            refusal = refuse(http, path, **body)
            assert (refusal["status"], refusal["code"], refusal["param"]) == (422, "invalid_checkpoint", "checkpoint")
            assert "read audio" in refusal["detail"]
        assert http.get("/metrics").text.count("loads") == loads
        assert http.get("/v1").json()["memory"]["in_flight_bytes"] == 0
    finally:
        (repository / "hears" / "model.safetensors").unlink()
        (repository / "hears" / "preprocessor_config.json").unlink()
        (repository / "hears" / "config.json").unlink()
        (repository / "hears").rmdir()


def test_two_ways_to_one_checkpoint_are_one_model(http):
    first = post(http, "/v1/models", checkpoint="org/two")
    again = http.post("/v1/models", json={"checkpoint": "org/../org/two"})
    assert again.status_code == 200 or again.json()["id"] == first["id"]
    assert [each["id"] for each in http.get("/v1/models").json()["data"]].count("org--two") == 1
    http.delete("/v1/models/org--two")
