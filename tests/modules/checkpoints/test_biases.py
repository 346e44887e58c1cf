"""Biases that config.json asks for or denies, against the modules that the classes of Transformers make."""

import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.modules.checkpoints.test_families import TINY, built, saved
from tests.modules.checkpoints.tiny_models import ModelOfTransformers, Tiny

from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.modules import ImportModule
from attention_service.modules.checkpoints.families import FAMILIES
from attention_service.modules.checkpoints.families.biases import BIASES
from attention_service.modules.checkpoints.import_plan import plan

ONE_EACH = {tiny.model_type: tiny for tiny in reversed(TINY) if isinstance(tiny.build, ModelOfTransformers)}


def variants(tiny: Tiny):
    """The block by the defaults of its class, and with each entry about biases turned over."""
    build = tiny.build
    plain = {name: value for name, value in build.options.items() if "bias" not in name}
    config = vars(build.config_class(**plain))
    flags = [name for name, value in config.items() if "bias" in name and isinstance(value, bool)]
    for rotated in ({}, *({name: not config[name]} for name in flags)):
        yield replace(tiny, build=replace(build, options=plain | rotated))


def test_every_family_of_transformers_has_a_rule():
    assert BIASES.keys() == {family.name for family in FAMILIES.values() if family.model_types}


@pytest.mark.sampled(kind=16)
@pytest.mark.parametrize("kind", ONE_EACH)
def test_the_rule_is_that_of_the_class(tmp_path, kind):
    for number, tiny in enumerate(variants(ONE_EACH[kind])):
        saved(built(tiny), tmp_path / f"net{number}")
        made = plan(tmp_path, ImportModule(checkpoint=f"net{number}", **tiny.request))  # raises if one is missing
        assert made.source.ignored == []


@pytest.fixture
def llama(tmp_path):
    """Save a tiny Llama, its state changed."""

    def save(change, **options):
        tiny = ONE_EACH["llama"]
        build = replace(tiny.build, options=tiny.build.options | options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved(built(replace(tiny, build=build)), tmp_path / "net")
        file = tmp_path / "net" / "model.safetensors"
        state = load_file(file)
        change(state)
        save_file(state, file, metadata={"format": "pt"})
        return tmp_path

    return save


BIAS = "layers.0.self_attn.q_proj.bias"


def test_a_bias_that_the_config_denies_is_left_out_and_reported(llama):
    root = llama(lambda state: state.update({BIAS: torch.ones(32)}), attention_bias=False)
    made = plan(root, ImportModule(checkpoint="net", layer=0))
    assert made.source.ignored == [BIAS]
    assert "q_proj.bias" not in made.read()
    assert plan(root, ImportModule(checkpoint="net", layer=1)).source.ignored == []


def test_a_bias_that_the_config_asks_for_and_that_is_not_there_is_refused(llama):
    root = llama(lambda state: state.pop(BIAS), attention_bias=True)
    with pytest.raises(InvalidCheckpoint, match=BIAS) as caught:
        plan(root, ImportModule(checkpoint="net", layer=0))
    assert caught.value.facts["missing"] == [BIAS]
    assert "q_proj.bias" in plan(root, ImportModule(checkpoint="net", layer=1)).read()


def test_a_config_of_quantized_numbers_is_refused(llama):
    root = llama(lambda state: None, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(InvalidCheckpoint, match="bitsandbytes") as caught:
        plan(root, ImportModule(checkpoint="net", layer=0))
    assert caught.value.facts["entry"] == "quantization_config"


def test_modules_that_the_quantization_spares_are_taken(llama):
    spared = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "layers.0.self_attn"]}
    root = llama(lambda state: None, quantization_config=spared)
    assert plan(root, ImportModule(checkpoint="net", layer=0)).config.num_heads == 4
    with pytest.raises(InvalidCheckpoint, match="mxfp4"):
        plan(root, ImportModule(checkpoint="net", layer=1))
