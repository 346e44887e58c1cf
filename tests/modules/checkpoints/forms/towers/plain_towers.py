"""Encoders of images and texts in the names of timm and OpenCLIP, and the same computed by plain PyTorch."""

import json
from math import sqrt

import torch
from safetensors.torch import save_file
from torch.nn import functional

WIDTH, INNER, DEPTH, HEADS, PATCH, SIZE, CLASSES, WORDS, LENGTH, SHARED = 64, 128, 2, 4, 8, 32, 5, 60, 12, 16
PATCHES = (SIZE // PATCH) ** 2
ACTIVATIONS = {
    "gelu": functional.gelu,
    "tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
}
TIMM = {
    "vit": ("vit_tiny_patch16_224", {"classes": True}),
    "vit-without-head": ("vit_tiny_patch16_224", {}),
    "deit-distilled": ("deit_tiny_distilled_patch16_224", {"taught": True, "classes": True}),
    "deit3": ("deit3_small_patch16_224", {"scaled": True, "apart": True, "classes": True}),
    "dinov2": ("vit_small_patch14_dinov2", {"scaled": True}),
    "dinov2-gated": ("vit_giant_patch14_dinov2", {"scaled": True, "gated": True}),
    "dinov2-registers": ("vit_small_patch14_reg4_dinov2", {"scaled": True, "apart": True, "registers": 3}),
    "dinov3": ("vit_small_patch16_dinov3_qkvb", {"rotated": True, "registers": 3, "eps": 1e-5}),
    "clip": ("vit_base_patch32_clip_224", {"normed": True, "classes": True, "eps": 1e-5}),
    "clip-quick": ("vit_base_patch32_clip_quickgelu_224", {"normed": True, "eps": 1e-5, "activation": "quick"}),
    "siglip": ("vit_base_patch16_siglip_224", {"token": False, "pools": True}),
    "siglip-2": ("vit_base_patch32_siglip_256", {"token": False, "pools": True, "activation": "tanh"}),
    "siglip-mean": ("vit_base_patch16_siglip_gap_224", {"token": False, "classes": True}),
}
"""The architecture in timm, and what is special about its layers, by a name."""
ARE = {
    "vit": "ViTForImageClassification",
    "vit-without-head": "ViTModel",
    "deit-distilled": "DeiTForImageClassificationWithTeacher",
    "deit3": "Dinov2ForImageClassification",
    "dinov2": "Dinov2Model",
    "dinov2-gated": "Dinov2Model",
    "dinov2-registers": "Dinov2WithRegistersModel",
    "dinov3": "DINOv3ViTModel",
    "clip": "CLIPVisionModel",
    "clip-quick": "CLIPVisionModel",
    "siglip": "SiglipVisionModel",
    "siglip-2": "SiglipVisionModel",
    "siglip-mean": "SiglipForImageClassification",
}
"""The class of transformers that each is."""


class Tensors(dict):
    """Random tensors that are made when their names are first used."""

    def __init__(self):
        super().__init__()
        self.random = torch.Generator().manual_seed(5)

    def add(self, name, *shape):
        spread = 0.4 if len(shape) < 2 else min(0.4, 1.5 / sqrt(shape[-1]))
        self[name] = torch.randn(*shape, generator=self.random) * spread
        if name.endswith((".weight",)) and len(shape) == 1:
            self[name] += 1

    def linear(self, name, outputs, inputs, *, bias=True):
        self.add(f"{name}.weight", outputs, inputs)
        if bias:
            self.add(f"{name}.bias", outputs)

    def norm(self, name):
        self.linear(name, WIDTH, 1)
        self[f"{name}.weight"] = self[f"{name}.weight"][:, 0] + 1


def timm_tensors(kind):
    """The tensors of a vision transformer of timm."""
    facts, x = TIMM[kind][1], Tensors()
    token, taught, registers = facts.get("token", True), facts.get("taught", False), facts.get("registers", 0)
    for name in ["cls_token"] * token + ["dist_token"] * taught:
        x.add(name, 1, 1, WIDTH)
    if registers:
        x.add("reg_token", 1, registers, WIDTH)
    if not facts.get("rotated"):
        x.add("pos_embed", 1, PATCHES + (0 if facts.get("apart") else token + taught), WIDTH)
    x.add("patch_embed.proj.weight", WIDTH, 3, PATCH, PATCH)
    if facts.get("normed"):
        x.norm("norm_pre")
    else:
        x.add("patch_embed.proj.bias", WIDTH)
    for number in range(DEPTH):
        at = f"blocks.{number}."
        for each in ("norm1", "norm2"):
            x.norm(at + each)
        x.linear(f"{at}attn.qkv", 3 * WIDTH, WIDTH, bias=not facts.get("rotated"))
        for name in ("attn.q_bias", "attn.v_bias", "gamma_1", "gamma_2") if facts.get("rotated") else ():
            x.add(at + name, WIDTH)
        x.linear(f"{at}attn.proj", WIDTH, WIDTH)
        x.linear(f"{at}mlp.fc1", (2 if facts.get("gated") else 1) * INNER, WIDTH)
        x.linear(f"{at}mlp.fc2", WIDTH, INNER)
        if facts.get("scaled"):
            x.add(f"{at}ls1.gamma", WIDTH)
            x.add(f"{at}ls2.gamma", WIDTH)
    x.norm("norm")
    if facts.get("pools"):
        x.add("attn_pool.latent", 1, 1, WIDTH)
        for name, outputs, inputs in (("q", WIDTH, WIDTH), ("kv", 2 * WIDTH, WIDTH), ("proj", WIDTH, WIDTH),
                                      ("mlp.fc1", INNER, WIDTH), ("mlp.fc2", WIDTH, INNER)):  # fmt: skip
            x.linear(f"attn_pool.{name}", outputs, inputs)
        x.norm("attn_pool.norm")
    for name in ["head"] * facts.get("classes", False) + ["head_dist"] * taught:
        x.linear(name, CLASSES, WIDTH)
    return x


def timm_config(kind, **more):
    """The config.json of a folder of timm."""
    args = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    prepared = {
        "input_size": [3, SIZE, SIZE], "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center",
        "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3],
    }  # fmt: skip
    return {"architecture": TIMM[kind][0], "model_args": args, "pretrained_cfg": prepared} | more


def write_timm(folder, kind, **more):
    """Write a folder of timm. Return its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = timm_tensors(kind)
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(timm_config(kind, **more)))
    return tensors


def attend(q, k, v, heads, mask=None):
    """Multi-head attention of ``[B, L, D]``: its output and its weights ``[B, H, L, L]``."""
    q, k, v = (x.view(*x.shape[:2], heads, -1).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-2, -1) / sqrt(q.shape[-1])
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2), weights


def linear(x, tensors, name):
    return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def norm(x, tensors, name, eps):
    return functional.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], eps)


def rotated(x, heads):
    """Queries or keys ``[B, L, D]`` whose last tokens, the patches, are rotated by their places from −1 to 1."""
    x, size = x.view(*x.shape[:2], heads, -1).clone(), x.shape[-1] // heads
    side = SIZE // PATCH
    places = (torch.arange(side) + 0.5) / side * 2 - 1
    periods = 100.0 ** (torch.arange(size // 4) / (size // 4))
    down, across = (places[:, None] * 2 * torch.pi / periods for _ in range(2))
    for row in range(side):
        for column in range(side):
            angle, at = torch.cat([down[row], across[column]]), x.shape[1] - PATCHES + row * side + column
            one, other = x[:, at].chunk(2, -1)
            x[:, at] = torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)
    return x.flatten(2)


def run_timm(kind, tensors, pixels, heads=HEADS):
    """Run a vision transformer of timm: the weights of each layer, the last states, and logits or a pooled vector."""
    facts, eps = TIMM[kind][1], TIMM[kind][1].get("eps", 1e-6)
    act, weights = ACTIVATIONS[facts.get("activation", "gelu")], []
    x = functional.conv2d(
        pixels, tensors["patch_embed.proj.weight"], tensors.get("patch_embed.proj.bias"), stride=PATCH
    )
    x = x.flatten(2).transpose(1, 2)
    names = [name for name in ("cls_token", "dist_token", "reg_token") if name in tensors]
    before = [tensors[name].expand(len(x), -1, -1) for name in names]
    if facts.get("rotated"):
        x = torch.cat([*before, x], 1)
    elif facts.get("apart"):
        x = torch.cat([*before, x + tensors["pos_embed"]], 1)
    else:
        x = torch.cat([*before, x], 1) + tensors["pos_embed"]
    if facts.get("normed"):
        x = norm(x, tensors, "norm_pre", eps)
    for number in range(DEPTH):
        at = f"blocks.{number}."
        q, k, v = linear(norm(x, tensors, f"{at}norm1", eps), tensors, f"{at}attn.qkv").chunk(3, -1)
        if facts.get("rotated"):
            q, k = rotated(q + tensors[f"{at}attn.q_bias"], heads), rotated(k, heads)
            v = v + tensors[f"{at}attn.v_bias"]
        y, seen = attend(q, k, v, heads)
        weights.append(seen)
        scales = [tensors.get(f"{at}ls{each}.gamma", tensors.get(f"{at}gamma_{each}", 1)) for each in (1, 2)]
        x = x + linear(y, tensors, f"{at}attn.proj") * scales[0]
        y = linear(norm(x, tensors, f"{at}norm2", eps), tensors, f"{at}mlp.fc1")
        if facts.get("gated"):
            gate, up = y.chunk(2, -1)
            y = functional.silu(gate) * up
        else:
            y = act(y)
        x = x + linear(y, tensors, f"{at}mlp.fc2") * scales[1]
    x = norm(x, tensors, "norm", eps)
    return weights, x, _end(facts, tensors, x, act, eps, heads)


def _end(facts, tensors, x, act, eps, heads):
    if facts.get("pools"):
        key, value = linear(x, tensors, "attn_pool.kv").chunk(2, -1)
        query = linear(tensors["attn_pool.latent"].expand(len(x), -1, -1), tensors, "attn_pool.q")
        y = linear(attend(query, key, value, heads)[0], tensors, "attn_pool.proj")
        inner = act(linear(norm(y, tensors, "attn_pool.norm", eps), tensors, "attn_pool.mlp.fc1"))
        return (y + linear(inner, tensors, "attn_pool.mlp.fc2"))[:, 0]
    pooled = x[:, 0] if facts.get("token", True) else x.mean(1)
    if not facts.get("classes"):
        return pooled
    logits = linear(pooled, tensors, "head")
    return (logits + linear(x[:, 1], tensors, "head_dist")) / 2 if facts.get("taught") else logits


# ── OpenCLIP ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def openclip_tensors(*, custom=False):
    """The tensors of a CLIP of OpenCLIP; ``custom``: those of its texts have names that begin with ``text.``."""
    x, before = Tensors(), "text." if custom else ""
    x.add("visual.class_embedding", WIDTH)
    x.add("visual.positional_embedding", PATCHES + 1, WIDTH)
    x.add("visual.proj", WIDTH, SHARED)
    x.add("visual.conv1.weight", WIDTH, 3, PATCH, PATCH)
    for name in ("visual.ln_pre", "visual.ln_post", f"{before}ln_final"):
        x.norm(name)
    _resblocks(x, "visual.transformer.resblocks.")
    _texts(x, before)
    x.add(f"{before}text_projection", WIDTH, SHARED)
    x["logit_scale"] = torch.tensor(2.0)
    return x


def siglip_tensors():
    """The tensors of a SigLIP of OpenCLIP."""
    x = Tensors()
    x.update({f"visual.trunk.{name}": each for name, each in timm_tensors("siglip").items()})
    x.norm("text.ln_final")
    _texts(x, "text.")
    x.linear("text.text_projection", WIDTH, WIDTH)
    x["logit_scale"], x["logit_bias"] = torch.tensor(2.0), torch.tensor(-3.0)
    return x


def _texts(x, before):
    x.add(f"{before}positional_embedding", LENGTH, WIDTH)
    x.add(f"{before}token_embedding.weight", WORDS, WIDTH)
    _resblocks(x, f"{before}transformer.resblocks.")


def _resblocks(x, layers):
    for number in range(DEPTH):
        at = f"{layers}{number}."
        for each in ("ln_1", "ln_2"):
            x.norm(at + each)
        x.linear(f"{at}attn.in_proj", 3 * WIDTH, WIDTH)
        for kind in ("weight", "bias"):
            x[f"{at}attn.in_proj_{kind}"] = x.pop(f"{at}attn.in_proj.{kind}")
        x.linear(f"{at}attn.out_proj", WIDTH, WIDTH)
        x.linear(f"{at}mlp.c_fc", INNER, WIDTH)
        x.linear(f"{at}mlp.c_proj", WIDTH, INNER)


CLIP = {
    "embed_dim": SHARED,
    "vision_cfg": {
        "image_size": SIZE,
        "layers": DEPTH,
        "width": WIDTH,
        "patch_size": PATCH,
        "head_width": WIDTH // HEADS,
    },
    "text_cfg": {"context_length": LENGTH, "vocab_size": WORDS, "width": WIDTH, "heads": HEADS, "layers": DEPTH},
}
SIGLIP = {
    "embed_dim": WIDTH, "init_logit_bias": -10, "custom_text": True,
    "vision_cfg": {"image_size": SIZE, "timm_model_name": "vit_base_patch16_siglip_224", "timm_pool": "map",
                   "timm_proj": "none"},
    "text_cfg": {"context_length": LENGTH, "vocab_size": WORDS, "hf_tokenizer_name": "timm/ViT-B-16-SigLIP",
                 "tokenizer_kwargs": {"clean": "canonicalize"}, "width": WIDTH, "heads": HEADS, "layers": DEPTH,
                 "no_causal_mask": True, "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6},
                 "act_kwargs": {"approximate": "tanh"}},
}  # fmt: skip
PREPARED = {"mean": [0.5, 0.4, 0.3], "std": [0.5, 0.6, 0.7], "interpolation": "bicubic", "resize_mode": "squash"}


def write_openclip(folder, config, tensors, tokenizer=None):
    """Write a folder of OpenCLIP; ``tokenizer``: one of transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": PREPARED}))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return tensors


def _blocks(x, tensors, layers, act, eps, mask):
    weights = []
    for number in range(DEPTH):
        at = f"{layers}{number}."
        y = norm(x, tensors, f"{at}ln_1", eps)
        fused = functional.linear(y, tensors[f"{at}attn.in_proj_weight"], tensors[f"{at}attn.in_proj_bias"])
        y, seen = attend(*fused.chunk(3, -1), HEADS, mask)
        weights.append(seen)
        x = x + linear(y, tensors, f"{at}attn.out_proj")
        inner = act(linear(norm(x, tensors, f"{at}ln_2", eps), tensors, f"{at}mlp.c_fc"))
        x = x + linear(inner, tensors, f"{at}mlp.c_proj")
    return x, weights


def run_clip_image(tensors, pixels, act="gelu"):
    """The tower of CLIP that reads images: the weights of each layer, and the vector."""
    x = functional.conv2d(pixels, tensors["visual.conv1.weight"], stride=PATCH).flatten(2).transpose(1, 2)
    x = torch.cat([tensors["visual.class_embedding"].expand(len(x), 1, -1), x], 1)
    x = norm(x + tensors["visual.positional_embedding"], tensors, "visual.ln_pre", 1e-5)
    x, weights = _blocks(x, tensors, "visual.transformer.resblocks.", ACTIVATIONS[act], 1e-5, None)
    return weights, norm(x[:, 0], tensors, "visual.ln_post", 1e-5) @ tensors["visual.proj"]


def run_clip_text(tensors, ids, act="gelu", before=""):
    """The tower of CLIP that reads texts ``[B, L]``: the weights of each layer, and the vector at the largest id."""
    mask = torch.full((ids.shape[1], ids.shape[1]), -torch.inf).triu(1)
    x = tensors[f"{before}token_embedding.weight"][ids] + tensors[f"{before}positional_embedding"][: ids.shape[1]]
    x, weights = _blocks(x, tensors, f"{before}transformer.resblocks.", ACTIVATIONS[act], 1e-5, mask)
    last = norm(x, tensors, f"{before}ln_final", 1e-5)[torch.arange(len(ids)), ids.argmax(-1)]
    return weights, last @ tensors[f"{before}text_projection"]


def run_siglip_text(tensors, ids):
    """The tower of SigLIP that reads texts of all its tokens: the weights of each layer, and the vector."""
    x = tensors["text.token_embedding.weight"][ids] + tensors["text.positional_embedding"]
    x, weights = _blocks(x, tensors, "text.transformer.resblocks.", ACTIVATIONS["tanh"], 1e-6, None)
    return weights, linear(norm(x, tensors, "text.ln_final", 1e-6)[:, -1], tensors, "text.text_projection")


def run_siglip_image(tensors, pixels):
    """The tower of SigLIP that reads images: the weights of each layer, and the vector."""
    own = {name.removeprefix("visual.trunk."): x for name, x in tensors.items()}
    weights, _, vector = run_timm("siglip", own, pixels, WIDTH // 64)
    return weights, vector
