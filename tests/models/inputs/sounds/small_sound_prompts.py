"""Small models that read text with sounds, with random parameters and processors, beside their eager selves."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
import transformers
from tests.models.inputs.images.small_encoders import sharp
from tests.models.inputs.sounds.small_sounds import SECONDS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast, WhisperFeatureExtractor

from attention_service.models.loaded.loaded_model import LoadedModel

MARK, BEGIN, END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
WORDS = (
    "[PAD]", "[UNK]", "[BOS]", "[EOS]", "what", "is", "heard", "?", "a", "bell", "user", "assistant", ":", MARK, BEGIN,
    END,
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : {% for part in message['content'] %}"
    "{{ '<|audio_bos|><|AUDIO|><|audio_eos|> ' if part['type'] == 'audio' else part['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
)
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = _SIZES | {
    "vocab_size": 64, "max_position_embeddings": 512, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 3,
}  # fmt: skip
_TOWER = {
    "num_mel_bins": 8, "d_model": 32, "hidden_size": 32, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_source_positions": 50 * SECONDS,
}  # fmt: skip
READS = {
    "qwen2_audio": ("qwen2_audio_encoder", "audio_token_index", {}),
    "audioflamingo3": ("audioflamingo3_encoder", "audio_token_id", {"audio_token": MARK, "max_audio_len": 4 * SECONDS}),
    "glmasr": ("glmasr_encoder", "audio_token_id", {"audio_token": MARK, "max_audio_len": 4 * SECONDS}),
}
"""The tower's type, the entry of the audio token, and settings of the processor, by model type."""
CLASSES = {
    "qwen2_audio": "Qwen2AudioForConditionalGeneration", "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
    "glmasr": "GlmAsrForConditionalGeneration",
}  # fmt: skip


def token(word):
    return WORDS.index(word)


def tokenizer():
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]",
        additional_special_tokens=[MARK, BEGIN, END], model_max_length=512,
    )  # fmt: skip


def processor(kind):
    make = getattr(transformers, CLASSES[kind].removesuffix("ForConditionalGeneration") + "Processor")
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=SECONDS)
    return make(extractor, tokenizer(), chat_template=TEMPLATE, **READS[kind][2])


@cache
def made(kind):
    """Return the eager self of a checkpoint, and its folder."""
    folder, (tower, entry, _) = Path(mkdtemp(prefix=f"{kind}-")), READS[kind]
    config = CONFIG_MAPPING[kind](
        audio_config={"model_type": tower} | _TOWER,
        text_config={"model_type": "llama" if kind == "glmasr" else "qwen2"} | _TEXT, **{entry: token(MARK)},
    )  # fmt: skip
    model = sharp(getattr(transformers, CLASSES[kind]), config)
    model.save_pretrained(folder)
    processor(kind).save_pretrained(folder)
    return model, folder


@cache
def loaded(kind):
    return LoadedModel.load(made(kind)[1], dtype=None, device=torch.device("cpu"), progress=lambda _: None)
