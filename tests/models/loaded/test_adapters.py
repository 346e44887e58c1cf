"""Adapters of a resident base: each kind beside peft's own model, with and without merge, alone and mixed."""

import copy

import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.small_models import IDS, device, near

pytest.importorskip("peft", reason="peft writes the adapters")
from tests.models.small_adapters import KINDS, base_of, write_adapter

from attention_contract.errors import CheckpointNotFound, InvalidCheckpoint
from attention_contract.schemas.modules import ImportModule
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.modules.checkpoints import import_plan
from attention_service.modules.checkpoints.adapter_files import AdapterFiles

CLOSE = 1e-6
"""The largest difference, as a share of the largest number."""


def close(found, expected):
    near(found, expected, CLOSE * float(expected.abs().max()))


def logits(loaded, arguments, rows=None):
    with torch.no_grad(), loaded.adapters.of_rows(rows) if rows else loaded.adapters.using(None):
        output = loaded.run(arguments, AttentionPass({}))
    return output.logits if "logits" in output else output.last_hidden_state


def arguments_of(family, count=1):
    ids = torch.tensor([IDS] * count)
    return {"input_ids": ids, "decoder_input_ids": ids[:, :4]} if family == "t5" else {"input_ids": ids}


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_gives_the_numbers_of_peft(tmp_path, kind):
    family, entries = KINDS[kind]
    base = base_of(kind).double()
    reference = write_adapter(base, tmp_path / "one", **entries)
    other = write_adapter(base, tmp_path / "two", seed=1, **entries | {"r": 3})
    loaded = LoadedModel(family, copy.deepcopy(base).requires_grad_(False), tokenizer(), device())
    given = arguments_of(family)
    plain = logits(loaded, given)
    one, two = (loaded.adapters.load(name, AdapterFiles.open(tmp_path / name)) for name in ("one", "two"))
    with torch.no_grad():
        expected, others = (each(**given) for each in (reference, other))
        expected, others = (each.logits if "logits" in each else each.last_hidden_state for each in (expected, others))
    assert (expected - plain).abs().max() > 0.01
    close(logits(loaded, given, [one]), expected)
    assert torch.equal(logits(loaded, given), plain)  # the base is as it was
    assert one.mixes
    rows = logits(loaded, arguments_of(family, 4), [one, None, two, one])
    for row, own in zip(rows, (expected, plain, others, expected), strict=True):
        close(row, own[0])


@pytest.mark.sampled(kind=6)
@pytest.mark.filterwarnings("ignore:Model with `tie_word")
@pytest.mark.parametrize("kind", [each for each in KINDS if each != "lora-bias"])  # which peft merges only into biases
def test_merged_weights_are_those_of_peft(tmp_path, kind):
    _, entries = KINDS[kind]
    base = base_of(kind)
    own = {name: value.clone() for name, value in base.state_dict().items()}
    reference = write_adapter(base, tmp_path, **entries).merge_and_unload().state_dict()
    for path, change in AdapterFiles.open(tmp_path).changes().items():
        if path.endswith("lora_B"):
            continue
        name = f"{path}.weight"
        merged = change.merged(own[name], transposed=KINDS[kind][0] == "gpt2" and own[name].ndim == 2)
        close(merged, reference[name])


@pytest.mark.parametrize("kind", ["lora", "dora", "conv1d"])
def test_an_imported_layer_has_the_adapter_merged(tmp_path, kind):
    family, entries = KINDS[kind]
    base = base_of(kind)
    base.save_pretrained(tmp_path / "base")
    reference = write_adapter(base, tmp_path / "one", **entries).merge_and_unload()
    reference.save_pretrained(tmp_path / "merged")
    found, expected = (
        import_plan.plan(tmp_path, ImportModule(checkpoint=name, layer=1, adapter=adapter))
        for name, adapter in (("base", "one"), ("merged", None))
    )
    assert (found.source.adapter, found.name) == ("one", "base-one.1")
    for name, value in expected.read().items():
        close(found.read()[name], value)
    write_adapter(base, tmp_path / "elsewhere", target_modules=["down_proj" if family == "llama" else "c_fc"])
    with pytest.raises(InvalidCheckpoint, match="changes no tensor of this layer"):
        import_plan.plan(tmp_path, ImportModule(checkpoint="base", layer=1, adapter="elsewhere")).read()
    with pytest.raises(CheckpointNotFound, match="no folder"):
        import_plan.plan(tmp_path, ImportModule(checkpoint="base", layer=1, adapter="../one"))
