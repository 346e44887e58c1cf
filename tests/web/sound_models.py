"""Small models that hear, with random parameters, for the tests of the page."""

import shutil

import pytest

pytest.importorskip("soundfile")
small_sounds = pytest.importorskip("tests.models.inputs.sounds.small_sounds")
prompts = pytest.importorskip("tests.models.inputs.sounds.small_sound_prompts")
NAMES = ("listener", "hubert", "reader")
"""A Whisper, a HuBERT and a Qwen2-Audio."""


def write_models(folder):
    """Write their checkpoints."""
    small_sounds.whisper(folder / "listener", max_length=14)
    small_sounds.written("hubert", folder / "hubert")
    shutil.copytree(prompts.made("qwen2_audio")[1], folder / "reader")
