"""Small adapters of many kinds, written by peft with random numbers, and the models that peft makes of them."""

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from tests.client.transformers.families import tiny
from transformers import PreTrainedModel

LLAMA = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", LLAMA),
    "rslora": ("llama", LLAMA | {"use_rslora": True}),
    "patterns": (
        "llama",
        LLAMA | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\.self_attn\.v_proj": 3}},
    ),
    "dora": ("llama", LLAMA | {"use_dora": True}),
    "biases": ("gpt2", {"target_modules": ["c_attn"], "bias": "all"}),
    "lora-bias": ("llama", LLAMA | {"lora_bias": True}),
    "head": ("llama", LLAMA | {"modules_to_save": ["lm_head"]}),
    "norms": ("llama", LLAMA | {"modules_to_save": ["norm", "embed_tokens"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "dora-embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "scaled-embedding": ("gemma2", {"target_modules": ["embed_tokens", "o_proj"]}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "dora-conv1d": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "encoder": ("bert", {"target_modules": ["query", "value"]}),
    "pair": ("t5", {"target_modules": ["q", "v", "wo"]}),
}
"""The family of the base, and the entries of ``LoraConfig``."""


def write_adapter(
    base: PreTrainedModel, folder: Path, seed: int = 0, base_name: str = "base", **entries: Any
) -> peft.PeftModel:
    """Save an adapter of a base with random numbers. Returns peft's model, which leaves the base as it is."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6} | entries)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied embeddings, and of biases that change the base
        model = peft.get_peft_model(copy.deepcopy(base), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) * (0.3 if "magnitude" in name or "norm" in name else 0.1))
    for each in model.peft_config.values():
        each.base_model_name_or_path = base_name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, save_embedding_layers="auto" if "embed_tokens" in str(entries) else False)
    return model.eval()


def base_of(kind: str) -> PreTrainedModel:
    """The base of a kind, the same for each."""
    return tiny(KINDS[kind][0]).eval()
