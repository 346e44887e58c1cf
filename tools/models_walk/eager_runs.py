"""The input of a model that is compared, and the numbers and weights of its eager self over it."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final
from unittest.mock import patch

import torch
from tests.models.inputs.images.small_encoders import noise, sent
from tests.models.inputs.sounds import small_sounds as sounds
from transformers import PreTrainedModel

from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.inputs.images.encoder_inputs import EncoderInputs
from attention_service.models.inputs.images.pair_inputs import PairInputs
from attention_service.models.inputs.sounds.sound_inputs import SoundInputs
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.unrun_models import NOT_RUNNING
from attention_transformers.model_layers import attention_modules
from tools.models_walk.own_windows import dense

IDS: Final = [5, 3, 7, 8, 6, 4, 9, 10, 11]
SOUND_SECONDS = 1.95
"""Seconds of a sound whose frames are all real in Parakeet, where those of padding have weights that nobody reads."""


def input_of(loaded: LoadedModel) -> dict[str, Any]:
    """Return the text of ``IDS``, an image or a sound for a model that reads one, or a text and an image for a pair."""
    if isinstance(loaded.reader, PairInputs):
        return {"tokens": IDS, "images": [sent(noise(24, 16))]}
    if isinstance(loaded.reader, SoundInputs):
        return {"audio": [sounds.sent(sounds.speech(SOUND_SECONDS))]}
    if not isinstance(loaded.reader, EncoderInputs):
        return {"tokens": IDS}
    return {"images": [sent(noise(24, 16))]}


def arguments_of(loaded: LoadedModel) -> dict[str, Any]:
    """Return the arguments of an eager run over the text or the image."""
    cache = {"use_cache": False} if "use_cache" in loaded.reader.names else {}
    checked = check_request(loaded, ModelForwardRequest(**input_of(loaded)))
    return checked.inputs.arguments | cache | {"return_dict": True}


def result_of(output: Any) -> str:
    """Return the name of what a model computes of a whole text or image."""
    named = ("logits", "last_hidden_state", "pooler_output", "image_embeds")
    known = next((name for name in named if isinstance(getattr(output, name, None), torch.Tensor)), None)
    return known or next(name for name in output if tensors(output[name]))


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of nested tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for each in value for x in tensors(each)] if isinstance(value, tuple | list) else []


def returned_weights(model: PreTrainedModel, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Return the weights ``[H, Lq, Lk]``, or ``[B, H, Lq, Lk]`` of images, that a model returns itself."""
    try:
        with torch.no_grad():
            output = model(**arguments, output_attentions=True)
    except NOT_RUNNING:  # a fault of transformers, as of MaskFormer's Swin
        return []
    attentions = [x for name in output for x in tensors(output[name]) if "attentions" in name and bool((x >= 0).all())]
    attentions = [x.transpose(1, 2).flatten(0, 1) if x.ndim == 5 else x for x in attentions]  # of Hiera's windows
    windows = getattr(model.config, "attention_window", None)
    if windows is not None:  # of Longformer and LED's encoder, without global tokens
        width = windows[0] + 1
        attentions = [dense(x, width // 2) if x.shape[3] == width != x.shape[2] else x for x in attentions]
    return attentions if model.main_input_name == "pixel_values" else [x[0] for x in attentions]


def eager_weights(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    run: Callable[..., Any] | None = None,
    *,
    of_batches: bool = False,
) -> list[torch.Tensor]:
    """Return the weights ``[H, Lq, Lk]`` of each attention as it runs, by the eager function of the model's file.

    ``run`` runs a pair of encoders, the one of texts first.
    ``of_batches``: those of every window ``[W, H, T, T]``.
    """
    weights: list[torch.Tensor] = []
    modules: list[torch.nn.Module] = []

    def recording(eager: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(module: torch.nn.Module, *tensors: Any, **options: Any) -> Any:
            output, found = eager(module, *tensors, **options)
            own = found if of_batches else found[0]
            # A second call with the same weights is for other values.
            if not (modules and modules[-1] is module and torch.equal(weights[-1], own)):
                modules.append(module)
                weights.append(own)
            return output, found

        return recorded

    with ExitStack() as stack, torch.no_grad():
        for file in {type(one.module).__module__ for one in attention_modules(model)}:
            own = f"{file}.eager_attention_forward"
            stack.enter_context(patch(own, recording(sys.modules[file].eager_attention_forward)))
        (run or model)(**arguments)
    return weights
