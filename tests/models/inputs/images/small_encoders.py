"""Small encoders of images with random parameters, beside their eager selves, and images for them."""

import base64
import io
from functools import cache

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import CONFIG_MAPPING, BitImageProcessorPil, CLIPImageProcessorPil, ViTImageProcessorPil

from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_PICTURE = _SIZES | {"image_size": 32, "patch_size": 8}
_SQUARE = {"height": 32, "width": 32}
_CROPPED = {"size": {"shortest_edge": 40}, "crop_size": _SQUARE}
ENCODERS = {
    "vit": ("ViTForImageClassification", {"num_labels": 5}, ViTImageProcessorPil, {"size": _SQUARE}),
    "clip_vision_model": ("CLIPVisionModelWithProjection", {"projection_dim": 24}, CLIPImageProcessorPil, _CROPPED),
    "siglip_vision_model": ("SiglipVisionModel", {}, transformers.SiglipImageProcessorPil, {"size": _SQUARE}),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", {}, BitImageProcessorPil, _CROPPED),
    "dinov3_vit": ("DINOv3ViTModel", {"num_register_tokens": 3}, ViTImageProcessorPil, {"size": _SQUARE}),
    "siglip2_vision_model": (
        "Siglip2VisionModel", {"num_patches": 25}, transformers.Siglip2ImageProcessorPil,
        {"patch_size": 8, "max_num_patches": 30},
    ),
    "vit_mae": ("ViTMAEModel", {"mask_ratio": 0.7}, ViTImageProcessorPil, {"size": _SQUARE}),
    "yolos": (
        "YolosModel", {"image_size": [32, 32], "num_detection_tokens": 7}, ViTImageProcessorPil, {"size": _SQUARE},
    ),
}  # fmt: skip
"""Class, config, image processor and its settings by model type."""
HEADS = {"vit"}
MASKED = {"vit_mae"}
"""Those that see some of the patches alone."""


def eager(kind):
    """Return a model with the same sharp random parameters in every run."""
    name, options, _, _ = ENCODERS[kind]
    return sharp(getattr(transformers, name), CONFIG_MAPPING[kind](**_PICTURE | options))


def sharp(auto, config):
    torch.manual_seed(7)
    model = auto._from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(std=min(0.3, parameter.shape[-1] ** -0.5 * 1.7))
    return model


def processor(kind):
    _, _, make, settings = ENCODERS[kind]
    return make(**settings)


@cache
def loaded(kind):
    return LoadedModel(kind, eager(kind), None, Device.open("cpu"), processor(kind))


def noise(width=96, height=64):
    """Return an image ``[height, width, 3]``."""
    return np.random.default_rng(3).integers(0, 200, (height, width, 3)).astype(np.uint8)


def png(pixels, form="PNG", **options):
    file = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(file, form, **options)
    return file.getvalue()


def sent(pixels):
    """Return an image as a request has it."""
    content = pixels if isinstance(pixels, bytes) else png(pixels)
    return {"base64": base64.b64encode(content).decode()}


MARGIN = 0.35
"""The share of a patch at each edge whose pixels resizing may mix with others."""


def middle_of(rectangle):
    """Return whole pixels in the middle of a rectangle: left, top, right, bottom."""
    left, top, right, bottom = rectangle
    across, down = (right - left) * MARGIN, (bottom - top) * MARGIN
    return round(left + across), round(top + down), round(right - across), round(bottom - down)


def marked(pixels, rectangle):
    """Return the image with the middle of a rectangle changed."""
    left, top, right, bottom = middle_of(rectangle)
    changed = pixels.copy()
    changed[top:bottom, left:right] += 55
    return changed
