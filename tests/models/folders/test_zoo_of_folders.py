"""A repository of 50 folders as people have them: the list says of each what it takes, why not, and what is left out.

Nothing is loaded, and no process is started.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.models import quantized_checkpoints

from attention_service.models.folders.model_catalogue import all_with_adapters, listed
from attention_service.modules.checkpoints.forms.gguf import gguf_header

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
from tests.models.gguf_files import llama, write

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
BERT = {"model_type": "bert"}
T5 = {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]}
LLAVA = {
    "model_type": "llava", "text_config": {}, "vision_config": {}, "image_token_index": 9,
    "architectures": ["LlavaForConditionalGeneration"],
}  # fmt: skip
TEXT = {"tokenizer.json": "{}"}
SPOKEN = TEXT | {"chat_template.jinja": "{{ messages }}"}
PICTURES = {"preprocessor_config.json": {"image_processor_type": "ViTImageProcessor", "do_resize": True}}
SOUNDS = {"preprocessor_config.json": {"feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": 16000}}
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
QUERY = "model.layers.0.self_attn.q_proj"
Files = Mapping[str, Any]


@dataclass(frozen=True)
class Animal:
    """One folder, and the row that the list must have of it."""

    config: Mapping[str, Any] | None = None
    files: Files = field(default_factory=dict)
    """Further files: texts, bytes, objects, or the names of tensors of a safetensors file."""
    takes: tuple[str, ...] = ()
    refused: str | None = None
    """Words of the reason."""
    left_out: tuple[str, ...] = ()
    """The names of files that are told."""
    stored: str | None = None
    make: Callable[[Path], None] | None = None
    """Writes what is no config."""
    tensors: tuple[str, ...] = ("x",)
    """Names of the tensors of model.safetensors; none for no such file."""
    row: str | None = None
    """The name of its row, if it is not that of its folder."""


def quantized(label, *left_out):
    return Animal(make=lambda folder: quantized_checkpoints.write(folder, label) and None, tensors=(), takes=("text",),
                  stored=label, left_out=left_out)  # fmt: skip


def stated(reason, **entry):
    return Animal(LLAMA | {"quantization_config": entry}, refused=reason)


def of_gguf(name="net.gguf", **options):
    return lambda folder: write(folder / name, llama(), tokens=True, **options)


def of_another_architecture(folder):
    write(folder / "net.gguf", llama())
    whole = (folder / "net.gguf").read_bytes()
    (folder / "net.gguf").write_bytes(whole.replace(b"llama", b"lzama"))


def linked(folder):
    (folder / "tokenizer.json").symlink_to("/etc/hostname")


ZOO = {
    "llama": Animal(LLAMA, TEXT, ("text",)),
    "spoken": Animal(LLAMA, SPOKEN, ("text", "messages")),
    "older-template": Animal(LLAMA, TEXT | {"tokenizer_config.json": {"chat_template": "x"}}, ("text", "messages")),
    "no-tokenizer": Animal(LLAMA),
    "bert": Animal(BERT | {"architectures": ["BertForMaskedLM"]}, {"vocab.txt": "a"}, ("text",)),
    "classifier": Animal(
        BERT | {"architectures": ["BertForSequenceClassification"]}, {"vocab.txt": "a"}, ("text", "text_pair")
    ),
    "sentences": Animal(BERT, TEXT | {"modules.json": [], "1_Pooling/config.json": {}}, ("text",)),
    "t5": Animal(T5, TEXT, ("text", "target")),
    "t5-pieces": Animal(
        T5, {"spiece.model": "x"}, ("text", "target") if find_spec("sentencepiece") else (),
        left_out=() if find_spec("sentencepiece") else ("spiece.model",),
    ),
    "config-of-tokenizer": Animal(
        BERT, {"tokenizer_config.json": {"do_lower_case": False}, "chat_template.jinja": "x"},
        left_out=("chat_template.jinja", "tokenizer_config.json"),
    ),
    "other-vocabulary": Animal({"model_type": "albert"}, {"vocab.txt": "a"}, left_out=("vocab.txt",)),
    "other-class": Animal(
        {"model_type": "albert"}, {"vocab.txt": "a", "tokenizer_config.json": {"tokenizer_class": "BertTokenizerFast"}},
        ("text",),
    ),
    "half-a-vocabulary": Animal({"model_type": "gpt2"}, {"vocab.json": "{}"}, left_out=("vocab.json",)),
    "empty-vocabulary": Animal(BERT, {"vocab.txt": ""}, left_out=("vocab.txt",)),
    "twice": Animal(BERT, TEXT | {"vocab.txt": "a"}, ("text",), left_out=("vocab.txt",)),
    "no-tokens-of-its-own": Animal({"model_type": "esm"}, TEXT, left_out=("tokenizer.json",)),
    "characters": Animal({"model_type": "canine"}, {}, ("text",)),
    "bytes": Animal(T5 | {"tokenizer_class": "ByT5Tokenizer"}, {}, ("text", "target")),
    "pages": Animal({"model_type": "layoutlmv3"}, TEXT, left_out=("tokenizer.json",)),
    "vit": Animal({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, PICTURES, ("images",)),
    "clip": Animal({"model_type": "clip", "text_config": {}, "vision_config": {}}, TEXT | PICTURES, ("text", "images")),
    "llava": Animal(LLAVA, SPOKEN | PICTURES, ("text", "images", "messages")),
    "llava-without-tokenizer": Animal(LLAVA, PICTURES),
    "whisper": Animal(
        {"model_type": "whisper", "is_encoder_decoder": True, "architectures": ["WhisperForConditionalGeneration"]},
        TEXT | SOUNDS, ("audio", "target"), None if find_spec("soundfile") else "attention-service[sound]",
    ),
    "encodec": Animal({"model_type": "encodec"}, SOUNDS, ("audio",), "read audio, which is not supported"),
    "videos": Animal({"model_type": "vjepa2"}, refused="read videos"),
    "series": Animal({"model_type": "patchtst"}, refused="read series of numbers"),
    "newer": Animal({"model_type": "llama_of_next_year"}, refused="does not know model_type 'llama_of_next_year'"),
    "own-code": Animal(
        {"model_type": "mine", "auto_map": {"AutoModel": "modeling_mine.Mine"}}, {"modeling_mine.py": "1 / 0"},
        refused="no code of a checkpoint is run", left_out=("modeling_mine.py",),
    ),
    "no-type": Animal({"architectures": ["LlamaForCausalLM"]}, refused="no model_type"),
    "pickled": Animal(LLAMA, {"pytorch_model.bin": b"\x80"}, tensors=(), refused="holds no .safetensors file"),
    "both-formats": Animal(
        LLAMA, TEXT | {"pytorch_model.bin": b"\x80", "model.onnx": b"", "tf_model.h5": b""}, ("text",),
        left_out=("model.onnx", "pytorch_model.bin", "tf_model.h5"),
    ),
    "consolidated": Animal(
        LLAMA, TEXT | {"consolidated.safetensors": ("y",)}, ("text",), left_out=("consolidated.safetensors",)
    ),
    "distributed": Animal(
        LLAMA, {"shard-00001-model-00001-of-00001.safetensors": ("y",)}, refused="a distributed checkpoint",
        left_out=("shard-00001-model-00001-of-00001.safetensors",),
    ),
    "other-name": Animal(LLAMA, {"weights.safetensors": ("y",)}, tensors=(), refused="its files have other names"),
    "missing-shard": Animal(
        LLAMA, {"model.safetensors.index.json": {"weight_map": {"x": "model-1.safetensors"}}}, tensors=(),
        refused="'model-1.safetensors' of the checkpoint is missing",
    ),
    "index-of-pickles": Animal(
        LLAMA, {"model.safetensors.index.json": {"weight_map": {"x": "model.bin"}}, "model.bin": b"\x80"}, tensors=(),
        refused="expected a name that ends in .safetensors",
    ),
    "broken-tensors": Animal(LLAMA, {"model.safetensors": b"no"}, tensors=(), refused="not a readable safetensors"),
    "broken-config": Animal(None, {"config.json": "{"}, refused="is not a JSON object"),
    "linked": Animal(LLAMA, {}, ("text",), make=linked, refused="tokenizer.json is a link"),
    "scales-alone": Animal(LLAMA, tensors=(f"{QUERY}.weight_scale_inv",), refused="no quantization_config"),
    "voxtral": Animal(
        {"model_type": "voxtral", "architectures": ["VoxtralForConditionalGeneration"]}, SOUNDS | {"tekken.json": "{}"},
        ("text", "messages", "audio") if find_spec("soundfile") else ("text", "messages"),
    ),
    "voxtral-realtime": Animal(
        {"model_type": "voxtral_realtime"}, SOUNDS | {"tekken.json": "{}"}, ("text",), "read audio that is added",
    ),
    "mistral": Animal(LLAMA, {"tekken.json": "{}"}, ("text",)),
    "mistral-twice": Animal(LLAMA, TEXT | {"tekken.json": "{}"}, ("text",), left_out=("tekken.json",)),
    "merged-lora": Animal(LLAMA, tensors=(f"{QUERY}.lora_A.weight",), refused="belongs to an adapter"),
    "fp8": quantized("FP8", "input_scale of 14 modules"),
    "int4": quantized("compressed-tensors int4"), "gptq": quantized("GPTQ int4"),
    "awq": quantized("AWQ int4"), "nf4": quantized("bitsandbytes NF4"),
    "gptq3": stated("GPTQ of 3 bits is not read", quant_method="gptq", bits=3),
    "hqq": stated("hqq is none of", quant_method="hqq"),
    "mlx": quantized("MLX int4"), "torchao": quantized("torchao int8"),
    "mlx3": stated("MLX of 3 bits", group_size=64, bits=3, mode="affine"),
    "gguf": Animal(None, SPOKEN | {"config.json": LLAMA, "generation_config.json": {}}, ("text",), make=of_gguf(),
                   tensors=(), stored="Q8_0",
                   left_out=("chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json")),
    "gguf-part": Animal(
        None, {}, ("text",), make=of_gguf("net-00001-of-00002.gguf"), tensors=(),
        refused="a divided GGUF file",
    ),
    "gguf-newer": Animal(
        None, make=of_another_architecture, tensors=(),
        refused="no GGUF file of architecture 'lzama'",
    ),
    "gguf-scaled": Animal(
        None, {}, ("text",), make=of_gguf(entries={"logit_scale": 4.0}), tensors=(),
        refused="logit_scale is 4.0",
    ),
    "gguf-broken": Animal(None, {"net.gguf": b"GGUF"}, tensors=(), refused="is not a readable GGUF file"),
    "adapter": Animal(
        None, {"adapter_config.json": LORA | {"base_model_name_or_path": "org/llama"}, "tokenizer.json": "{ }",
               "adapter_model.safetensors": (f"base_model.model.{QUERY}.lora_A.weight",)},
        ("text",), tensors=(), row="llama:adapter", left_out=("tokenizer.json",),
    ),
    "adapter-alone": Animal(
        None, {"adapter_config.json": LORA | {"base_model_name_or_path": "org/nobody"},
               "adapter_model.safetensors": (f"base_model.model.{QUERY}.lora_A.weight",)},
        tensors=(), refused="its base is not in the model repository",
    ),
    "ia3": Animal(
        None, {"adapter_config.json": {"peft_type": "IA3", "base_model_name_or_path": "org/nobody"},
               "adapter_model.safetensors": ("y",)},
        tensors=(), refused="IA3",
    ),
}  # fmt: skip


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, tuple):
        save_file({name: np.zeros((2, 2), np.float32) for name in content}, path)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """The repository."""
    root = tmp_path_factory.mktemp("zoo")
    for name, animal in ZOO.items():
        folder = root / name
        folder.mkdir()
        if animal.make is not None:
            animal.make(folder)
        files = dict(animal.files)
        if animal.config is not None:
            files["config.json"] = animal.config
        if animal.tensors:
            files["model.safetensors"] = animal.tensors
        for file, content in files.items():
            put(folder / file, content)
    return root


@pytest.fixture(scope="module")
def rows(zoo):
    return rows_of(zoo)


def rows_of(root):
    return {each.id: each for each in all_with_adapters(root, listed(root), {})}


@pytest.mark.parametrize("name", ZOO)
def test_the_list_says_of_each_folder_what_it_takes_and_what_it_does_not(rows, name):
    animal, found = ZOO[name], rows[ZOO[name].row or name]
    assert tuple(found.takes) == animal.takes
    assert (found.refused is None) == (animal.refused is None), found.refused
    assert (animal.refused or "") in (found.refused or "")
    assert tuple(sorted(each.partition(" (")[0] for each in found.left_out)) == animal.left_out
    assert all(each.endswith(")") for each in found.left_out)  # each with the reason
    assert animal.stored in {None, found.stored}


def test_a_folder_is_described_in_fifty_milliseconds(zoo):
    assert len(ZOO) >= 40
    rows_of(zoo)  # the tables of transformers are read once
    gguf_header._read.cache_clear()
    began = time.process_time()
    found = rows_of(zoo)
    assert time.process_time() - began < 0.05 * len(ZOO)
    assert len(found) >= len(ZOO)
