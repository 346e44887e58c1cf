"""A layer of timm or OpenCLIP is imported as a module, by the names and sizes of the class of transformers."""

import pytest
import torch
from safetensors.torch import save_file
from tests.modules.checkpoints.forms.towers.plain_towers import (
    CLIP,
    HEADS,
    SIGLIP,
    WIDTH,
    openclip_tensors,
    siglip_tensors,
    write_openclip,
    write_timm,
)

from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.modules import ImportModule
from attention_service.modules.checkpoints.catalogue import described
from attention_service.modules.checkpoints.import_plan import plan


@pytest.mark.parametrize("kind", ["vit", "clip", "siglip"])
def test_a_layer_of_timm_has_the_parts_of_its_fused_tensors(tmp_path, kind):
    tensors = write_timm(tmp_path / "m", kind)
    found = plan(tmp_path, ImportModule(checkpoint="m", layer=1))
    assert (found.config.d_model, found.config.num_heads, found.config.spec.masks) == (WIDTH, HEADS, [])
    values, fused = found.read(), tensors["blocks.1.attn.qkv.weight"].chunk(3)
    for role, expected in zip("qkv", fused, strict=True):
        assert torch.equal(values[f"{role}_proj.weight"], expected)
    assert torch.equal(values["o_proj.weight"], tensors["blocks.1.attn.proj.weight"])


@pytest.mark.parametrize(
    ("config", "tensors", "causal"), [(CLIP, openclip_tensors, True), (SIGLIP, siglip_tensors, False)]
)
def test_a_layer_of_each_tower_of_openclip_is_imported(tmp_path, config, tensors, causal):
    stored = tensors()
    write_openclip(tmp_path / "m", config, stored)
    listed = described(tmp_path, "m")
    assert {each.stack for each in listed.attentions if each.problem is None} == {"text", "vision"}
    text = plan(tmp_path, ImportModule(checkpoint="m", layer=0, stack="text"))
    assert bool(text.config.spec.masks) == causal
    before = next(name for name in stored if name.endswith("resblocks.0.attn.in_proj_weight") and "visual" not in name)
    assert torch.equal(text.read()["k_proj.weight"], stored[before].chunk(3)[1])


def test_a_tensor_of_another_shape_is_named(tmp_path):
    tensors = write_timm(tmp_path / "m", "vit")
    narrow = {"blocks.1.attn.qkv.weight": tensors["blocks.1.attn.qkv.weight"][:2].clone()}
    save_file(dict(tensors) | narrow, tmp_path / "m" / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"attention\.v_proj.* cannot be made of blocks\.1\.attn\.qkv"):
        plan(tmp_path, ImportModule(checkpoint="m", layer=1))
