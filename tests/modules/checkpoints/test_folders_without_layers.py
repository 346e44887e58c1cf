"""Folders that have no attention layer: an import, and the list of checkpoints, say shortly what each holds instead."""

import json

import numpy as np
import pytest
from safetensors.numpy import save

from attention_contract.errors import AttentionError
from attention_contract.schemas.modules import ImportModule
from attention_service.modules.checkpoints import catalogue
from attention_service.modules.checkpoints.import_plan import plan

LORA = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "org/base"}).encode()
CHANGES = save({
    f"base_model.model.model.layers.0.self_attn.{role}_proj.lora_{part}.weight": np.ones((2, 2), np.float32)
    for role in "qv" for part in "AB"
})  # fmt: skip
LLAMA = json.dumps({"model_type": "llama"}).encode()
PAIR = json.dumps({"text_config": {"model_type": "llama"}, "vision_config": {"model_type": "vit"}}).encode()
OTHER = save({"a": np.ones(2, np.float32)})
ADVICE = (
    "net is an adapter of {}, and has no attention layer of its own; import the layer from its base, with "
    '"adapter": "net" beside the checkpoint, or load the base with it as a model (POST /v1/models)'
)
NONE = "the folder holds no .safetensors file"

FOLDERS = {
    "adapter": ({"adapter_config.json": LORA, "adapter_model.safetensors": CHANGES}, ADVICE.format("'org/base'")),
    "adapter with a tokenizer": (
        {"adapter_config.json": LORA, "adapter_model.safetensors": CHANGES, "tokenizer.json": b"{}"},
        ADVICE.format("'org/base'"),
    ),
    "pickled adapter": ({"adapter_config.json": LORA, "adapter_model.bin": b""}, ADVICE.format("'org/base'")),
    "adapter of no base": (
        {"adapter_config.json": b"{}", "adapter_model.safetensors": CHANGES},
        ADVICE.format("a base that its config does not name"),
    ),
    "unreadable adapter": (
        {"adapter_config.json": b"[", "adapter_model.safetensors": CHANGES},
        "adapter: adapter_config.json of net is not a JSON object",
    ),
    "empty": ({}, f"{NONE}: it is empty"),
    "tokenizer": (
        {"tokenizer.json": b"{}", "vocab.txt": b""},
        f"{NONE}, only tokenizer.json, vocab.txt; put the file with the tensors beside them",
    ),
    "config": ({"config.json": LLAMA}, f"{NONE}, only config.json; put the file with the tensors beside it"),
    "pickled": (
        {"config.json": LLAMA, "pytorch_model.bin": b""},
        f"{NONE} (only .bin), and nothing is unpickled: run attention convert FOLDER OUT",
    ),
    "no tensors": (
        {"config.json": LLAMA, "model.safetensors": save({})},
        "the checkpoint holds no tensor (model.safetensors)",
    ),
    "gguf": (
        {"net.gguf": b"GGUF"},
        "net.gguf is not a readable GGUF file: it ends inside its header",
    ),
    "gguf with a tokenizer": (
        {"net.gguf": b"GGUF", "tokenizer.json": b"{}", "config.json": LLAMA},
        "net.gguf is not a readable GGUF file: it ends inside its header",
    ),
    "folder below": ({"part/model.safetensors": OTHER}, f"{NONE} itself; name a folder in it, such as net/part"),
    "no layer": (
        {"model.safetensors": OTHER},
        "none of its tensors, such as a, is of an attention layer of BERT or torch, and it has no config.json with a "
        "model_type, which any other family needs",
    ),
    "no layer of its type": (
        {"config.json": LLAMA, "model.safetensors": OTHER},
        "none of its tensors, such as a, is of an attention layer as models of type 'llama' name them",
    ),
    "no layer of its stacks": (
        {"config.json": PAIR, "model.safetensors": OTHER},
        "none of its tensors, such as a, is of an attention layer as models of type 'llama' or 'vit' name them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_without_layers_is_told_by_what_it_holds(root, name):
    files, reason = FOLDERS[name]
    write(root / "net", files)
    with pytest.raises(AttentionError) as caught:
        plan(root, ImportModule(checkpoint="net"))
    assert (caught.value.status, caught.value.to_problem()["param"]) == (422, "checkpoint")
    assert caught.value.detail.removeprefix("checkpoint: ") == reason
    assert described(root, "net").removeprefix("checkpoint: ") == reason


def test_an_unknown_model_type_is_told_without_all_known_ones(root):
    write(root / "net", {"config.json": b'{"model_type": "mine"}', "model.safetensors": OTHER})
    assert described(root, "net").startswith("config.json says model_type 'mine', which is not known; docs/checkpoints")


def test_an_adapter_is_told_by_the_path_of_its_file_and_in_the_list_with_its_bytes(root):
    files, reason = FOLDERS["adapter"]
    write(root / "net", files)
    assert described(root, "net/adapter_model.safetensors") == reason
    (row,) = [row for row in catalogue.listed(root).checkpoints if row.path == "net"]
    assert (row.problem, row.bytes) == (reason, len(CHANGES))


def test_an_adapter_beside_its_base_is_no_adapter_alone(root):
    files, _ = FOLDERS["adapter"]
    weights = save({
        f"model.layers.0.self_attn.{role}_proj.weight": np.ones((4, 4), np.float32) for role in "qkvo"
    })  # fmt: skip
    config = {"model_type": "llama", "hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1}
    write(root / "net", files | {"model.safetensors": weights, "config.json": json.dumps(config).encode()})
    assert described(root, "net") is None
    for path in ("net", "net/model.safetensors"):
        (told,) = plan(root, ImportModule(checkpoint=path, layer=0)).source.ignored
        assert told == 'adapter_model.safetensors (an adapter beside its base; "adapter": "net" merges it)'
    changed = save({
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": np.ones(shape, np.float32)
        for part, shape in (("A", (2, 4)), ("B", (4, 2)))
    })  # fmt: skip
    (root / "net" / "adapter_model.safetensors").write_bytes(changed)
    merged = plan(root, ImportModule(checkpoint="net", layer=0, adapter="net"))
    assert (merged.source.adapter, merged.source.ignored) == ("net", [])
    base = plan(root, ImportModule(checkpoint="net", layer=0)).read()["q_proj.weight"]
    assert not np.array_equal(merged.read()["q_proj.weight"], base)


def described(root, path):
    try:
        return catalogue.described(root, path).problem
    except AttentionError as fault:
        return fault.detail


def write(folder, files):
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
