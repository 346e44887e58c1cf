"""Configs of adapters that stop nobody: patterns, in the list, the load and the import of a layer."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tests.client.transformers.families import tiny

from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.modules import ImportModule
from attention_service.models.adapter_catalogue import opened
from attention_service.models.checkpoint_facts import refusal_of
from attention_service.modules.checkpoints.adapter_files import AdapterFiles
from attention_service.modules.checkpoints.import_plan import plan

PROJECTIONS = "q_proj", "v_proj"
PLACE = "model.layers.0.self_attn"
HOSTILE = r"(a+)+$", r"(\w+\.?)+!", r"(.*)*(.*)*(.*)*x", r"((a?){32}a{32})+c"


def write(folder, **entries):
    """Write an adapter of two matrices of rank 4."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "base_model_name_or_path": "net"} | entries
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name in PROJECTIONS:
        tensors[f"base_model.model.{PLACE}.{name}.lora_A.weight"] = torch.ones(4, 32)
        tensors[f"base_model.model.{PLACE}.{name}.lora_B.weight"] = torch.ones(32, 4)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A repository with the base of the adapters."""
    root = tmp_path_factory.mktemp("models")
    tiny("llama").save_pretrained(root / "net")
    return root


@pytest.mark.parametrize("entry", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_pattern_that_backtracks_for_ever_in_python_is_matched_at_once(tmp_path, entry, pattern):
    folder = write(tmp_path / "lora", **{entry: {pattern: 3}})
    place = f"base_model.model.{'a' * 400}{'.a' * 400}_b"
    tensors = {f"{place}.lora_A.weight": torch.ones(4, 2), f"{place}.lora_B.weight": torch.ones(2, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    assert [change.scale for change in AdapterFiles.open(folder).changes().values()] == [1.5]


def test_numbers_are_those_of_the_first_pattern(tmp_path):
    folder = write(tmp_path / "lora", alpha_pattern={r".*\.(k|v)_proj": 2, r"layers\.\d\.self_attn\.v_proj": 3})
    scales = {path.rpartition(".")[2]: change.scale for path, change in AdapterFiles.open(folder).changes().items()}
    assert scales == {"q_proj": 1.5, "v_proj": 0.5}


@pytest.mark.parametrize("entry", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [({"(?=q)q_proj": 1}, r"has the pattern '\(\?=q\)q_proj', which has \(\?="), ([1], "no object of numbers"),
     ({"q_proj": "2"}, "no object of numbers")],
)  # fmt: skip
def test_what_is_not_read_is_refused_before_a_load(tmp_path, root, entry, value, reason):
    own = write(root / tmp_path.name, **{entry: value})
    row = opened(root, own.name, ["net"])
    assert row.refused is not None
    with pytest.raises(InvalidCheckpoint, match=reason) as told:
        row.check()
    assert entry in told.value.detail
    with pytest.raises(InvalidCheckpoint, match=reason):
        plan(root, ImportModule(checkpoint="net", layer=0, adapter=own.name))
    write(root / "net", **{entry: value})
    try:
        config = json.loads((root / "net/config.json").read_text())
        assert f"of the adapter beside the model: its {entry}" in (refusal_of(root, root / "net", config, ["x"]) or "")
    finally:
        (root / "net/adapter_config.json").unlink()
        (root / "net/adapter_model.safetensors").unlink()
