"""A pair of OpenCLIP is CLIPModel or SiglipModel of transformers, or is refused by name."""

import copy
import json

import numpy as np
import pytest
import torch
from PIL import Image
from tests.client.tiny_models import tokenizer
from tests.models.inputs.images.small_encoders import noise, sent
from tests.models.small_models import near
from tests.modules.checkpoints.forms.towers.plain_towers import (
    CLIP,
    LENGTH,
    PREPARED,
    SIGLIP,
    SIZE,
    openclip_tensors,
    run_clip_image,
    run_clip_text,
    run_siglip_image,
    run_siglip_text,
    siglip_tensors,
    write_openclip,
)
from tests.modules.checkpoints.forms.towers.test_timm_towers import load

from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelWeightsRequest
from attention_contract.schemas.text_similarity import TextSimilarityRequest
from attention_service.models.answers.embeddings.pair_similarity import pair_similarity_reply, plan_pair_similarity
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.folders.model_catalogue import find_folder, listed

IDS = [5, 3, 7, 8, 40, 2]
KINDS = {
    "clip": (CLIP, openclip_tensors),
    "clip-quick": (CLIP | {"quick_gelu": True}, openclip_tensors),
    "clip-custom": (CLIP | {"custom_text": True}, lambda: openclip_tensors(custom=True)),
    "siglip": (SIGLIP, siglip_tensors),
}


def pixels_of(image):
    squashed = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)).astype(np.float32) / 255
    made = (squashed - np.float32(PREPARED["mean"])) / np.float32(PREPARED["std"])
    return torch.from_numpy(made).permute(2, 0, 1)[None]


def run(kind, tensors, ids, pixels):
    """The weights and vectors of both towers, by plain PyTorch."""
    if kind == "siglip":
        filled = torch.tensor([[*ids, *[0] * (LENGTH - len(ids))]])
        return run_siglip_text(tensors, filled), run_siglip_image(tensors, pixels)
    act = "quick" if kind == "clip-quick" else "gelu"
    before = "text." if kind == "clip-custom" else ""
    return run_clip_text(tensors, torch.tensor([ids]), act, before), run_clip_image(tensors, pixels, act)


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", KINDS)
def test_both_towers_are_those_of_the_same_layers_in_plain_pytorch(tmp_path, kind):
    config, make = KINDS[kind]
    tensors = write_openclip(tmp_path / "m", config, make())
    info, model, image = find_folder(tmp_path, "m").info("m", None), load(tmp_path / "m"), noise(75, 110)
    name = "SiglipModel" if kind == "siglip" else "CLIPModel"
    assert info.architecture == type(model.model).__name__ == name
    assert (info.takes, info.refused, info.stored) == (["images"], None, "float32 of OpenCLIP")
    assert info.left_out == model.left_out == []
    (text_weights, text), (image_weights, vector) = run(kind, tensors, IDS, pixels_of(Image.fromarray(image)))
    reply = weights_reply(model, ModelWeightsRequest(tokens=IDS, images=[sent(image)]))
    assert [layer.layer for layer in reply.layers] == [0, 1, "vision.0", "vision.1"]
    for layer, weights in zip(reply.layers, [text_weights[0][0], text_weights[1][0], *image_weights], strict=True):
        near(layer.weights, weights)
    assert reply.ran.weights == "float32 of OpenCLIP"
    pooled = [
        forward_reply(model, ModelForwardRequest(**fields, return_=["pooled"])).pooled
        for fields in ({"tokens": IDS}, {"images": [sent(image)]})
    ]
    near(pooled[0], text[0])
    near(pooled[1], vector[0])


def test_a_folder_with_a_tokenizer_takes_texts(tmp_path):
    write_openclip(tmp_path / "m", SIGLIP, siglip_tensors(), tokenizer())
    model = load(tmp_path / "m")
    assert find_folder(tmp_path, "m").takes == model.reader.takes == ["text", "images"]
    cleaned, plain = (model.reader.tokens(text, "text") for text in (" The, CAT: sat.", "the cat sat"))
    assert cleaned.ids == plain.ids
    assert cleaned.spans == [(1, 4), (6, 9), (11, 14)]
    request = TextSimilarityRequest(pairs=[["the cat", sent(noise())]])
    reply = pair_similarity_reply(model, request, plan_pair_similarity(model, request))
    assert [len(each) for each in reply.tokens[0]] == [LENGTH, (SIZE // 8) ** 2]


STRANGE = {
    "texts-of-another": (CLIP, {"text_cfg": {"hf_model_name": "xlm-roberta-base"}}, "texts is xlm-roberta-base"),
    "decoder": (CLIP, {"multimodal_cfg": {"width": 8}}, "a decoder of texts too"),
    "scales": (CLIP, {"vision_cfg": {"ls_init_value": 0.1}}, "vision_cfg.ls_init_value is '0.1'"),
    "pooling": (CLIP, {"vision_cfg": {"attentional_pool": True}}, "vision_cfg.attentional_pool"),
    "norm": (CLIP, {"vision_cfg": {"no_ln_pre": True}}, "vision_cfg.no_ln_pre"),
    "all-tokens": (CLIP, {"text_cfg": {"pool_type": "last"}}, "text_cfg.pool_type is 'last'"),
    "no-mask": (CLIP, {"text_cfg": {"no_causal_mask": True}}, "text_cfg.no_causal_mask"),
    "both-activations": (CLIP, {"quick_gelu": True, "text_cfg": {"act_kwargs": {"approximate": "none"}}}, "quick_gelu"),
    "another-tower": (CLIP, {"vision_cfg": {"timm_model_name": "convnext_base"}}, "vision_cfg.timm_pool"),
    "mask": (SIGLIP, {"text_cfg": {"no_causal_mask": False}}, "text_cfg.no_causal_mask is 'False'"),
    "projection": (SIGLIP, {"vision_cfg": {"timm_proj": "linear"}}, "vision_cfg.timm_proj is 'linear'"),
    "unknown-tower": (SIGLIP, {"vision_cfg": {"timm_model_name": "vit_base_patch16_rope_224"}}, "16_rope_224"),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_what_no_class_computes_is_refused_before_a_process_is_started(tmp_path, name):
    config, changes, message = STRANGE[name]
    merged = copy.deepcopy(config)
    for key, value in changes.items():
        merged[key] = merged.get(key, {}) | value if isinstance(value, dict) else value
    write_openclip(tmp_path / "m", merged, siglip_tensors() if config is SIGLIP else openclip_tensors())
    with pytest.raises(InvalidCheckpoint, match=message):
        find_folder(tmp_path, "m")
    (info,) = [each for each in listed(tmp_path) if each.id == "m"]
    assert message in info.refused


def test_a_folder_that_transformers_reads_too_is_read_by_it(tmp_path):
    write_openclip(tmp_path / "m", CLIP, openclip_tensors())
    (tmp_path / "m" / "open_clip_model.safetensors").rename(tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "clip", "architectures": ["CLIPModel"]}))
    assert find_folder(tmp_path, "m").info("m", None).stored == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip", "clip-quick", "siglip"])
def test_its_numbers_are_those_of_openclip_itself(tmp_path, kind):
    open_clip = pytest.importorskip("open_clip")
    from open_clip.transform import PreprocessCfg, image_transform_v2
    from timm.layers import set_fused_attn

    set_fused_attn(False)
    config = copy.deepcopy(SIGLIP if kind == "siglip" else CLIP | {"quick_gelu": kind == "clip-quick"})
    if kind == "siglip":  # whose tower has the sizes that its name stands for
        config |= {"embed_dim": 768}
        config["vision_cfg"]["image_size"] = 224
    torch.manual_seed(3)
    made = open_clip.CustomTextCLIP if config.pop("custom_text", False) else open_clip.CLIP
    theirs = made(**config).eval()
    for x in theirs.parameters():
        torch.nn.init.normal_(x, std=min(0.3, 1.5 / max(1, x.shape[-1] if x.ndim else 1) ** 0.5))
    write_openclip(tmp_path / "m", config, {name: x.contiguous() for name, x in theirs.state_dict().items()})
    prepare = image_transform_v2(PreprocessCfg(size=config["vision_cfg"]["image_size"], **PREPARED), is_train=False)
    model, image = load(tmp_path / "m"), noise(75, 110)
    pixels = prepare(Image.fromarray(image))[None]
    read = model.reader.images.read(ModelForwardRequest(images=[sent(image)])).arguments
    near(read["pixel_values"], pixels, 1e-6)
    ids = torch.tensor([[*IDS, *[0] * (LENGTH - len(IDS))]])
    seen = []
    text = theirs.transformer if kind != "siglip" else theirs.text.transformer
    blocks = [(block, "attn") for block in text.resblocks]
    if kind != "siglip":
        blocks += [(block, "attn") for block in theirs.visual.transformer.resblocks]
    for block, attention in blocks:
        own = getattr(block, attention)
        own.register_forward_pre_hook(
            lambda _, args, options: (args, options | {"need_weights": True, "average_attn_weights": False}),
            with_kwargs=True,
        )
        own.register_forward_hook(lambda _, __, output: seen.append(output[1].detach()))
    if kind == "siglip":
        for block in theirs.visual.trunk.blocks:
            block.attn.attn_drop.register_forward_hook(lambda _, __, weights: seen.append(weights.detach()))
    with torch.no_grad():
        vectors = theirs.encode_text(ids)[0], theirs.encode_image(pixels)[0]
    reply = weights_reply(model, ModelWeightsRequest(tokens=IDS, images=[sent(image)]))
    for layer, weights in zip(reply.layers, seen, strict=True):
        rows = layer.weights.shape[-1]
        near(np.reshape(layer.weights, (-1, rows, rows)), weights[0, :, :rows, :rows])
    pooled = [
        forward_reply(model, ModelForwardRequest(**fields, return_=["pooled"])).pooled
        for fields in ({"tokens": IDS}, {"images": [sent(image)]})
    ]
    for ours, expected in zip(pooled, vectors, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5 * float(expected.abs().max().clamp_min(1)))
