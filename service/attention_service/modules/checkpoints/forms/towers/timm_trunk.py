"""Vision transformers of timm, by the tensors of a file and the name of their architecture.

What timm's code knows and the file does not (heads, activation, epsilon, the kind of pooling) follows from the name, as
in timm 1.0. A slow test compares this with timm for all its architectures.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.checkpoints.forms.form import Part
from attention_service.modules.checkpoints.forms.towers.tower import Shapes, depth, grid, need, unlike
from attention_service.modules.checkpoints.forms.towers.tower_entries import TowerEntries

_KNOWN: Final = re.compile(
    r"vit_[a-z0-9]+_patch\d+(_plus)?(_36x1)?(_reg\d)?(_clip(_quickgelu)?|_siglip(_gap)?|_dinov2|_tipsv2|_gap|_map)?"
    r"(_\d+)?(_miil)?|deit3?_[a-z]+(_distilled)?_patch\d+_\d+|flexivit_[a-z]+|test_vit3?"
)
"""Architectures whose layers are those of timm's class ``VisionTransformer``."""
_ROTATED: Final = re.compile(r"vit_[a-z0-9]+(_plus)?_patch\d+_dinov3(_qkvb)?")
"""Architectures of DINOv3, whose layers are those of timm's class ``Eva``."""
_TANH: Final = re.compile(r"vit_(base_patch32|giantopt_patch16|so400m_patch16|large_patch16(?=.*_512))_siglip")
"""Architectures that approximate GELU by a hyperbolic tangent."""
_HEADS: Final = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
"""Heads by width, where it is not one for each 64 numbers."""
_OWN_HEADS: Final = {"giantopt": 16, "vit_base_patch16_gap_224": 16, "test_vit": 2, "test_vit3": 3, "7b": 32}
"""Heads by name, or by the size in it, where it is neither."""
_READ: Final = frozenset({
    "img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "mlp_ratio", "class_token",
    "reg_tokens", "init_values", "no_embed_class", "qkv_bias", "pre_norm", "fc_norm", "dynamic_img_size",
    "strict_img_size", "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate",
    "drop_path_rate", "weight_init",
})  # fmt: skip
"""Arguments of a model that its tensors show, or that change nothing outside of training."""
_SET: Final = frozenset({"num_heads", "global_pool"})
"""Arguments that are read."""
_BLOCK: Final = re.compile(r"blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|ls[12]|mlp\.fc[12])\.(weight|bias|gamma)")
_ROTATED_BLOCK: Final = re.compile(
    r"blocks\.\d+\.((norm[12]|attn\.(qkv|proj)|mlp\.(fc[12]|fc1_[gx]))\.(weight|bias)|gamma_[12]|attn\.[qv]_bias)"
)


@dataclass(frozen=True)
class Trunk:
    """A vision transformer of timm in a file."""

    shapes: Shapes
    """Its tensors, by their names in timm."""
    source: str
    """The beginning of their names in the file."""
    heads: int
    activation: str
    eps: float
    pool: str
    """``token``, ``avg`` or ``map``."""
    size: tuple[int, int]
    rotates: bool = False
    """True for DINOv3, which rotates queries and keys by the places of their patches."""

    def has(self, name: str) -> bool:
        """True if the file has a tensor of this name."""
        return name in self.shapes

    @property
    def width(self) -> int:
        """D."""
        return int(need(self.shapes, "patch_embed.proj.weight")[0])

    @property
    def inner(self) -> int:
        """The width between the two matrices of a layer."""
        return int(need(self.shapes, "blocks.0.mlp.fc2.weight")[1])

    @property
    def sizes(self) -> dict[str, Any]:
        """The entries of a config that all classes have."""
        patch, _ = grid(self.shapes, "patch_embed.proj.weight", self.size)
        height, width = self.size
        return {
            "hidden_size": self.width, "intermediate_size": self.inner,
            "num_hidden_layers": depth(self.shapes, "blocks."), "num_attention_heads": self.heads,
            "image_size": height if height == width else [height, width], "patch_size": patch,
            "hidden_act": self.activation, "layer_norm_eps": self.eps,
        }  # fmt: skip

    @property
    def head(self) -> int:
        """The number of classes; 0 without a head."""
        return int(self.shapes["head.weight"][0]) if self.has("head.weight") else 0

    def moved(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """The same parts, made of tensors by their names in the file."""
        source = self.source
        return {name: part._replace(names=tuple(source + name for name in part.names)) for name, part in parts.items()}


def trunk_of(architecture: str, shapes: Shapes, source: str, size: tuple[int, int], config: Mapping[str, Any]) -> Trunk:
    """A vision transformer by its tensors and by the name of its architecture. Raises InvalidCheckpoint.

    ``source``: the beginning of its tensors' names. ``config``: may state arguments of its own.
    """
    rotates = _ROTATED.fullmatch(architecture) is not None
    if not rotates and _KNOWN.fullmatch(architecture) is None:
        raise unlike(
            f"the server does not know the architecture {architecture[:80]!r} of timm; it knows the plain vision "
            "transformers (vit_, deit_, deit3_, flexivit_) with their CLIP, SigLIP, DINOv2 and DINOv3 variants"
        )
    entries = TowerEntries(config, "config.json")
    arguments = entries.object("model_args")
    if strange := sorted(arguments.stated.keys() - _READ - _SET):
        raise unlike(f"its model_args set {', '.join(map(str, strange[:4]))}, which the server does not read")
    own = {name.removeprefix(source): shape for name, shape in shapes.items() if name.startswith(source)}
    known = _ROTATED_BLOCK if rotates else _BLOCK
    blocks = [name for name in own if name.startswith("blocks.") and known.fullmatch(name) is None]
    if blocks:
        raise unlike(f"its layers have {sorted(blocks)[0]}")
    width = need(own, "patch_embed.proj.weight")[0]
    size_named = next((part for part in architecture.split("_") if part in _OWN_HEADS), architecture)
    usual = width // 64 if rotates else _HEADS.get(width, width // 64)
    heads = arguments.count("num_heads", _OWN_HEADS.get(size_named) or usual)
    if heads < 1 or width % heads:
        raise InvalidCheckpoint.at("checkpoint", f"its width {width} is no multiple of {heads} heads")
    clip = "_clip" in architecture
    activation = "quick_gelu" if "quickgelu" in architecture else "gelu"
    if "blocks.0.mlp.fc1_g.weight" in own:
        activation = "silu"
    pools = "map" if own.keys() & {"attn_pool.latent"} else "token" if "cls_token" in own else "avg"
    return Trunk(
        own, source, heads, "gelu_pytorch_tanh" if _TANH.match(architecture) else activation,
        1e-5 if clip or rotates else 1e-6, entries.text("global_pool") or arguments.text("global_pool", pools),
        size, rotates,
    )  # fmt: skip
