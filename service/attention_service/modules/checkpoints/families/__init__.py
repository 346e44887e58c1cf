"""Every family of checkpoints; a file holds a lineage, whose families share their tensor names.

It imports ``family.py``, ``cuts.py`` and ``rope_entries.py`` beside it. Read ``llama.py`` first.
"""

from typing import Final

from attention_service.modules.checkpoints.families import (
    bert,
    deepseek,
    eleuther,
    encoders,
    fused_decoders,
    gemma,
    gpt2,
    llama,
    t5,
    torch_layers,
)
from attention_service.modules.checkpoints.family import Family

FAMILIES: Final[dict[str, Family]] = {
    family.name: family
    for lineage in (bert, deepseek, eleuther, encoders, fused_decoders, gemma, gpt2, llama, t5, torch_layers)
    for family in lineage.FAMILIES
}
"""The families by name."""
_INDEXED: Final = (
    "axk2", "deepseek_v32", "dots3_note_text", "glm5_next_text", "glm_moe_dsa", "hy_v4", "mistral_large4_text",
)  # fmt: skip
INEXACT: Final = {
    "deberta": "DeBERTa adds products of contents and relative positions to its scores",
    "deberta-v2": "DeBERTa adds products of contents and relative positions to its scores",
    "xlnet": "XLNet adds products of contents and relative positions to its scores",
    **dict.fromkeys(_INDEXED, "DeepSeek's sparse attention sees the tokens that an indexer chooses"),
    "bailing_hybrid": "Ling multiplies the context of each head by a gate",
    "longcat_flash": "LongCat has two attentions in a layer, whose latents are scaled",
    "mistral4": "Mistral 4 scales its queries by their positions",
    "wavlm": "WavLM gates the bias of its positions by the query",
    **dict.fromkeys(("swin", "swinv2"), "Swin attends in windows of pixels that shift"),
    **dict.fromkeys(("mamba", "mamba2"), "Mamba keeps a state instead of attention"),
}
"""The reason why a model_type cannot be imported exactly."""
