"""Quantized weights whose files lack a part, or have one of another kind: refused by name, and nothing is unpacked."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.quantized_checkpoints import FORMS, torchao, write

from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.modules import ImportModule
from attention_service.models.folders.model_catalogue import find_folder, listed
from attention_service.modules.checkpoints.forms.quantized import quantized_tensors
from attention_service.modules.checkpoints.forms.quantized.numbers import Read
from attention_service.modules.checkpoints.forms.quantized.quantized_form import QuantizedForm
from attention_service.modules.checkpoints.forms.quantized.quantized_tensors import form_of
from attention_service.modules.checkpoints.import_plan import plan

MODULE = "model.layers.1.self_attn.k_proj."
UNTOLD = {("torchao int8", "_weight_zero_point"), ("torchao int8", "_weight_act_pre_scale"), ("FP8", "input_scale")}
"""Parts that a file may have or not, and whose absence nothing tells: neither its config nor its other tensors."""
IGNORED = {"weight_format", "input_scale"}


def parts_of(label):
    """The parts of a weight of a form besides its numbers, as the library writes them."""
    stored, _ = FORMS[label][0](torch.randn(32, 32))
    main = form_of(FORMS[label][1]).main
    return sorted(stored.keys() - {main} - IGNORED)


def rewrite(folder, change):
    """Write the tensors of a folder anew."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(change(tensors), file, {"format": "pt"})


def without(part):
    """Take a part away from one module, or from all of them."""
    return lambda tensors: {name: x for name, x in tensors.items() if not name.endswith(part)}


@pytest.fixture
def nothing_is_unpacked(monkeypatch):
    """A weight that is unpacked is a fault."""

    def unpack(prefix: str, _read: Read) -> torch.Tensor:
        raise AssertionError(f"{prefix} was unpacked")

    made = quantized_tensors.form_of

    def form(stated):
        found = made(stated)
        if isinstance(found, QuantizedForm):
            object.__setattr__(found, "unpack", unpack)
        return found

    monkeypatch.setattr("attention_service.modules.checkpoints.forms.quantized.quantized_tensors.form_of", form)


def test_every_form_that_is_read_is_walked():
    assert {entry.get("quant_method", "mlx") for _, entry in FORMS.values()} == {*quantized_tensors._FORMS}


CASES = [(label, part) for label in FORMS for part in parts_of(label) if (label, part) not in UNTOLD]


@pytest.mark.sampled
@pytest.mark.usefixtures("nothing_is_unpacked")
@pytest.mark.parametrize("where", [MODULE, ""], ids=["one module", "all modules"])
@pytest.mark.parametrize(("label", "part"), CASES)
def test_a_missing_part_is_named(tmp_path, label, part, where):
    write(tmp_path / "net", label)
    rewrite(tmp_path / "net", without(where + part))
    with pytest.raises(InvalidCheckpoint, match=part) as layer:
        plan(tmp_path, ImportModule(checkpoint="net", layer=1)).read()
    assert layer.value.param == "checkpoint"
    with pytest.raises(InvalidCheckpoint, match=part):
        find_folder(tmp_path, "net")
    (row,) = [each for each in listed(tmp_path) if each.checkpoint == "net"]
    assert part in row.refused


@pytest.mark.usefixtures("nothing_is_unpacked")
@pytest.mark.parametrize("label", FORMS)
def test_all_parts_missing_at_once_are_named(tmp_path, label):
    """What is left has the dtype of packed numbers, and no name that tells it from a weight of floats."""
    write(tmp_path / "net", label)

    def change(tensors):
        for part in parts_of(label):
            tensors = without(part)(tensors)
        return tensors

    rewrite(tmp_path / "net", change)
    with pytest.raises(InvalidCheckpoint, match=r"is stored as .* missing"):
        plan(tmp_path, ImportModule(checkpoint="net", layer=1))
    with pytest.raises(InvalidCheckpoint, match=r"is stored as .* missing"):
        find_folder(tmp_path, "net")


def test_the_zero_points_of_intx_are_needed(tmp_path):
    write(tmp_path / "net", "torchao int8")
    config = tmp_path / "net" / "config.json"
    entry = {
        "quantization_config": torchao("IntxWeightOnlyConfig", weight_dtype={"_type": "torch.dtype", "_data": "int8"})
    }
    config.write_text(json.dumps(json.loads(config.read_text()) | entry))
    find_folder(tmp_path, "net")
    rewrite(tmp_path / "net", without("_weight_zero_point"))
    with pytest.raises(InvalidCheckpoint, match="_weight_zero_point"):
        find_folder(tmp_path, "net")


STRANGE = {
    "one dimension": lambda x: x.flatten(),
    "three dimensions": lambda x: x[None, None, None],
    "no numbers": lambda x: x[:0],
    "half": lambda x: x[: max(len(x) // 2, 1)] if x.ndim else x,
    "texts": lambda _: torch.tensor([*b"{]"], dtype=torch.uint8),
    "negative": lambda x: -x.float().abs().to(x.dtype) if x.dtype in {torch.int32, torch.int64} else x.flatten(),
    "booleans": lambda x: torch.zeros(x.shape, dtype=torch.bool),
    "doubles": lambda x: x.float().double(),
}  # fmt: skip


@pytest.mark.sampled(label=2)
@pytest.mark.parametrize("label", FORMS)
def test_a_part_of_another_kind_is_refused_or_fits(tmp_path, label):
    """No other error: a part of any dtype and shape is read, or named."""
    write(tmp_path / "net", label)
    tensors = load_file(tmp_path / "net" / "model.safetensors")
    main = form_of(FORMS[label][1]).main
    refused = []
    for part, kind in itertools.product((main, *parts_of(label)), STRANGE):
        name = MODULE + part
        strange = STRANGE[kind](tensors[name]).contiguous().clone()
        rewrite(tmp_path / "net", lambda _, name=name, strange=strange: tensors | {name: strange})
        try:
            find_folder(tmp_path, "net")
            plan(tmp_path, ImportModule(checkpoint="net", layer=1)).read()
        except InvalidCheckpoint as fault:
            refused.append(fault.detail)
    assert len(refused) > len(parts_of(label))
    # Of a whole weight that has fewer rows, the config tells that.
    assert [each for each in refused if MODULE not in each and "the layer's tensors have" not in each] == []


def test_fp8_numbers_that_no_scale_belongs_to_are_named(tmp_path):
    write(tmp_path / "net", "FP8")
    extra = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 4, 4, dtype=torch.float8_e4m3fn)}
    rewrite(tmp_path / "net", lambda tensors: tensors | extra)
    with pytest.raises(InvalidCheckpoint, match="gate_up_proj is stored as F8_E4M3"):
        find_folder(tmp_path, "net")


@pytest.mark.parametrize("state", ["{", "[]", "{}", '{"shape": [32, 32], "blocksize": -1}', '{"shape": 3}',
                                   '{"shape": [32, 99], "blocksize": 16}'])  # fmt: skip
def test_a_state_of_nf4_that_says_nothing_is_named(tmp_path, state):
    write(tmp_path / "net", "bitsandbytes NF4")
    name = f"{MODULE}weight.quant_state.bitsandbytes__nf4"
    rewrite(tmp_path / "net", lambda tensors: tensors | {name: torch.tensor([*state.encode()], dtype=torch.uint8)})
    for ask in (lambda: find_folder(tmp_path, "net"), lambda: plan(tmp_path, ImportModule(checkpoint="net", layer=1))):
        with pytest.raises(InvalidCheckpoint, match=r"k_proj\.weight\.quant_state"):
            ask()
