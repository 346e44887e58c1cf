"""Tiny models of transformers with random parameters, and a tokenizer of words, made here and offline."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BartConfig,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    T5Config,
)
from transformers.models.auto import AutoModel

WORDS = ("[PAD]", "[UNK]", "[BOS]", "the", "cat", "sat", "on", "mat", "dog", "die", "Katze", "saß")
_SIZES = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
CONFIGS = {
    "bert": lambda: BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
        max_position_embeddings=32, **_SIZES,
    ),
    "gpt2": lambda: GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=32, **_SIZES),
    "llama": lambda: LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
        max_position_embeddings=32, **_SIZES,
    ),
    "t5": lambda: T5Config(
        d_model=16, d_kv=4, num_layers=2, num_decoder_layers=3, num_heads=4, d_ff=24, decoder_start_token_id=0,
        **_SIZES,
    ),
    "bart": lambda: BartConfig(
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, decoder_start_token_id=2, **_SIZES,
    ),
}  # fmt: skip
"""The config of each family, small enough to run in milliseconds."""


def model(family, **changed):
    """Return a model with random parameters, the same in every run."""
    config = CONFIGS[family]()
    config.initializer_range = config.init_std = 0.5  # sharp weights
    for name, value in changed.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return AutoModel.from_config(config).eval()


def tokenizer():
    """Return a tokenizer that splits a text at spaces."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", bos_token="[BOS]", model_max_length=32
    )
