"""A small Voxtral with random parameters, beside its eager self, with a tokenizer of single bytes in a tekken.json."""

import base64
import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
import transformers
from tests.models.inputs.images.small_encoders import sharp
from tests.models.inputs.sounds.small_sounds import SECONDS
from transformers import CONFIG_MAPPING, GenerationConfig, WhisperFeatureExtractor

from attention_service.models.loaded.loaded_model import LoadedModel

START, END, PAD, AUDIO, BEGIN, TRANSCRIBE = 1, 2, 11, 24, 25, 34
TOKENS = 75
"""Tokens of a window of 6 s."""
_NAMED = {
    0: "<unk>", START: "<s>", END: "</s>", 3: "[INST]", 4: "[/INST]", 5: "[AVAILABLE_TOOLS]", 6: "[/AVAILABLE_TOOLS]",
    7: "[TOOL_RESULTS]", 8: "[/TOOL_RESULTS]", 9: "[TOOL_CALLS]", 10: "[IMG]", PAD: "<pad>", 12: "[IMG_BREAK]",
    13: "[IMG_END]", 14: "[PREFIX]", 15: "[MIDDLE]", 16: "[SUFFIX]", 17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]",
    19: "[TOOL_CONTENT]", AUDIO: "[AUDIO]", BEGIN: "[BEGIN_AUDIO]", 32: "[ARGS]", 33: "[CALL_ID]",
    TRANSCRIBE: "[TRANSCRIBE]",
}  # fmt: skip
SPECIALS = [_NAMED.get(number, f"<SPECIAL_{number}>") for number in range(40)]
_PIECES = [bytes([each]) for each in range(256)] + [b"an", b"ang", b"en", b"he", b" t", b" the", b"la"]
_LETTERS = r"\p{Lm}\p{Lo}\p{M}"
_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}]*[\p{{Ll}}{_LETTERS}]+"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = _SIZES | {
    "model_type": "llama", "intermediate_size": 48, "vocab_size": len(SPECIALS) + len(_PIECES),
    "max_position_embeddings": 512, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": START,
    "eos_token_id": END, "pad_token_id": PAD,
}  # fmt: skip
_TOWER = _SIZES | {
    "model_type": "voxtral_encoder", "intermediate_size": 128, "num_mel_bins": 8, "max_source_positions": 50 * SECONDS,
}  # fmt: skip


def tekken(version="v7"):
    """Return the entries of a tokenizer's file."""
    spectrogram = {"num_mel_bins": 8, "hop_length": 160, "window_size": 400}
    return {
        "config": {
            "pattern": _PATTERN, "num_vocab_tokens": len(_PIECES), "default_vocab_size": len(_PIECES) + len(SPECIALS),
            "default_num_special_tokens": len(SPECIALS), "version": version,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for rank, piece in enumerate(_PIECES)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(SPECIALS)
        ],
        "audio": {
            "sampling_rate": 16000, "frame_rate": 12.5, "audio_encoding_config": spectrogram,
            "chunk_length_s": float(SECONDS),
        },
    }  # fmt: skip


def extractor():
    return WhisperFeatureExtractor(feature_size=8, chunk_length=SECONDS)


def written(folder):
    """Write a checkpoint, and return its eager self."""
    config = CONFIG_MAPPING["voxtral"](audio_config=_TOWER, text_config=_TEXT, audio_token_id=AUDIO)
    model = sharp(transformers.VoxtralForConditionalGeneration, config)
    model.generation_config = GenerationConfig(bos_token_id=START, eos_token_id=END, pad_token_id=PAD)
    model.save_pretrained(folder)
    extractor().save_pretrained(folder)
    Path(folder, "tekken.json").write_text(json.dumps(tekken()))
    return model


@cache
def made():
    """Return the eager self of the checkpoint, and its folder."""
    folder = Path(mkdtemp(prefix="voxtral-"))
    return written(folder), folder


@cache
def loaded():
    return LoadedModel.load(made()[1], dtype=None, device=torch.device("cpu"), progress=lambda _: None)
