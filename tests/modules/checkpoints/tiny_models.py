"""Tiny randomly initialised models of every family, and the blocks of each that are imported and compared.

To add a family, add a ``Tiny`` to ``TINY``: a function that builds its model, and the modules of one attention block.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

TOKENS = 9
IDS = {"input_ids": (torch.arange(2 * TOKENS).reshape(2, TOKENS) * 5) % 23}
SIZES = {"vocab_size": 29, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager"}
LLAMA = SIZES | {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Tiny:
    """One attention block of a tiny model."""

    family: str
    build: Callable[[], nn.Module]
    q: str
    """The module whose input is the block's query."""
    o: str
    """The module whose output is the block's output."""
    weights: str
    """The module that returns the weights ``[B, H, Q, K]``, or none, and whose first argument is the block's query."""
    k: str | None = None
    """The module whose input is the block's keys, for cross-attention; of ``q`` itself, its second argument."""
    inputs: dict[str, Any] = field(default_factory=lambda: IDS)
    """Arguments of the model."""
    request: dict[str, Any] = field(default_factory=dict)
    """Fields of the import: layer, part, stack, spec, num_heads."""
    ask: dict[str, Any] = field(default_factory=dict)
    """Fields of the requests to the module."""
    decodes: bool = False
    label: str = ""
    dense: Callable[[tuple[Any, ...]], torch.Tensor] | None = None
    """The function from the results of ``weights`` to the weights; by default the last tensor with four dimensions."""

    @property
    def model_type(self) -> str | None:
        """The entry of its config.json; None for a model of torch."""
        return self.build.config_class.model_type if isinstance(self.build, ModelOfTransformers) else None


@dataclass(frozen=True)
class ModelOfTransformers:
    """Builds the model class ``{stem}Model`` of Transformers, or ``{stem}Encoder``, from ``{stem}Config``."""

    stem: str
    options: dict[str, Any]

    @property
    def config_class(self) -> Any:
        return getattr(transformers, f"{self.stem}Config")

    def __call__(self) -> nn.Module:
        for name in (f"{self.stem}Model", f"{self.stem}Encoder"):
            if hasattr(transformers, name):
                return getattr(transformers, name)(self.config_class(**self.options))
        raise AttributeError(f"transformers has no {self.stem}Model")


def model(name: str, **options: Any) -> ModelOfTransformers:
    """Build the model class ``{name}Model`` of Transformers, or the class so named."""
    return ModelOfTransformers(name.removesuffix("Model"), options)


def decoder(
    family: str, name: str, at: str = "layers.{}.self_attn", q: str = "q_proj", o: str = "o_proj", **options: Any
):
    """The two layers of a decoder."""
    label = options.pop("label", "")
    return [
        Tiny(
            family, model(name, **options), f"{at.format(layer)}.{q}", f"{at.format(layer)}.{o}", at.format(layer),
            request={"layer": layer}, decodes=True, label=f"{label}{layer}",
        )
        for layer in range(2)
    ]  # fmt: skip


BERT = SIZES | {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8,
    "max_position_embeddings": 16,
}  # fmt: skip
BERT_DECODER = model("Bert", **BERT, is_decoder=True, add_cross_attention=True, use_cache=False)
STATES = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))
GPT2 = SIZES | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "add_cross_attention": True}
T5 = SIZES | {
    "d_model": 32, "d_kv": 6, "d_ff": 8, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip


def _bert(at: str, **more: Any) -> Tiny:
    made = Tiny("bert", BERT_DECODER, f"{at}.self.query", f"{at}.output.dense", f"{at}.self",
                inputs=IDS | {"encoder_hidden_states": STATES})  # fmt: skip
    return replace(made, **more)


def _t5(family: str, name: str) -> list[Tiny]:
    made = []
    for stack, at, part in [
        ("encoder", "encoder.block.1.layer.0.SelfAttention", "self"),
        ("decoder", "decoder.block.1.layer.0.SelfAttention", "self"),
        ("decoder", "decoder.block.1.layer.1.EncDecAttention", "cross"),
    ]:
        made.append(
            Tiny(
                family, model(name, **T5), f"{at}.q", f"{at}.o", at, k=f"{at}.k" if part == "cross" else None,
                inputs=IDS | {"decoder_input_ids": IDS["input_ids"][:, 2:]},
                request={"layer": 1, "part": part, "stack": stack},
                decodes=(stack, part) == ("decoder", "self"), label=f"{stack}-{part}",
            )
        )  # fmt: skip
    return made


TINY = [
    Tiny(
        "bert", model("Bert", **BERT), "encoder.layer.1.attention.self.query", "encoder.layer.1.attention.output.dense",
        "encoder.layer.1.attention.self", request={"layer": 1}, label="encoder",
    ),
    _bert("encoder.layer.1.attention", request={"layer": 1}, decodes=True, label="decoder"),
    _bert(
        "encoder.layer.0.crossattention", k="encoder.layer.0.crossattention.self.key", request={"part": "cross"},
        label="cross",
    ),
    *decoder("gpt2", "GPT2", "h.{}.attn", "c_attn", "c_proj", **GPT2, scale_attn_by_inverse_layer_idx=True),
    Tiny(
        "gpt2", model("GPT2", **GPT2), "h.1.crossattention.q_attn", "h.1.crossattention.c_proj", "h.1.crossattention",
        k="h.1.crossattention.c_attn", inputs=IDS | {"encoder_hidden_states": STATES},
        request={"layer": 1, "part": "cross"}, label="cross",
    ),
    *decoder("llama", "Llama", **LLAMA),
    *decoder(
        "llama", "Llama", label="scaled", **LLAMA, head_dim=12, attention_bias=True,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    ),
    *_t5("t5", "T5"),
    *_t5("mt5", "MT5"),
    *_t5("umt5", "UMT5"),
]  # fmt: skip
"""Every block that is compared."""
