"""The families of checkpoints that can be imported, one row each.

A row says how to find the attention blocks of a family among the tensor names, which tensor holds which parameter, and
how to read the checkpoint's config.json. A new family is one more row.
"""

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from attention_contract.spec import AttentionSpec, Causal

Part = Literal["self", "cross"]


@dataclass(frozen=True)
class Piece:
    """The location of a parameter: a tensor of the block, or the ``part``-th of ``of`` equal parts of its rows."""

    tensor: str
    part: int = 0
    of: int = 1
    flat: bool = False
    """True if the tensor has leading dimensions of 1 that the parameter lacks."""


@dataclass(frozen=True)
class Layout:
    """The tensor names and config entries with which one family stores its attention layers."""

    name: str
    block: re.Pattern[str]
    """Matches the text before a block's own tensor names. Groups: ``path``, ``layer`` (0 where absent), ``part``."""
    parts: Mapping[str, Part]
    """The meaning of the text in the group ``part``."""
    pieces: Mapping[str, tuple[Piece, ...]]
    """The possible locations of each parameter; the first that exists is taken. Biases may be absent."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Tensors that belong to a computation that modules do not support, and its name in messages."""
    model_types: frozenset[str] | None = None
    """The ``model_type`` values of config.json that are known to compute plain attention; None does not ask."""
    required_config: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Entries of config.json that, where they are present, must have one of these values."""
    head_counts: tuple[str, ...] = ("num_attention_heads", "num_heads", "nhead")
    """Entries of config.json that may tell the number of heads."""
    causal_if: str | None = None
    """The entry of config.json that makes self-attention causal."""

    @property
    def tensors(self) -> frozenset[str]:
        """The names, inside a block, of every tensor that matters."""
        return frozenset(piece.tensor for places in self.pieces.values() for piece in places) | set(self.unsupported)

    def spec(self, config: Mapping[str, Any], part: Part, parameters: Container[str]) -> AttentionSpec:
        """Return the spec of a layer, from its config.json and the parameters that it has."""
        causal = part == "self" and self.causal_if is not None and bool(config.get(self.causal_if))
        return AttentionSpec(masks=[Causal()] if causal else [], add_bias_kv="bias_k" in parameters)


def _linear(**modules: str) -> dict[str, tuple[Piece, ...]]:
    return {
        f"{projection}.{kind}": (Piece(f"{module}.{kind}"),)
        for projection, module in modules.items()
        for kind in ("weight", "bias")
    }


BERT: Final = Layout(
    name="bert",
    block=re.compile(r"(?P<path>(?:.*\.)?)encoder\.layer\.(?P<layer>\d{1,9})\.(?P<part>attention|crossattention)\."),
    parts={"attention": "self", "crossattention": "cross"},
    pieces=_linear(q_proj="self.query", k_proj="self.key", v_proj="self.value", o_proj="output.dense"),
    unsupported={"self.query_global.weight": "global attention with projections of its own"},
    # Many families keep these tensor names and compute something else (rotary or relative positions, sparse blocks).
    model_types=frozenset(
        {
            "bert",
            "bert-generation",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "layoutlm",
            "roberta",
            "roberta-prelayernorm",
            "splinter",
            "tapas",
            "xlm-roberta",
            "xlm-roberta-xl",
        }
    ),
    required_config={"position_embedding_type": ("absolute",)},
    causal_if="is_decoder",
)
"""Hugging Face BERT and its kin. Source: Devlin et al. 2018; names of ``transformers.BertModel``."""

TORCH: Final = Layout(
    name="torch",
    block=re.compile(r"(?:(?P<path>(?:.*\.)?)layers\.(?P<layer>\d{1,9})\.)?(?:(?P<part>self_attn|multihead_attn)\.)?"),
    parts={"self_attn": "self", "multihead_attn": "cross"},
    pieces={
        "q_proj.weight": (Piece("in_proj_weight", 0, 3), Piece("q_proj_weight")),
        "q_proj.bias": (Piece("in_proj_bias", 0, 3),),
        "k_proj.weight": (Piece("in_proj_weight", 1, 3), Piece("k_proj_weight")),
        "k_proj.bias": (Piece("in_proj_bias", 1, 3),),
        "v_proj.weight": (Piece("in_proj_weight", 2, 3), Piece("v_proj_weight")),
        "v_proj.bias": (Piece("in_proj_bias", 2, 3),),
        "o_proj.weight": (Piece("out_proj.weight"),),
        "o_proj.bias": (Piece("out_proj.bias"),),
        "bias_k": (Piece("bias_k", flat=True),),
        "bias_v": (Piece("bias_v", flat=True),),
    },
)
"""A state dict of ``torch.nn.MultiheadAttention``, or of the encoders and decoders of torch that are made of it.

Whether self-attention is causal is an argument of their forward pass, so the spec has no mask. ``add_zero_attn`` leaves
no trace in a state dict and cannot be noticed."""

LAYOUTS: Final = (BERT, TORCH)
