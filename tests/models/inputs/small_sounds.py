"""Small models that hear with random parameters, as checkpoints beside their eager selves, and sounds for them."""

import base64
import io
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import soundfile
import torch
import transformers
from tests.models.inputs.small_encoders import sharp
from transformers import CONFIG_MAPPING, GenerationConfig, WhisperFeatureExtractor
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.whisper.tokenization_whisper import WhisperTokenizer

from attention_service.models.loaded.loaded_model import LoadedModel

RATE = 16_000
SPECIALS = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, BEFORE, _, NO_TIMES = range(256, 265)
SECONDS = 6
"""Seconds that the small Whisper hears."""
_FRAMES = 50 * SECONDS
_WHISPER = {
    "vocab_size": NO_TIMES + 1 + 50 * SECONDS + 1, "num_mel_bins": 8, "d_model": 16, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_source_positions": _FRAMES, "max_target_positions": 64, "pad_token_id": END,
    "bos_token_id": END, "eos_token_id": END, "decoder_start_token_id": START, "median_filter_width": 3,
}  # fmt: skip
_GENERATION = {
    "decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "bos_token_id": END, "max_length": 64,
    "is_multilingual": True, "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE}, "no_timestamps_token_id": NO_TIMES,
    "prev_sot_token_id": BEFORE, "begin_suppress_tokens": [220, END],
    "suppress_tokens": [3, 5, START, BEFORE, *range(NO_TIMES, NO_TIMES + 50 * SECONDS + 2)],
    "alignment_heads": [[0, 1], [1, 0], [1, 3]], "max_initial_timestamp_index": 50,
}  # fmt: skip


def tokenizer():
    """Return a tokenizer of Whisper whose tokens are single bytes."""
    letters = {letter: number for number, letter in enumerate(bytes_to_unicode().values())}
    made = WhisperTokenizer(vocab=letters, merges=[])
    made.add_special_tokens({"additional_special_tokens": list(SPECIALS[1:])})
    made.set_prefix_tokens()
    return made


def whisper(folder, **generation):
    """Write a checkpoint of a small Whisper, and return its eager self."""
    model = sharp(transformers.WhisperForConditionalGeneration, CONFIG_MAPPING["whisper"](**_WHISPER))
    model.generation_config = GenerationConfig(**_GENERATION | generation)
    model.save_pretrained(folder)
    extractor("whisper").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


def extractor(kind):
    return WhisperFeatureExtractor(feature_size=8, chunk_length=SECONDS)


WRITTEN = {"whisper": whisper}
"""Writes a checkpoint of each model type."""


@cache
def made(kind):
    """Return the eager self of a checkpoint, and its folder."""
    folder = Path(mkdtemp(prefix=f"{kind}-"))
    return WRITTEN[kind](folder), folder


@cache
def loaded(kind):
    _, folder = made(kind)
    return LoadedModel.load(folder, dtype=None, device=torch.device("cpu"), progress=lambda _: None)


def speech(seconds=5.0, rate=RATE, seed=0):
    """Return a sound ``[samples]`` in which every half second has a tone of its own."""
    time, rng = np.arange(round(seconds * rate)) / rate, np.random.default_rng(seed)
    pitch = rng.uniform(100, 3000, 2 + int(2 * seconds))[(2 * time).astype(int)]
    return (0.3 * np.sin(2 * np.pi * pitch * time) + 0.01 * rng.standard_normal(len(time))).astype(np.float32)


def file_of(samples, rate=RATE, form="WAV", subtype="FLOAT"):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


def sent(samples, *args, **options):
    """Return a sound as a request has it."""
    content = samples if isinstance(samples, bytes) else file_of(samples, *args, **options)
    return {"base64": base64.b64encode(content).decode()}
