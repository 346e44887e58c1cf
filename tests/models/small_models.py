"""Small models of many types with random parameters, as the worker holds them, beside their eager selves."""

from functools import cache

import numpy as np
from numpy.typing import ArrayLike
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from transformers import PreTrainedModel

from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device

DECODERS = ("gpt2", "llama", "qwen3", "gemma2", "gpt_oss", "mistral", "deepseek_v3", "lfm2")
ENCODERS = ("bert", "distilbert", "modernbert", "albert")
PAIRS = ("t5", "bart")
FAMILIES = (*DECODERS, *ENCODERS, *PAIRS)
IDS = [5, 3, 7, 8, 6, 4, 9, 10, 11]
"""Token ids of words of the tokenizer."""


@cache
def device() -> Device:
    return Device.open("cpu")


@cache
def eager(family: str) -> PreTrainedModel:
    return tiny(family)


@cache
def loaded(family: str) -> LoadedModel:
    return LoadedModel(family, tiny(family).requires_grad_(False), tokenizer(), device())


def near(found: ArrayLike, expected: ArrayLike, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=tolerance)
