"""Small models of texts that predict classes, with random parameters, and a tokenizer of one text and of two."""

from functools import cache

import torch
import transformers
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import DECODERS, ENCODERS, PAIRS
from tokenizers.processors import TemplateProcessing
from transformers import CONFIG_MAPPING

from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device

TOKENS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NAMES = {0: "bad", 1: "so so", 2: "good"}
PREFIXES = {"bart": "Bart", "bert": "Bert", "distilbert": "DistilBert", "gpt2": "GPT2", "llama": "Llama",
            "modernbert": "ModernBert", "roberta": "Roberta", "t5": "T5"}  # fmt: skip


def words():
    """Return the tokenizer of tests, which puts token 1 before a text and token 2 behind each of two.

    Token 12 is its mask.
    """
    found = tokenizer()
    found.add_special_tokens({"mask_token": "[MASK]"})
    found.backend_tokenizer.post_processor = TemplateProcessing(
        single="[UNK] $A [BOS]", pair="[UNK] $A [BOS] $B:1 [BOS]:1", special_tokens=[("[UNK]", 1), ("[BOS]", 2)]
    )
    found.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    found.init_kwargs["model_input_names"] = found.model_input_names  # which is saved
    return found


def sharp(family, head, **options):
    """Return the same model in every run: ``sharp("bert", "ForTokenClassification")``."""
    own = DECODERS.get(family) or ENCODERS.get(family) or PAIRS[family]
    options = TOKENS | {"id2label": NAMES, "label2id": {name: each for each, name in NAMES.items()}} | own | options
    config = CONFIG_MAPPING[family](**options)
    torch.manual_seed(7)
    model = getattr(transformers, f"{PREFIXES[family]}{head}")._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    return model.eval().requires_grad_(False)


@cache
def eager(family, head, options=()):
    return sharp(family, head, **dict(options))


@cache
def loaded(family, head, options=()):
    """Return the same as this server holds it. ``options``: entries of its config, as pairs."""
    return LoadedModel(family, sharp(family, head, **dict(options)), words(), Device.open("cpu"))
