"""Files of adapters that stop nobody and read nothing else: patterns and links, in the list, the load and imports."""

import json
import os

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from tests.client.transformers.families import tiny

from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.modules import ImportModule
from attention_service.models.folders.adapter_catalogue import opened
from attention_service.models.folders.model_catalogue import find_folder
from attention_service.modules import store_files
from attention_service.modules.checkpoints.adapter_files import AdapterFiles
from attention_service.modules.checkpoints.import_plan import plan

NAMES = "adapter_config.json", "adapter_model.safetensors"
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


@pytest.fixture
def beside(root):
    """Function that writes an adapter into the folder of its base for one test."""
    yield lambda **entries: write(root / "net", **entries)
    for name in NAMES:
        (root / "net" / name).unlink(missing_ok=True)


def refusal_beside(root):
    return find_folder(root, "net").refused or ""


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
def test_what_is_not_read_is_refused_before_a_load(tmp_path, root, beside, entry, value, reason):
    own = write(root / tmp_path.name, **{entry: value})
    row = opened(root, own.name, ["net"])
    assert row.refused is not None
    with pytest.raises(InvalidCheckpoint, match=reason) as told:
        row.check()
    assert entry in told.value.detail
    with pytest.raises(InvalidCheckpoint, match=reason):
        plan(root, ImportModule(checkpoint="net", layer=0, adapter=own.name))
    beside(**{entry: value})
    assert f"of the adapter beside the model: its {entry}" in refusal_beside(root)


@pytest.fixture
def opened_paths(monkeypatch):
    """The paths of all files that are opened, by Python or safetensors."""
    seen = []

    def recorded(opens):
        def recording(path, *more, **options):
            seen.append(os.path.realpath(path))
            return opens(path, *more, **options)

        return recording

    monkeypatch.setattr(os, "open", recorded(os.open))
    monkeypatch.setattr(store_files, "safe_open", recorded(safetensors.safe_open))
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_a_link_out_of_the_repository_is_refused_by_name_and_not_read(tmp_path, root, beside, opened_paths, name):
    outside = write(tmp_path / "outside")
    told = f"{name} is a link, and not to a file inside the model repository"
    own = write(root / tmp_path.name)
    (own / name).unlink()
    (own / name).symlink_to(outside / name)
    assert told in opened(root, own.name, ["net"]).refused
    with pytest.raises(InvalidCheckpoint, match=told):
        plan(root, ImportModule(checkpoint="net", layer=0, adapter=own.name))
    with pytest.raises(InvalidCheckpoint, match=told):  # as the process of a model opens it
        AdapterFiles.open(own, root)
    place = beside()
    (place / name).unlink()
    (place / name).symlink_to(outside / name)
    assert told in refusal_beside(root)
    assert opened_paths
    assert not [each for each in opened_paths if each.startswith(str(outside))]


def test_a_file_that_becomes_a_link_after_the_config_was_read_is_not_followed(tmp_path, root):
    outside, own = write(tmp_path / "outside"), write(root / tmp_path.name)
    files = AdapterFiles.open(own, root)
    (own / NAMES[1]).unlink()
    (own / NAMES[1]).symlink_to(outside / NAMES[1])
    with pytest.raises(InvalidCheckpoint, match="is a link"):
        files.changes()


def test_a_link_to_a_file_of_the_repository_is_followed(tmp_path, root):
    """The cache of the hub has its files so."""
    blobs, own = write(root / f"{tmp_path.name}-blobs"), root / tmp_path.name
    own.mkdir()
    for name in NAMES:
        (own / name).symlink_to(blobs / name)
    assert opened(root, own.name, ["net"]).refused is None
    assert len(AdapterFiles.open(own, root).changes()) == 2
    assert plan(root, ImportModule(checkpoint="net", layer=0, adapter=own.name)).source.adapter == own.name


@pytest.mark.parametrize(
    "entries",
    [
        {"r": 0}, {"r": -1}, {"r": True}, {"r": 1.5}, {"r": 10**400}, {"r": 2**40}, {"lora_alpha": 10**400},
        {"lora_alpha": float("nan")}, {"lora_alpha": "8"}, {"lora_alpha": True}, {"rank_pattern": {"q": 0}},
        {"rank_pattern": {"q": 10**400}}, {"rank_pattern": {"q": None}}, {"alpha_pattern": {"q": [1]}},
        {"alpha_pattern": {"q": 10**400}},
    ],
)  # fmt: skip
def test_numbers_that_no_adapter_has_are_refused_by_the_config(tmp_path, entries):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | entries
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").touch()
    refused = AdapterFiles.open(tmp_path).refused
    assert refused is not None
    assert next(iter(entries)) in refused


@pytest.mark.parametrize("name", ["lora_magnitude_vector", "lora_B.bias"])
def test_a_vector_of_another_length_than_the_rows_of_b_is_refused(tmp_path, name):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "use_dora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    vectors = {"lora_magnitude_vector": torch.ones(6), "lora_B.bias": torch.ones(6)} | {name: torch.ones(5)}
    tensors = {"lora_A.weight": torch.ones(2, 4), "lora_B.weight": torch.ones(6, 2)} | vectors
    save_file(
        {f"base_model.model.q_proj.{each}": x for each, x in tensors.items()}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(InvalidCheckpoint, match=r"\[5\] of q_proj, and B has 6 rows"):
        AdapterFiles.open(tmp_path).changes()
