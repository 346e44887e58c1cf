"""Pairs of OpenCLIP: a folder with an ``open_clip_config.json`` and an ``open_clip_model.safetensors``.

The fields of both towers: https://github.com/mlfoundations/open_clip, ``CLIPVisionCfg`` and ``CLIPTextCfg``.
"""

from collections.abc import Mapping
from typing import Any, Final

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.checkpoints.forms.form import Form, ImageSteps, Part, Resizing, whole
from attention_service.modules.checkpoints.forms.towers.timm_classes import siglip_parts
from attention_service.modules.checkpoints.forms.towers.timm_trunk import trunk_of
from attention_service.modules.checkpoints.forms.towers.tower import (
    INTERPOLATIONS,
    Shapes,
    depth,
    fused,
    grid,
    need,
    renamed,
    shaped,
    tower_form,
    transposed,
    unlike,
)
from attention_service.modules.checkpoints.forms.towers.tower_entries import TowerEntries

CONFIG: Final = "open_clip_config.json"
TENSORS: Final = "open_clip_model.safetensors"
_OPENAI: Final = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_RESIZING: Final[Mapping[str, Resizing]] = {"shortest": "shortest", "longest": "longest", "squash": "squash"}
_WITHOUT_EFFECT: Final = frozenset({
    "layers", "width", "patch_size", "image_size", "mlp_ratio", "head_width", "heads", "context_length", "vocab_size",
    "patch_dropout", "attn_pooler_queries", "attn_pooler_heads", "output_tokens", "act_kwargs", "norm_kwargs",
    "hf_tokenizer_name", "tokenizer_mode", "tokenizer_kwargs", "pad_id", "eos_id", "hf_model_pretrained",
    "hf_proj_type", "hf_pooler_type", "timm_model_pretrained", "timm_drop", "timm_drop_path", "timm_proj_bias",
    "hf_model_config", "text_mask", "block_type",
})  # fmt: skip
"""Fields that are read, that the tensors show, that count in training alone, or that others switch on."""
_VISION: Final = {"pool_type": "tok", "pos_embed_type": "learnable", "timm_pool": "avg", "timm_proj": "linear"}
_TEXT: Final = {"pool_type": "argmax", "proj_type": "linear"}
_OF_SIGLIP: Final = {"pool_type": "last", "no_causal_mask": True, "proj_bias": True}
_BLOCK: Final = {
    "self_attn.out_proj": "attn.out_proj", "layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}  # fmt: skip


def openclip_tower(config: Mapping[str, Any], shapes: Shapes, dtype: str) -> Form:
    """The pair of a folder of OpenCLIP. Raises InvalidCheckpoint for one that no class of transformers computes."""
    stated = TowerEntries(config, CONFIG)
    model, prepared = stated.object("model_cfg"), stated.object("preprocess_cfg")
    vision, text = model.object("vision_cfg"), model.object("text_cfg")
    if "multimodal_cfg" in model.stated:
        raise unlike("it has a decoder of texts too (multimodal_cfg)")
    if name := text.text("hf_model_name"):
        raise unlike(f"its tower of texts is {name[:80]} (text_cfg.hf_model_name)")
    built = vision.size("image_size", (224, 224))
    size = prepared.size("size", built)
    if size != built:
        raise unlike(
            f"its images are prepared as {size[0]} × {size[1]} pixels (preprocess_cfg), and its positions are for "
            f"{built[0]} (image_size of vision_cfg)"
        )
    make = _siglip if vision.text("timm_model_name") else _clip
    entries, parts = make(model, vision, text, shapes, size)
    cleaned = text.object("tokenizer_kwargs").text("clean")
    entries |= {"dtype": dtype, "transformers_weights": TENSORS}
    return tower_form("OpenCLIP", entries, parts, _images(prepared, size), shapes, cleans=cleaned == "canonicalize")


def _clip(
    model: TowerEntries, vision: TowerEntries, text: TowerEntries, shapes: Shapes, size: tuple[int, int]
) -> tuple[dict[str, Any], dict[str, Part]]:
    """CLIP. Source: Radford et al. 2021."""
    _check(vision, _VISION, {}, "vision_cfg")
    _check(text, _TEXT, {}, "text_cfg")
    before = "text." if "text.token_embedding.weight" in shapes else ""
    quick = model.flag("quick_gelu")
    width = need(shapes, "visual.conv1.weight")[0]
    patch, (rows, columns) = grid(shapes, "visual.conv1.weight", size)
    if need(shapes, "visual.positional_embedding")[0] != rows * columns + 1:
        raise InvalidCheckpoint.at(
            "checkpoint",
            f"it has no positions for {rows} × {columns} patches (image_size of vision_cfg) and a class token",
        )
    layers = "visual.transformer.resblocks."
    seen: dict[str, Any] = {
        **_sizes(shapes, layers), "image_size": size[0] if size[0] == size[1] else list(size), "patch_size": patch,
        "num_attention_heads": _heads(width, width // vision.count("head_width", 64)),
        **_functions(vision, quick=quick, eps=1e-5),
    }  # fmt: skip
    read = _text_config(text, shapes, before, quick=quick) | {"eos_token_id": 2}  # the largest id ends a text
    projection = need(shapes, "visual.proj")[1]
    parts = _blocks(shapes, layers, "vision_model.")
    parts |= _text_parts(shapes, before)
    names = {"vision_model.pre_layrnorm": "visual.ln_pre", "vision_model.post_layernorm": "visual.ln_post"}
    parts |= renamed(names, shapes)
    parts |= {
        "vision_model.embeddings.class_embedding": whole("visual.class_embedding"),
        "vision_model.embeddings.patch_embedding.weight": whole("visual.conv1.weight"),
        "vision_model.embeddings.position_embedding.weight": whole("visual.positional_embedding"),
        "visual_projection.weight": transposed("visual.proj"),
        "text_projection.weight": transposed(f"{before}text_projection"),
        "logit_scale": shaped("logit_scale"),
    }
    need(shapes, f"{before}text_projection")
    return {
        "model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": int(projection),
        "vision_config": seen | {"projection_dim": int(projection)},
        "text_config": read | {"projection_dim": int(projection)},
    }, parts  # fmt: skip


def _siglip(
    _: TowerEntries, vision: TowerEntries, text: TowerEntries, shapes: Shapes, size: tuple[int, int]
) -> tuple[dict[str, Any], dict[str, Part]]:
    """SigLIP, whose tower of images is one of timm's. Source: Zhai et al. 2023."""
    name = vision.text("timm_model_name")
    _check(vision, _VISION, {"timm_model_name": name, "timm_pool": "map", "timm_proj": "none"}, "vision_cfg")
    trunk = trunk_of(name, shapes, "visual.trunk.", size, {})
    if trunk.has("cls_token") or not trunk.has("attn_pool.latent"):
        raise unlike(f"its tower of images is {name} of timm, and only those of SigLIP stand in a pair of transformers")
    _check(text, _TEXT, _OF_SIGLIP, "text_cfg")
    parts = trunk.moved(siglip_parts(trunk, "vision_model."))
    parts |= _text_parts(shapes, "text.")
    parts |= renamed({"text_model.head": "text_projection"}, shapes, source="text.")
    parts |= {scalar: shaped(scalar, 1) for scalar in ("logit_scale", "logit_bias")}
    need(shapes, "logit_bias")
    read = _text_config(text, shapes, "text.", quick=False)
    read |= {"projection_size": int(need(shapes, "text.text_projection.weight")[0]),
             "bos_token_id": None, "eos_token_id": None, "pad_token_id": text.count("pad_id", 0, least=0)}  # fmt: skip
    return {
        "model_type": "siglip", "architectures": ["SiglipModel"], "text_config": read,
        "vision_config": trunk.sizes | {"vision_use_head": True},
    }, parts  # fmt: skip


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _blocks(shapes: Shapes, layers: str, target: str) -> dict[str, Part]:
    """The tensors of the layers of a tower."""
    parts: dict[str, Part] = {}
    for number in range(depth(shapes, layers)):
        old, new = f"{layers}{number}.", f"{target}encoder.layers.{number}."
        parts |= fused(f"{old}attn.in_proj", f"{new}self_attn.", shapes, dotted=False)
        parts |= renamed(_BLOCK, shapes, new, old)
    known = {name for part in parts.values() for name in part.names}
    if strange := sorted(name for name in shapes if name.startswith(layers) and name not in known):
        raise unlike(f"its layers have {strange[0]}")
    return parts


def _text_parts(shapes: Shapes, before: str) -> dict[str, Part]:
    """The tensors of a tower that reads texts."""
    for name in ("token_embedding.weight", "positional_embedding"):
        need(shapes, before + name)
    parts = _blocks(shapes, f"{before}transformer.resblocks.", "text_model.")
    parts |= renamed({"text_model.final_layer_norm": "ln_final"}, shapes, source=before)
    return parts | {
        "text_model.embeddings.token_embedding.weight": whole(f"{before}token_embedding.weight"),
        "text_model.embeddings.position_embedding.weight": whole(f"{before}positional_embedding"),
    }


# ── entries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check(entries: TowerEntries, defaults: Mapping[str, Any], own: Mapping[str, Any], name: str) -> None:
    """Raise InvalidCheckpoint for a field that is another than that of the class of transformers.

    ``defaults``: of OpenCLIP, where they are not empty; ``own``: those of the class that differ.
    """
    fields = entries.stated
    for field in sorted({*fields, *own} - _WITHOUT_EFFECT):
        value, expected = fields.get(field, defaults.get(field)), {**defaults, **own}.get(field)
        if value != expected and (value or expected):
            raise unlike(f"{name}.{field} is {str(value)[:60]!r}")


def _sizes(shapes: Shapes, layers: str) -> dict[str, Any]:
    inner, width = need(shapes, f"{layers}0.mlp.c_fc.weight")
    return {
        "hidden_size": int(width), "intermediate_size": int(inner), "num_hidden_layers": depth(shapes, layers),
    }  # fmt: skip


def _heads(width: int, heads: int) -> int:
    if heads < 1 or width % heads:
        raise InvalidCheckpoint.at("checkpoint", f"its width {width} is no multiple of {heads} heads")
    return heads


def _functions(fields: TowerEntries, *, quick: bool, eps: float) -> dict[str, Any]:
    """The activation and the epsilon of the norms of a tower."""
    norm, act = fields.object("norm_kwargs"), fields.object("act_kwargs")
    approximate = act.text("approximate", "none")
    if norm.stated.keys() - {"eps"} or act.stated.keys() - {"approximate"} or approximate not in {"none", "tanh"}:
        raise unlike(f"norm_kwargs are {str(norm.stated)[:80]} and act_kwargs {str(act.stated)[:80]}")
    if quick and act.stated:
        raise unlike("it has quick_gelu and act_kwargs")
    tanh = approximate == "tanh"
    name = "quick_gelu" if quick else "gelu_pytorch_tanh" if tanh else "gelu"
    return {"hidden_act": name, "layer_norm_eps": norm.number("eps", eps, 0.0, 1.0)}


def _text_config(text: TowerEntries, shapes: Shapes, before: str, *, quick: bool) -> dict[str, Any]:
    sizes = _sizes(shapes, f"{before}transformer.resblocks.")
    return {
        **sizes, "num_attention_heads": _heads(sizes["hidden_size"], text.count("heads", 8)),
        "vocab_size": int(need(shapes, f"{before}token_embedding.weight")[0]),
        "max_position_embeddings": int(need(shapes, f"{before}positional_embedding")[0]),
        **_functions(text, quick=quick, eps=1e-5),
    }  # fmt: skip


def _images(prepared: TowerEntries, size: tuple[int, int]) -> ImageSteps:
    """The steps of OpenCLIP's evaluation. Raises InvalidCheckpoint."""
    interpolation, resizing = prepared.text("interpolation", "bicubic"), prepared.text("resize_mode", "shortest")
    if interpolation not in INTERPOLATIONS or resizing not in _RESIZING:
        raise unlike(f"its images are prepared by {str(resizing)[:40]!r} with {str(interpolation)[:40]!r}")
    mean, std = (prepared.three(key, own) for key, own in zip(("mean", "std"), _OPENAI, strict=True))
    colour = tuple(map(int, prepared.three("fill_color", (0, 0, 0))))
    return ImageSteps(size, size, _RESIZING[resizing], interpolation, mean, std, colour)
