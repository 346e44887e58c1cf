"""Sound folders of every form that the server reads, by name: what is damaged, file by file."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load, save_file
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import DECODERS, ENCODERS, PAIRS, tiny
from tests.models import gguf_families, quantized_checkpoints
from tests.models.small_adapters import KINDS, base_of, write_adapter
from tests.modules.checkpoints.forms.towers.plain_towers import (
    CLIP,
    SIGLIP,
    TIMM,
    openclip_tensors,
    siglip_tensors,
    timm_config,
    timm_tensors,
    write_openclip,
)
from tests.modules.checkpoints.test_families import TINY, built, saved
from tests.modules.checkpoints.tiny_models import ModelOfTransformers

from tools.fuzz.damaged_values import Damage, gguf_damages, json_damages, safetensors_damages

NAME: Final = "net"
"""The path of the checkpoint in the repository."""
ADAPTER: Final = "tuned"
"""The same of an adapter of it."""
Write = Callable[[Path], Any]
_CACHE_ALONE: Final = {"quant_method": "modelopt", "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
_ENTRIES: Final[dict[str, dict[str, Any]]] = {
    "classifier": {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}},
    "cache-alone": {"quantization_config": _CACHE_ALONE},
    "hqq": {"quantization_config": {"quant_method": "hqq", "modules_to_not_convert": ["lm_head", "x.*"]}},
    "named": {"transformers_weights": "model.safetensors", "auto_map": {"AutoModel": "m.M"}, "dtype": "float32"},
}  # fmt: skip
"""Entries beside those of a Llama."""


def _family(one: Any) -> Write:
    return lambda folder: saved(built(one), folder)


def _model(family: str) -> Write:
    def write(folder: Path) -> None:
        tiny(family).save_pretrained(folder)
        tokenizer().save_pretrained(folder)

    return write


def _llama(entries: dict[str, Any]) -> Write:
    def write(folder: Path) -> None:
        tiny("llama").save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | entries))

    return write


def _texts(folder: Path) -> None:
    """A Llama with every file that is about texts, and a list of its shards."""
    tiny("llama").save_pretrained(folder, max_shard_size="10KB")
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    words.save_pretrained(folder)
    own = {
        "special_tokens_map.json": {"unk_token": "[UNK]", "pad_token": {"content": "[PAD]", "lstrip": False}},
        "added_tokens.json": {"[EXTRA]": 12},
        "chat_template.json": {"chat_template": "{{ messages[0].content }}"},
        "preprocessor_config.json": {"image_processor_type": "ViTImageProcessor", "size": {"height": 8}},
        "processor_config.json": {"processor_class": "LlavaProcessor", "patch_size": 2},
        "generation_config.json": {"eos_token_id": [1, 2], "max_length": 20, "suppress_tokens": [3]},
    }  # fmt: skip
    for name, entries in own.items():
        (folder / name).write_text(json.dumps(entries))


def _timm(kind: str) -> Write:
    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        save_file(dict(timm_tensors(kind)), folder / "model.safetensors", {"format": "pt"})
        more = {"label_names": ["a", "b"], "fixed_input_size": True, "num_classes": 2, "global_pool": "token"}
        (folder / "config.json").write_text(json.dumps(timm_config(kind) | more))

    return write


def _gguf(name: str) -> Write:
    family = gguf_families.FAMILIES[name]

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        gguf_families.write_family(folder / "net.gguf", family, family.model())

    return write


def _adapter(kind: str) -> Write:
    def write(folder: Path) -> None:
        base = base_of(kind)
        base.save_pretrained(folder)
        entries = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 6}} | KINDS[kind][1]
        write_adapter(base, folder.parent / ADAPTER, base_name=NAME, **entries)

    return write


FORMS: Final[dict[str, Write]] = {
    **{f"family {each.model_type} {each.label}": _family(each) for each in
       {repr(each.build): each for each in TINY if isinstance(each.build, ModelOfTransformers)}.values()},
    **{f"entries of {name}": _llama(entries) for name, entries in _ENTRIES.items()},
    **{f"form {label}": lambda folder, label=label: quantized_checkpoints.write(folder, label)
       for label in quantized_checkpoints.FORMS},
    **{f"model {family}": _model(family) for family in (*DECODERS, *ENCODERS, *PAIRS)},
    "texts": _texts,
    **{f"timm {kind}": _timm(kind) for kind in TIMM},
    "openclip clip": lambda folder: write_openclip(folder, CLIP, openclip_tensors()),
    "openclip siglip": lambda folder: write_openclip(folder, SIGLIP, siglip_tensors()),
    **{f"gguf {name}": _gguf(name) for name, family in gguf_families.FAMILIES.items() if family.layers < 10},
    **{f"adapter {kind}": _adapter(kind) for kind in KINDS},
}  # fmt: skip
"""What writes a folder of each form."""
LOADED: Final = tuple(form for form in FORMS if not form.startswith("family "))
"""Those that can be loaded whole: a family has the tensors of its layers alone."""


def write_sound(root: Path, form: str) -> list[Path]:
    """Write a folder of a form into a repository. Return the files that are damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        FORMS[form](root / NAME)
    adapter = root / ADAPTER
    files = sorted((adapter if adapter.is_dir() else root / NAME).iterdir())
    return [file for file in files if file.suffix in {".json", ".safetensors", ".gguf"}]


def damages_of(file: Path) -> Iterator[Damage]:
    """The damages of a file, by its kind."""
    content = file.read_bytes()
    if file.suffix == ".json":
        yield from json_damages(content)
    elif file.suffix == ".safetensors":
        yield from safetensors_damages(content, load(content))
    else:
        yield from gguf_damages(content, str(file))


def clear(root: Path) -> None:
    """Remove what was written."""
    for folder in (NAME, ADAPTER):
        shutil.rmtree(root / folder, ignore_errors=True)
