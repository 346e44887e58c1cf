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
from tests.client.tiny_models import tokenizer as words
from tests.models.inputs.images.small_encoders import sharp
from transformers import (
    CONFIG_MAPPING,
    ASTFeatureExtractor,
    GenerationConfig,
    LasrFeatureExtractor,
    ParakeetFeatureExtractor,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
)
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


_WAVES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "conv_dim": [16, 16, 16], "conv_kernel": [10, 8, 4], "conv_stride": [5, 8, 8], "vocab_size": 32,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 3,
}  # fmt: skip
_PLAIN = {"sampling_rate": RATE, "padding_value": 0.0}
_MASKED = _PLAIN | {"return_attention_mask": True, "do_normalize": True}
_UNMASKED = _PLAIN | {"return_attention_mask": False, "do_normalize": True}
_DEEP = _WAVES | {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
_SPECTROGRAM = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "patch_size": 8,
    "frequency_stride": 5, "time_stride": 6, "num_mel_bins": 24, "max_length": 200, "num_labels": 3,
}  # fmt: skip
_MOONSHINE = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
    "max_position_embeddings": 64, "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
_TOWER = {
    "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_source_positions": _FRAMES,
}  # fmt: skip
_CONFORMER = {
    "num_mel_bins": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "subsampling_conv_channels": 8,
}  # fmt: skip
HEARS = {
    "wav2vec2": ("Wav2Vec2ForCTC", "wav2vec2", _DEEP, Wav2Vec2FeatureExtractor, _MASKED),
    "wav2vec2-base": ("Wav2Vec2Model", "wav2vec2", _WAVES, Wav2Vec2FeatureExtractor, _UNMASKED),
    "wav2vec2-classes": (
        "Wav2Vec2ForSequenceClassification", "wav2vec2", _DEEP | {"num_labels": 3}, Wav2Vec2FeatureExtractor, _MASKED,
    ),
    "hubert": ("HubertForCTC", "hubert", _DEEP, Wav2Vec2FeatureExtractor, _MASKED),
    "hubert-classes": (
        "HubertForSequenceClassification", "hubert", _WAVES | {"num_labels": 3}, Wav2Vec2FeatureExtractor, _UNMASKED,
    ),
    "data2vec-audio": ("Data2VecAudioForCTC", "data2vec-audio", _DEEP, Wav2Vec2FeatureExtractor, _MASKED),
    "unispeech": ("UniSpeechForCTC", "unispeech", _DEEP, Wav2Vec2FeatureExtractor, _MASKED),
    "unispeech-sat": ("UniSpeechSatForCTC", "unispeech-sat", _DEEP, Wav2Vec2FeatureExtractor, _MASKED),
    "wavlm": ("WavLMForCTC", "wavlm", _DEEP, Wav2Vec2FeatureExtractor, _MASKED),
    "wav2vec2-conformer": (
        "Wav2Vec2ConformerForCTC", "wav2vec2-conformer", _DEEP | {"position_embeddings_type": "rotary"},
        Wav2Vec2FeatureExtractor, _MASKED,
    ),
    "audio-spectrogram-transformer": (
        "ASTForAudioClassification", "audio-spectrogram-transformer", _SPECTROGRAM, ASTFeatureExtractor,
        {"num_mel_bins": 24, "max_length": 200},
    ),
    "moonshine": (
        "MoonshineForConditionalGeneration", "moonshine", _MOONSHINE, Wav2Vec2FeatureExtractor,
        _PLAIN | {"return_attention_mask": True, "do_normalize": False},
    ),
    "voxtral_encoder": (
        "VoxtralEncoder", "voxtral_encoder", _TOWER, WhisperFeatureExtractor,
        {"feature_size": 8, "chunk_length": SECONDS},
    ),
    "parakeet": (
        "ParakeetForCTC", "parakeet_ctc", {"vocab_size": 32, "encoder_config": _CONFORMER, "pad_token_id": 0},
        ParakeetFeatureExtractor, {"feature_size": 16},
    ),
    "lasr_encoder": (
        "LasrEncoder", "lasr_encoder", _CONFORMER | {"conv_kernel_size": 9}, LasrFeatureExtractor, {"feature_size": 16},
    ),
}  # fmt: skip
"""Class, model type, config, feature extractor and its settings of checkpoints besides Whisper's."""


def extractor(kind):
    if kind == "whisper":
        return WhisperFeatureExtractor(feature_size=8, chunk_length=SECONDS)
    _, _, _, make, settings = HEARS[kind]
    return make(**settings)


def written(kind, folder):
    """Write a checkpoint, and return its eager self."""
    if kind == "whisper":
        return whisper(folder)
    name, family, options, _, _ = HEARS[kind]
    model = sharp(getattr(transformers, name), CONFIG_MAPPING[family](**options))
    model.save_pretrained(folder)
    extractor(kind).save_pretrained(folder)
    if kind == "moonshine":
        words().save_pretrained(folder)
    return model


@cache
def made(kind):
    """Return the eager self of a checkpoint, and its folder."""
    folder = Path(mkdtemp(prefix=f"{kind}-"))
    return written(kind, folder), folder


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
