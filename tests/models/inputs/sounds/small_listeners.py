"""A small Whisper that writes down tones as letters, so that the right transcript of a sound is known.

A letter is a tone of ``STEP`` seconds in the middle of one of the eight bands of the spectrogram. The query that
chooses letter p attends to the middle of step p of the window, by positions alone; values are the bands; the largest
one is the letter. Silence, and the end of the window, are the end of the text.
"""

import math

import numpy as np
import torch
from tests.models.inputs.sounds.small_sounds import END, RATE, SECONDS, extractor, tokenizer, whisper

LETTERS = "abcdefg "
STEP = 0.25
"""Seconds of a letter."""
PROMPT = 4
"""Tokens before a transcript: its start, language and task, and that it has no times."""
_BANDS, _ENDS = slice(4, 12), 12
"""The parts of a hidden state that have the bands, and the end of the text."""
_FRAME = 0.02


def spoken(text):
    """Return the sound of a text."""
    pitches = extractor("whisper").mel_filters.argmax(0) * RATE / 400  # windows of 400 samples
    time = np.arange(round(STEP * RATE)) / RATE
    tones = [0.3 * np.sin(2 * np.pi * pitches[LETTERS.index(letter)] * time) for letter in text]
    return np.concatenate(tones).astype(np.float32)


@torch.no_grad()
def listener(folder, **generation):
    """Write the checkpoint."""
    model = whisper(folder, alignment_heads=[[1, 0], [1, 1]], **generation)
    encoder, decoder = model.model.encoder, model.model.decoder
    for layer in [*encoder.layers, *decoder.layers]:
        for module in (layer.self_attn.out_proj, layer.fc2):
            module.weight.zero_()
            module.bias.zero_()
    cross = decoder.layers[1].encoder_attn
    first = decoder.layers[0].encoder_attn
    for module in (encoder.conv1, encoder.conv2, first.out_proj, cross.q_proj, cross.v_proj, cross.out_proj):
        module.weight.zero_()
        module.bias.zero_()
    for norm in (encoder.layer_norm, decoder.layers[1].encoder_attn_layer_norm, decoder.layer_norm):
        norm.weight.fill_(1)
        norm.bias.zero_()
    bands = torch.arange(len(LETTERS))
    encoder.conv1.weight[bands, bands, 1] = 1
    encoder.conv1.bias[bands] = 1
    encoder.conv2.weight[4 + bands, bands, 1] = 1e-3  # so that it changes the norms of keys by little
    frames = torch.arange(len(encoder.embed_positions.weight))
    steps = torch.arange(len(decoder.embed_positions.weight)) - (PROMPT - 1)
    _set_angles(encoder.embed_positions.weight, frames * _FRAME / SECONDS)
    _set_angles(decoder.embed_positions.weight, ((steps + 0.5) * STEP / SECONDS).clip(0, 1))
    decoder.embed_positions.weight[steps >= SECONDS / STEP, _ENDS] = 1000
    cross.k_proj.weight.zero_()
    for head in range(2):
        for at, place in enumerate((0, 2)):
            cross.q_proj.weight[4 * head + at, place] = cross.k_proj.weight[4 * head + at, place] = 24
        own = 4 * head + torch.arange(4)
        cross.v_proj.weight[own, 4 + own] = 2000
        cross.out_proj.weight[4 + own, own] = 1
    cross.out_proj.bias[_ENDS] = 2.5  # larger than the bands of silence, smaller than that of a tone
    decoder.embed_tokens.weight.zero_()
    letters = tokenizer()(LETTERS, add_special_tokens=False)["input_ids"]
    decoder.embed_tokens.weight[letters, 4 + bands] = 0.05
    decoder.embed_tokens.weight[END, _ENDS] = 0.05
    model.tie_weights()
    model.save_pretrained(folder)


def _set_angles(weight, shares):
    """Make positions points of half a circle."""
    angles = math.pi * shares
    weight.zero_()
    weight[:, :4] = torch.stack([angles.cos(), -angles.cos(), angles.sin(), -angles.sin()], -1)  # mean 0
