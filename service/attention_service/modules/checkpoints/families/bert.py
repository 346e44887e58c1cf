"""Hugging Face BERT and its kin. Source: Devlin et al. 2018; names of ``transformers.BertModel``."""

from typing import Final

from attention_contract.spec import AttentionSpec, Causal
from attention_service.modules.checkpoints.family import AttentionDescription, BlockNames, Entries, Family, linear

_NAMES: Final = linear(q_proj="self.query", k_proj="self.key", v_proj="self.value", o_proj="output.dense")
_MODEL_TYPES: Final = frozenset({
    "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "layoutlm", "roberta",
    "roberta-prelayernorm", "splinter", "tapas", "xlm-roberta", "xlm-roberta-xl",
})  # fmt: skip
"""Many other types keep these tensor names and compute something else: rotary or relative positions, sparse blocks."""
_UNSUPPORTED: Final = {"self.query_global.weight": "global attention with projections of its own"}


def _describe(entries: Entries) -> AttentionDescription:
    entries.must_be("position_embedding_type", "absolute")
    causal = entries.part == "self" and entries.flag("is_decoder", default=False)
    return AttentionDescription(
        AttentionSpec(masks=[Causal()] if causal else []),
        heads=entries.known_count("num_attention_heads"),
        unknown=() if entries.config or entries.part == "cross" else ("masks",),
    )


FAMILIES: Final = (
    Family(
        name="bert",
        model_types=_MODEL_TYPES,
        blocks=(
            BlockNames("encoder.layer.{layer}.attention.", _NAMES, unsupported=_UNSUPPORTED),
            BlockNames("encoder.layer.{layer}.crossattention.", _NAMES, part="cross", unsupported=_UNSUPPORTED),
        ),
        describe=_describe,
        without_config=True,
    ),
)
