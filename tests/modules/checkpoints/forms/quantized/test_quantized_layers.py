"""One layer of a quantized checkpoint: a module with the numbers that its weights stand for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.quantized_checkpoints import FORMS, write

from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.modules import ImportModule
from attention_service.modules.checkpoints.catalogue import described
from attention_service.modules.checkpoints.import_plan import plan

LAYER = "model.layers.1.self_attn."


@pytest.mark.parametrize("label", FORMS)
def test_a_layer_has_the_numbers_that_its_weights_stand_for(tmp_path, label):
    expected = write(tmp_path / "net", label).state_dict()
    found = plan(tmp_path, ImportModule(checkpoint="net", layer=1))
    assert found.source.quantized == label
    assert found.config.dtype == "float32"
    values = found.read()
    assert set(values) == {f"{role}_proj.weight" for role in "qkvo"}
    for name, value in values.items():
        torch.testing.assert_close(value, expected[LAYER + name], atol=1e-6, rtol=1e-6, msg=name)


def test_a_layer_that_the_quantization_spares_keeps_its_dtype(tmp_path):
    write(tmp_path / "net", "GPTQ int4")
    file = tmp_path / "net" / "model.safetensors"
    tensors = {name: x for name, x in load_file(file).items() if LAYER not in name}
    own = {f"{LAYER}{role}_proj.weight": torch.randn(16 if role in "kv" else 32, 32).bfloat16() for role in "qkvo"}
    save_file(tensors | own, file, {"format": "pt"})
    found = plan(tmp_path, ImportModule(checkpoint="net", layer=1))
    assert (found.source.quantized, found.config.dtype) == (None, "bfloat16")


def test_the_list_of_layers_tells_their_unpacked_sizes(tmp_path):
    write(tmp_path / "net", "AWQ int4")
    first = described(tmp_path, "net").attentions[0]
    assert first.config.dtype == "float32"


def test_a_form_that_is_not_unpacked_is_refused_by_name(tmp_path):
    write(tmp_path / "net", "FP8")
    config = tmp_path / "net" / "config.json"
    entry = {"quant_method": "gptq", "bits": 3}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": entry}))
    with pytest.raises(InvalidCheckpoint, match="GPTQ of 3 bits is not read"):
        plan(tmp_path, ImportModule(checkpoint="net"))


def test_a_scale_that_does_not_fit_is_named(tmp_path):
    write(tmp_path / "net", "FP8")
    file = tmp_path / "net" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"{LAYER}q_proj.weight_scale_inv": torch.ones(7, 5)}, file, {"format": "pt"})
    with pytest.raises(InvalidCheckpoint, match=r"q_proj\.weight_scale_inv of shape \[7, 5\] does not fit"):
        plan(tmp_path, ImportModule(checkpoint="net", layer=1)).read()
