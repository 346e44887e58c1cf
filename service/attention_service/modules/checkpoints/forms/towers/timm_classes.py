"""The classes of transformers that compute those of timm: their configs, and the source of each tensor."""

from collections.abc import Mapping
from typing import Any, Final

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.checkpoints.forms.form import Part, whole
from attention_service.modules.checkpoints.forms.towers.timm_trunk import Trunk
from attention_service.modules.checkpoints.forms.towers.tower import (
    before_zeros,
    behind_zeros,
    depth,
    fused,
    grid,
    half,
    joined,
    need,
    renamed,
    shaped,
    unlike,
    zeros_like,
)

_PLAIN_NAMES: Final = {
    "attention.o_proj": "attn.proj", "layernorm_before": "norm1", "layernorm_after": "norm2", "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}  # fmt: skip
_OF_CLIP: Final = {
    "self_attn.out_proj": "attn.proj", "layer_norm1": "norm1", "layer_norm2": "norm2", "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}  # fmt: skip


def as_class(trunk: Trunk) -> tuple[dict[str, Any], dict[str, Part]]:
    """The config of transformers that computes a trunk, and its tensors. Raises InvalidCheckpoint."""
    if trunk.has("fc_norm.weight") or not trunk.has("norm.weight"):
        raise unlike("its last norm comes behind the mean over the patches (fc_norm), or it has none")
    if trunk.rotates:
        return _dinov3(trunk)
    if not trunk.has("pos_embed"):
        raise unlike("it has no table of positions (pos_embed)")
    if not trunk.has("cls_token"):
        return _siglip(trunk)
    if trunk.has("attn_pool.latent"):
        raise unlike("it has a class token and a pooling by attention (attn_pool)")
    if trunk.has("norm_pre.weight"):
        return _clip(trunk)
    apart = _positions(trunk)
    if trunk.has("blocks.0.ls1.gamma") or trunk.has("reg_token") or apart:
        return _dinov2(trunk, apart=apart)
    return _vit(trunk)


def _positions(trunk: Trunk) -> bool:
    """True if the positions are those of the patches alone, and False if tokens before them have one too.

    Raises InvalidCheckpoint for any other number of positions.
    """
    registers = trunk.shapes["reg_token"][1] if trunk.has("reg_token") else 0
    before = registers + sum(trunk.has(name) for name in ("cls_token", "dist_token"))
    _, (rows, columns) = grid(trunk.shapes, "patch_embed.proj.weight", trunk.size)
    count = need(trunk.shapes, "pos_embed")[1]
    if count not in {rows * columns, rows * columns + before}:
        raise InvalidCheckpoint.at(
            "checkpoint",
            f"it has {count} positions (pos_embed), and its images of {trunk.size[0]} × {trunk.size[1]} pixels "
            f"(input_size, img_size or image_size of config.json) have {rows * columns} patches",
        )
    return bool(before) and count == rows * columns


def _layers(trunk: Trunk, target: str, names: Mapping[str, str], attention: str = "attention.") -> dict[str, Part]:
    """The tensors of all layers. ``target``: the beginning of a layer in transformers, before its number."""
    parts: dict[str, Part] = {}
    for number in range(depth(trunk.shapes, "blocks.")):
        old, new = f"blocks.{number}.", f"{target}{number}."
        parts |= fused(f"{old}attn.qkv", f"{new}{attention}", trunk.shapes)
        parts |= renamed(names, trunk.shapes, new, old)
    return parts


def _biased(trunk: Trunk, expected: str = "blocks.0.attn.qkv.bias") -> None:
    if not trunk.has(expected):
        raise unlike(f"it has no {expected}")


def _vit(trunk: Trunk) -> tuple[dict[str, Any], dict[str, Part]]:
    """ViT, or DeiT with a token of distillation. Source: Dosovitskiy et al. 2021, Touvron et al. 2021."""
    taught = trunk.has("dist_token")
    kind, title = ("deit", "DeiT") if taught else ("vit", "ViT")
    classifies = bool(trunk.head) and trunk.pool == "token"
    base = f"{kind}." if classifies else ""
    embeddings = f"{base}embeddings."
    parts = _layers(trunk, f"{base}layers.", _PLAIN_NAMES) | renamed({f"{base}layernorm": "norm"}, trunk.shapes)
    parts |= renamed({f"{embeddings}patch_embeddings.projection": "patch_embed.proj"}, trunk.shapes)
    parts |= {f"{embeddings}cls_token": whole("cls_token"), f"{embeddings}position_embeddings": whole("pos_embed")}
    if taught:
        parts[f"{embeddings}distillation_token"] = whole("dist_token")
    if classifies:
        heads = {"cls_classifier": "head", "distillation_classifier": "head_dist"} if taught else {"classifier": "head"}
        parts |= renamed(heads, trunk.shapes)
    end = ("ForImageClassificationWithTeacher" if taught else "ForImageClassification") if classifies else "Model"
    own = {"qkv_bias": trunk.has("blocks.0.attn.qkv.bias")}
    return {"model_type": kind, "architectures": [f"{title}{end}"], **trunk.sizes, **own}, parts


def _dinov2(trunk: Trunk, *, apart: bool) -> tuple[dict[str, Any], dict[str, Part]]:
    """DINOv2, or with registers, whose layers have scales. ``apart``: the class token has no position.

    Source: Oquab et al. 2023, Darcet et al. 2024.
    """
    if trunk.has("dist_token") or (trunk.has("reg_token") and not apart):
        raise unlike("it has a token of distillation beside scales of layers, or positions of registers")
    if not trunk.has("blocks.0.ls1.gamma"):
        raise unlike("it has registers, or a class token without a position, and no scales of layers (ls1.gamma)")
    gated = trunk.inner != need(trunk.shapes, "blocks.0.mlp.fc1.weight")[0]
    ratio, rest = divmod(trunk.inner, trunk.width)
    if gated:
        ratio, rest = next(
            ((times, 0) for times in range(1, 9) if (trunk.width * times * 2 // 3 + 7) // 8 * 8 == trunk.inner), (0, 1)
        )
    if rest:
        raise unlike(f"its layers are {trunk.inner} wide inside, which is no multiple of {trunk.width}")
    kind, title = ("dinov2_with_registers", "Dinov2WithRegisters") if trunk.has("reg_token") else ("dinov2", "Dinov2")
    classifies = bool(trunk.head) and trunk.pool == "token"
    base = f"{kind}." if classifies else ""
    names = {"attention.o_proj": "attn.proj", "norm1": "norm1", "norm2": "norm2"}
    names |= {"mlp.down_proj": "mlp.fc2"} if gated else {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    parts = _layers(trunk, f"{base}encoder.layer.", names) | renamed({f"{base}layernorm": "norm"}, trunk.shapes)
    for number in range(depth(trunk.shapes, "blocks.")):
        old, new = f"blocks.{number}.", f"{base}encoder.layer.{number}."
        for branch in (1, 2):
            need(trunk.shapes, f"{old}ls{branch}.gamma")
            parts[f"{new}layer_scale{branch}.lambda1"] = whole(f"{old}ls{branch}.gamma")
        for part, letter in enumerate(("gate", "up") if gated else ()):
            for ending in ("weight", "bias"):
                parts[f"{new}mlp.{letter}_proj.{ending}"] = half(f"{old}mlp.fc1.{ending}", part)
    embeddings = f"{base}embeddings."
    parts |= renamed({f"{embeddings}patch_embeddings.projection": "patch_embed.proj"}, trunk.shapes)
    parts |= {
        f"{embeddings}cls_token": whole("cls_token"),
        f"{embeddings}mask_token": zeros_like("cls_token", 1, trunk.width),
        f"{embeddings}position_embeddings": behind_zeros("pos_embed") if apart else whole("pos_embed"),
    }
    own: dict[str, Any] = {
        "mlp_ratio": ratio, "use_swiglu_ffn": gated, "qkv_bias": trunk.has("blocks.0.attn.qkv.bias"),
    }  # fmt: skip
    if trunk.has("reg_token"):
        parts[f"{embeddings}register_tokens"] = whole("reg_token")
        own["num_register_tokens"] = int(trunk.shapes["reg_token"][1])
    if classifies:
        parts |= {"classifier.weight": before_zeros("head.weight"), "classifier.bias": whole("head.bias")}
    end = "ForImageClassification" if classifies else "Model"
    sizes = {name: value for name, value in trunk.sizes.items() if name != "intermediate_size"}
    return {"model_type": kind, "architectures": [f"{title}{end}"], **sizes, **own}, parts


def _dinov3(trunk: Trunk) -> tuple[dict[str, Any], dict[str, Part]]:
    """DINOv3. Source: Siméoni et al. 2025."""
    gated = trunk.has("blocks.0.mlp.fc1_g.weight")
    names = {"attention.o_proj": "attn.proj", "norm1": "norm1", "norm2": "norm2", "mlp.down_proj": "mlp.fc2"}
    names |= {"mlp.gate_proj": "mlp.fc1_g", "mlp.up_proj": "mlp.fc1_x"} if gated else {"mlp.up_proj": "mlp.fc1"}
    parts = _layers(trunk, "model.layer.", names)
    biased = trunk.has("blocks.0.attn.q_bias")
    for number in range(depth(trunk.shapes, "blocks.")):
        old, new = f"blocks.{number}.", f"model.layer.{number}."
        own = {f"layer_scale{branch}.lambda1": f"gamma_{branch}" for branch in (1, 2)}
        own |= {f"attention.{letter}_proj.bias": f"attn.{letter}_bias" for letter in "qv" if biased}
        for name, source in own.items():
            need(trunk.shapes, old + source)
            parts[new + name] = whole(old + source)
    for name in ("cls_token", "reg_token"):
        need(trunk.shapes, name)
    parts |= renamed({"norm": "norm", "embeddings.patch_embeddings": "patch_embed.proj"}, trunk.shapes)
    parts |= {
        "embeddings.cls_token": whole("cls_token"), "embeddings.register_tokens": whole("reg_token"),
        "embeddings.mask_token": zeros_like("cls_token", 1, 1, trunk.width),
    }  # fmt: skip
    more = {
        "num_register_tokens": int(trunk.shapes["reg_token"][1]), "use_gated_mlp": gated, "rope_theta": 100.0,
        "query_bias": biased, "key_bias": False, "value_bias": biased,
    }  # fmt: skip
    return {"model_type": "dinov3_vit", "architectures": ["DINOv3ViTModel"], **trunk.sizes, **more}, parts


def _clip(trunk: Trunk) -> tuple[dict[str, Any], dict[str, Part]]:
    """The tower of CLIP that reads images. Source: Radford et al. 2021."""
    strange = [name for name in ("dist_token", "reg_token", "blocks.0.ls1.gamma", "patch_embed.proj.bias")
               if trunk.has(name)]  # fmt: skip
    if strange or _positions(trunk):
        raise unlike(f"it has {', '.join(strange) or 'no position of its class token'} beside a norm before its layers")
    _biased(trunk)
    parts = _layers(trunk, "encoder.layers.", _OF_CLIP, "self_attn.")
    parts |= renamed({"pre_layrnorm": "norm_pre", "post_layernorm": "norm"}, trunk.shapes)
    parts |= {
        "embeddings.class_embedding": shaped("cls_token", trunk.width),
        "embeddings.patch_embedding.weight": whole("patch_embed.proj.weight"),
        "embeddings.position_embedding.weight": shaped("pos_embed", -1, trunk.width),
    }
    return {"model_type": "clip_vision_model", "architectures": ["CLIPVisionModel"], **trunk.sizes}, parts


def _siglip(trunk: Trunk) -> tuple[dict[str, Any], dict[str, Part]]:
    """The tower of SigLIP that reads images, or its classifier of their mean. Source: Zhai et al. 2023."""
    strange = [name for name in ("reg_token", "blocks.0.ls1.gamma", "norm_pre.weight") if trunk.has(name)]
    if strange:
        raise unlike(f"it has {', '.join(strange)} and no class token")
    _biased(trunk)
    classifies = bool(trunk.head) and trunk.pool == "avg"
    base = "vision_model." if classifies else ""
    parts = siglip_parts(trunk, base)
    own = trunk.sizes | {"vision_use_head": trunk.has("attn_pool.latent")}
    if not classifies:
        return {"model_type": "siglip_vision_model", "architectures": ["SiglipVisionModel"], **own}, parts
    parts |= renamed({"classifier": "head"}, trunk.shapes)
    return {"model_type": "siglip", "architectures": ["SiglipForImageClassification"], "vision_config": own}, parts


def siglip_parts(trunk: Trunk, base: str) -> dict[str, Part]:
    """The tensors of a tower of SigLIP that reads images. ``base``: the beginning of their names."""
    _positions(trunk)
    if trunk.size[0] != trunk.size[1]:
        raise unlike("its images are no squares")
    parts = _layers(trunk, f"{base}encoder.layers.", _OF_CLIP, "self_attn.")
    parts |= renamed({f"{base}post_layernorm": "norm", f"{base}embeddings.patch_embedding": "patch_embed.proj"},
                     trunk.shapes)  # fmt: skip
    parts[f"{base}embeddings.position_embedding.weight"] = shaped("pos_embed", -1, trunk.width)
    if trunk.has("attn_pool.latent"):
        _biased(trunk, "attn_pool.q.bias")
        if tuple(trunk.shapes["attn_pool.latent"]) != (1, 1, trunk.width):
            raise unlike("it pools by several queries (attn_pool.latent)")
        head = f"{base}head."
        parts |= {
            f"{head}probe": whole("attn_pool.latent"),
            f"{head}attention.in_proj_weight": joined("attn_pool.q.weight", "attn_pool.kv.weight"),
            f"{head}attention.in_proj_bias": joined("attn_pool.q.bias", "attn_pool.kv.bias"),
        }
        names = {"attention.out_proj": "proj", "layernorm": "norm", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
        parts |= renamed(names, trunk.shapes, head, "attn_pool.")
    return parts
