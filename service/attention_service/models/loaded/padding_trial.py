"""The trial of padding: whether a text has the numbers in a batch with longer ones that it has alone.

A model that generates has its texts filled up at their beginnings, so that their last tokens stand together; others at
their ends. A model that takes no positions, as Whisper's decoder, counts padding at the beginning as tokens, and one
with a running state may read it. So the other side is tried too. Where both change the numbers, as of a convolution
over neighbouring tokens, texts of unequal lengths share no batch.

Beside it the trial of the shortest texts: layers that merge tokens may fail where too few are left.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from attention_service.core.tensors import wide
from attention_service.models.inputs.input_reader import InputReader
from attention_service.models.inputs.input_stacks import Stack, Tokens
from attention_service.models.loaded.last_states import ModelCall
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.attention_places import TARGET, TEXT
from attention_service.models.passes.unrun_models import NOT_RUNNING

_TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""The largest difference of equal outputs of a text, as a share of their norm."""
_SHORT_TEXTS: Final = 3
"""Texts that are filled up. Padding changes each of them; a router that rounds otherwise changes one by chance."""


def choose_padding(reader: InputReader, run: ModelCall, part: nn.Module | None) -> bool:
    """Choose the side at which the texts of a reader are filled up. False if either changes their numbers.

    ``part``: the part of the model that is run in its place; None for all of it.
    """
    preferred = reader.pads_left
    for side in (preferred, not preferred):
        reader.pads_left = side
        if _keeps_numbers(reader, run, part):
            return True
    reader.pads_left = preferred
    return False


def _keeps_numbers(reader: InputReader, run: ModelCall, part: nn.Module | None) -> bool:
    """True if short texts have the outputs alone that they have where they are filled up to the length of another."""
    short = [_text(number, TARGET) for number in range(_SHORT_TEXTS)]
    together, alone = reader.batch([_text(0, TEXT), *short]), reader.batch(short)
    try:
        with torch.no_grad():
            predicted = run(_arguments(reader, together), AttentionPass({}), model=part)[0][1:]
            own = run(_arguments(reader, alone), AttentionPass({}), model=part)[0]
    except NOT_RUNNING:
        return False
    if predicted.ndim > 1 and (predicted.shape[1], own.shape[1]) == (TEXT, TARGET):  # an output of each token
        predicted = predicted[:, -TARGET:] if reader.pads_left else predicted[:, :TARGET]
    if predicted.shape != own.shape:
        return False
    differences, sizes = (wide(x).flatten(1).norm(dim=1) for x in (predicted - own, own))
    return bool((differences <= _TOLERANCE[own.dtype] * sizes).any())


def find_least_length(reader: InputReader, run: ModelCall, part: nn.Module | None) -> int:
    """Return the fewest tokens of a text over which a model runs: more than 1 of one whose layers merge tokens.

    ``part``: the part of the model that is run in its place; None for all of it.
    """
    for length in range(1, TEXT + 1):
        try:
            with torch.no_grad():
                run(_arguments(reader, reader.batch([_text(0, length)])), AttentionPass({}), model=part)
        except NOT_RUNNING:
            continue
        return length
    return 1


def _text(number: int, length: int) -> Tokens:
    """A text of the tokens of short runs, which begins with another one for each number."""
    return Tokens([1 + (number + at) % TEXT for at in range(length)], [None] * length)


def _arguments(reader: InputReader, texts: Stack) -> Mapping[str, Tensor]:
    arguments = reader.arguments(texts)
    if reader.shifts:
        arguments["decoder_input_ids"] = texts.ids
    elif reader.pairs:
        target = reader.batch([_text(0, TARGET)]).ids
        arguments["decoder_input_ids"] = target.expand(len(texts.ids), -1)
    return arguments
