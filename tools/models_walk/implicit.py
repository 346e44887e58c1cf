"""The implicit weights of layers that mix tokens by a running state, beside the same layers in transformers."""

import copy
import inspect
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tests.client.tiny_models import tokenizer
from transformers import PreTrainedModel

from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.float64_runs import in_float64
from attention_service.runtime.device.torch_device import Device

RULES = (
    "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan", "mamba_selective_scan",
    "rwkv_linear_attention",
)  # fmt: skip
BY_CHANNEL = "mamba_selective_scan"
"""The rule whose output is ``[B, C, L]``; those of others are ``[B, L, H, V]``, or ``[B, L, C]``."""


def wide(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy in float64, whose decays were not rounded to float32 before."""
    found = copy.deepcopy(model).double().requires_grad_(False)
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for module in found.modules():
            if hasattr(module, "get_slope_rate"):
                module.slope_rate = module.get_slope_rate()
                module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)
    finally:
        torch.set_default_dtype(former)
    return found


def mixed_outputs(model: PreTrainedModel, arguments: dict[str, Any]) -> list[np.ndarray]:
    """Return the mixed output ``[B, L, H, V]`` of each such layer by the code of transformers, all in float64."""
    outputs: list[np.ndarray] = []

    def recording(rule: Any, name: str = "") -> Any:
        def recorded(*args: Any, **options: Any) -> Any:
            gate = options.pop("z", None)
            found = rule(*args, **options)
            first = found[0] if isinstance(found, tuple) else found
            by_token = first.transpose(1, 2) if name in {BY_CHANNEL, "mlstm"} else first
            outputs.append((by_token[..., None] if by_token.ndim == 3 else by_token).numpy().copy())
            if gate is not None:
                first = first * torch.nn.functional.silu(gate)
            return (first, *found[1:]) if isinstance(found, tuple) else first

        return recorded

    def lightning(module: Any) -> Any:
        heads = module.num_attention_heads
        return lambda _, args: outputs.append(args[0].view(*args[0].shape[:2], heads, -1).numpy().copy())

    with ExitStack() as stack, torch.no_grad():
        for file in {id(space): space for space in map(_space, model.modules())}.values():
            stack.enter_context(patch.dict(file, {name: recording(file[name], name) for name in RULES if name in file}))
        for module in model.modules():
            if hasattr(module, "get_slope_rate"):
                stack.callback(module.norm.register_forward_pre_hook(lightning(module)).remove)
            if hasattr(module, "_rnn_scan"):
                stack.enter_context(patch.object(module, "_rnn_scan", recording(module._rnn_scan)))
            if hasattr(module, "mlstm_backend"):
                backend = module.mlstm_backend
                stack.enter_context(patch.object(backend, "forward", recording(backend.forward, "mlstm")))
        stack.enter_context(in_float64(model))
        model(**arguments)
    return outputs


def _space(module: torch.nn.Module) -> dict[str, Any]:
    """The names of the file in which a module's forward stands."""
    space: dict[str, Any] = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
    return space


def implicit_error(kind: str, model: PreTrainedModel, tokens: list[int]) -> float | None:
    """Return the largest difference of M·V from a layer's own output, as a share; None without such layers."""
    own = wide(model)
    loaded = LoadedModel(kind, copy.deepcopy(own), tokenizer(), Device.open("cpu"))
    layers = [place.key for place in loaded.implicit.values()]
    if not layers:
        return None
    request = ModelForwardRequest(tokens=tokens, layers=layers, return_=["weights", "v"])
    arguments = check_request(loaded, request, lambda _: True).inputs.arguments | {"use_cache": False}
    expected = mixed_outputs(own, arguments)
    with in_float64(loaded.model):
        found = forward_reply(loaded, request).layers
    loaded.close()
    errors = []
    for layer, output in zip(found, expected, strict=True):
        context = (np.asarray(layer.weights) @ np.asarray(layer.v)).transpose(1, 0, 2)
        errors.append(float(abs(context - output[0]).max() / abs(output).max()))
        assert not np.triu(layer.weights, 1).any()
    return max(errors)
