"""Small detectors with a convolutional backbone and random parameters, beside their eager selves."""

import copy
from functools import cache

import torch
import transformers
from tests.models.inputs.images.small_encoders import sharp
from transformers import CONFIG_MAPPING, DetrImageProcessorPil

from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device

QUERIES = 5
SIZES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": QUERIES, "num_labels": 3,
}  # fmt: skip
RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
    "out_features": ["stage2"],
}  # fmt: skip
"""A backbone whose stride is 8 pixels."""
LEVELS = RESNET | {
    "model_type": "rt_detr_resnet", "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
"""One with feature maps of three strides, the last of 32 pixels."""
OF_LEVELS = {
    "backbone_config": LEVELS, "encoder_in_channels": [8, 16, 16], "encoder_hidden_dim": 32,
    "decoder_in_channels": [32, 32, 32], "num_denoising": 0, "encoder_layers": 1,
}  # fmt: skip
DETECTORS = {
    "detr": ("Detr", {}),
    "conditional_detr": ("ConditionalDetr", {}),
    "table-transformer": ("TableTransformer", {}),
    "dab-detr": ("DabDetr", {"hidden_size": 32}),
    "rt_detr": ("RTDetr", OF_LEVELS),
}
"""The beginning of the class name, and entries of the config, by model type."""
CROSSES = [kind for kind in DETECTORS if kind != "rt_detr"]
"""Those whose decoder attends to every place."""


def config(kind):
    own = SIZES | {"backbone_config": RESNET} | DETECTORS[kind][1]
    return CONFIG_MAPPING[kind](**copy.deepcopy(own))


@cache
def eager(kind):
    model = sharp(getattr(transformers, f"{DETECTORS[kind][0]}ForObjectDetection"), config(kind))
    for parameter in model.parameters():
        if parameter.ndim == 4:  # kernels, whose sums would grow from layer to layer
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        elif parameter.ndim == 2:
            parameter.mul_(0.7)
    return model


@cache
def processor():
    return DetrImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 128})


@cache
def loaded(kind):
    return LoadedModel(kind, copy.deepcopy(eager(kind)), None, Device.open("cpu"), processor())


def reference(kind, images, **options):
    """The run of transformers itself."""
    with torch.no_grad():
        made = processor()(images=images, return_tensors="pt")
        return eager(kind)(**made, output_attentions=True, output_hidden_states=True, **options)
