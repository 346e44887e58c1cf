"""A vision transformer of timm is the class of transformers that computes it, or is refused by name."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests.models.inputs.images.small_encoders import noise, sent
from tests.models.small_models import near
from tests.modules.checkpoints.forms.towers.plain_towers import (
    ARE,
    CLASSES,
    SIZE,
    TIMM,
    run_timm,
    timm_config,
    timm_tensors,
    write_timm,
)

from attention_contract.errors import InvalidCheckpoint
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.folders.model_catalogue import find_folder, listed
from attention_service.models.inputs.images.tower_images import TowerImages
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.modules.checkpoints.forms.towers.timm_towers import image_steps, timm_tower
from attention_service.modules.checkpoints.forms.towers.tower_entries import TowerEntries


def load(folder):
    return LoadedModel.load(folder, dtype=None, device=torch.device("cpu"), progress=lambda _: None)


def pixels_of(image, *, mean, std, share=0.9):
    """The pixels of timm's evaluation: the shorter side resized to the size by the share, the middle cut out."""
    short = int(SIZE / share)
    width, height = image.size
    scale = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    resized = image.resize(scale, Image.Resampling.BICUBIC)
    left, top = (round((side - SIZE) / 2) for side in scale)
    cut = np.asarray(resized)[top : top + SIZE, left : left + SIZE].astype(np.float32) / 255
    return torch.from_numpy((cut - np.float32(mean)) / np.float32(std)).permute(2, 0, 1)[None]


@pytest.mark.sampled(kind=4)
@pytest.mark.parametrize("kind", TIMM)
def test_its_weights_and_outputs_are_those_of_the_same_layers_in_plain_pytorch(tmp_path, kind):
    tensors = write_timm(tmp_path / kind, kind)
    info, model, image = find_folder(tmp_path, kind).info(kind, None), load(tmp_path / kind), noise(75, 110)
    assert info.architecture == type(model.model).__name__ == ARE[kind]
    assert (info.takes, info.refused, info.stored) == (["images"], None, "float32 of timm")
    assert info.left_out == model.left_out == (["head.bias", "head.weight"] if kind == "clip" else [])
    ends = "logits" if model.head.predicts else "pooled" if model.model.config.model_type != "vit" else "hidden"
    reply = forward_reply(model, ModelForwardRequest(images=[sent(image)], return_=["weights", ends]))
    pixels = pixels_of(Image.fromarray(image), mean=[0.4, 0.5, 0.6], std=[0.2, 0.25, 0.3])
    weights, _, expected = run_timm(kind, tensors, pixels)
    for layer, each in zip(reply.layers, weights, strict=True):
        near(layer.weights, each[0])
    if ends != "hidden" and kind != "clip":
        near(np.ravel(getattr(reply, ends)), expected[0], 1e-5)
    assert reply.ran.weights == "float32 of timm"


def test_the_states_of_a_model_without_a_head_are_there_and_no_vector_of_random_numbers(tmp_path):
    tensors = write_timm(tmp_path / "m", "vit-without-head")
    model = load(tmp_path / "m")
    with torch.no_grad():
        read = model.reader.read(ModelForwardRequest(images=[sent(noise())])).arguments
        outputs = model.model(**read)
        _, states, _ = run_timm("vit-without-head", tensors, read["pixel_values"])
    near(outputs.last_hidden_state, states)
    assert outputs.pooler_output is None


def test_classes_have_the_names_of_its_config(tmp_path):
    names = [f"kind {number}" for number in range(CLASSES)]
    write_timm(tmp_path / "m", "vit", label_names=names)
    assert find_folder(tmp_path, "m").info("m", None).classes == names
    assert [*load(tmp_path / "m").head.classes] == names


@pytest.mark.parametrize(
    ("entries", "size", "expected"),
    [
        ({"crop_mode": "squash", "crop_pct": 1.0}, (90, 40), "squash"),
        ({"crop_mode": "border", "crop_pct": 1.0}, (90, 40), "longest"),
        ({"interpolation": "bilinear"}, (31, 29), "shortest"),
    ],
)
def test_images_are_prepared_as_its_config_says(entries, size, expected):
    steps = image_steps(
        TowerEntries(timm_config("vit")["pretrained_cfg"] | entries, "pretrained_cfg of config.json"), (SIZE, SIZE)
    )
    made = TowerImages(steps)(images=[Image.fromarray(noise(*size))], do_normalize=False)["pixel_values"]
    assert (steps.resizing, made.shape) == (expected, (1, 3, SIZE, SIZE))
    if expected == "longest":  # 14 of 32 rows are of the image, and the others have the mean colour
        near(made[0, :, 0], torch.tensor([[102.0], [128.0], [153.0]]).expand(3, SIZE) / 255, 1e-6)


STRANGE = {
    "architecture": ({"architecture": "vit_base_patch16_rope_224"}, {}, "architecture 'vit_base_patch16_rope_224' of"),
    "another-library": ({"architecture": "resnet50"}, {}, "architecture 'resnet50' of timm"),
    "argument": ({"model_args": {"qk_norm": True}}, {}, "its model_args set qk_norm"),
    "layers": ({}, {"blocks.0.attn.q_norm.weight": (8,)}, "its layers have blocks.0.attn.q_norm.weight"),
    "fc_norm": ({}, {"fc_norm.weight": (64,)}, "behind the mean over the patches"),
    "positions": ({}, {"pos_embed": (1, 50, 64)}, "it has 50 positions"),
    "no-positions": ({}, {"pos_embed": None}, "no table of positions"),
    "norm": ({}, {"norm_pre.weight": (64,)}, "patch_embed.proj.bias beside a norm before its layers"),
    "registers": ({}, {"reg_token": (1, 2, 64)}, "positions"),
    "colours": ({}, {"patch_embed.proj.weight": (64, 1, 8, 8)}, "1 colours"),
    "heads": ({"model_args": {"num_heads": 5}}, {}, "no multiple of 5 heads"),
    "gap": ({}, {"blocks.7.norm1.weight": (64,)}, "have gaps"),
    "lacks": ({}, {"blocks.1.mlp.fc1.weight": None}, "lacks the tensor blocks.1.mlp.fc1.weight"),
    "crop": ({"pretrained_cfg": {"input_size": [3, 32, 32], "crop_mode": "random"}}, {}, "crop_mode 'random'"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_no_class_computes_is_refused_before_a_process_is_started(tmp_path, name):
    entries, changes, message = STRANGE[name]
    config = timm_config("vit")
    merged = {key: value | entries.get(key, {}) for key, value in config.items() if isinstance(value, dict)}
    tensors = dict(timm_tensors("vit"))
    for tensor, shape in changes.items():
        tensors.pop(tensor, None)
        if shape is not None:
            tensors[tensor] = torch.zeros(shape)
    (tmp_path / "m").mkdir()
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | entries | merged))
    with pytest.raises(InvalidCheckpoint, match=message.replace("(", r"\(")):
        find_folder(tmp_path, "m")
    (info,) = [each for each in listed(tmp_path) if each.id == "m"]
    assert message in info.refused


def test_a_pickled_file_alone_is_refused(tmp_path):
    write_timm(tmp_path / "m", "vit")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    (info,) = [each for each in listed(tmp_path) if each.id == "m"]
    assert ".safetensors" in info.refused


@pytest.mark.slow
def test_every_architecture_that_is_opened_is_the_one_of_timm(monkeypatch):
    timm = pytest.importorskip("timm")
    opened = []
    for name in timm.list_models():
        with torch.device("meta"):
            if not name.startswith(("vit_", "deit", "flexivit", "test_vit")):
                with pytest.raises(InvalidCheckpoint):
                    timm_tower({"architecture": name, "pretrained_cfg": {}}, {}, "float32")
                continue
            theirs = timm.create_model(name)
        config = {"architecture": name, "pretrained_cfg": theirs.pretrained_cfg}
        shapes = {key: tuple(x.shape) for key, x in theirs.state_dict().items()}
        try:
            ours = timm_tower(config, shapes, "float32").facts.config
        except InvalidCheckpoint:
            continue
        block, own = theirs.blocks[0], ours.get("vision_config", ours)
        tanh = type(block.mlp.act).__name__ == "GELUTanh"
        gates = "silu" if ours["model_type"] == "dinov3_vit" else "gelu"
        act = {"QuickGELU": "quick_gelu", "SiLU": gates}.get(type(block.mlp.act).__name__, "gelu")
        classes = {("VisionTransformer", "Block"), ("VisionTransformerDistilled", "Block")}
        assert (type(theirs).__name__, type(block).__name__) in classes or ours["model_type"] == "dinov3_vit", name
        expected = (block.attn.num_heads, block.norm1.eps, "gelu_pytorch_tanh" if tanh else act)
        assert (own["num_attention_heads"], own["layer_norm_eps"], own["hidden_act"]) == expected, name
        assert theirs.norm.eps == own["layer_norm_eps"], name
        if "Classification" in ours["architectures"][0]:
            assert theirs.global_pool == ("avg" if ours["model_type"] == "siglip" else "token"), name
        opened.append(name)
    assert len(opened) > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", TIMM)
def test_its_numbers_are_those_of_timm_itself(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")
    timm = pytest.importorskip("timm")
    from timm.data import create_transform, resolve_model_data_config
    from timm.layers import set_fused_attn

    set_fused_attn(False)
    architecture, facts = TIMM[kind]
    sizes = {"img_size": 48, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4}
    sizes |= {"num_classes": CLASSES if facts.get("classes") else 0}
    sizes |= {"mlp_ratio": 128 / 48} if facts.get("gated") else {}
    torch.manual_seed(2)
    theirs = timm.create_model(architecture, **sizes)
    for x in theirs.parameters():
        torch.nn.init.normal_(x, std=min(0.4, 1.5 / x.shape[-1] ** 0.5))
    timm.models._hub.save_for_hf(theirs, tmp_path / "m", safe_serialization=True)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True).eval()
    seen, image = [], noise(75, 110)
    for block in theirs.blocks:
        block.attn.attn_drop.register_forward_hook(lambda _, __, weights: seen.append(weights.detach()))
    pixels = create_transform(**resolve_model_data_config(theirs))(Image.fromarray(image))[None]
    with torch.no_grad():
        expected = theirs.forward_features(pixels)[0, 0] if kind == "dinov3" else theirs(pixels)[0]
    model = load(tmp_path / "m")
    near(model.reader.read(ModelForwardRequest(images=[sent(image)])).arguments["pixel_values"], pixels, 1e-6)
    ends = "logits" if model.head.predicts else "pooled" if model.model.config.model_type != "vit" else "hidden"
    reply = forward_reply(model, ModelForwardRequest(images=[sent(image)], return_=["weights", ends]))
    for layer, weights in zip(reply.layers, seen, strict=True):
        near(layer.weights, weights[0])
    if ends != "hidden" and kind != "clip":
        near(np.ravel(getattr(reply, ends)), expected)
