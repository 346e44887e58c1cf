"""Prompts that are read together: a batch filled up at the ends, whose rows no token behind them changes."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from attention_service.core.tensors import wide
from attention_service.models.generation.decoding.decode_attention import Decoding
from attention_service.models.generation.decoding.running_text import Reports, RunningText, reports_of
from attention_service.models.generation.decoding.watched_states import scoring
from attention_service.models.passes.points import Points


def reads_together(text: RunningText) -> bool:
    """True if a text's past may be cut out of that of a batch, and its last token alone is asked about."""
    past = text.past
    edited = not (text.edits.of_states_alone or text.edits.begin_later)
    if text.alone or text.seen or edited or watches_prompt(text) or not text.reads_tokens_alone:
        return False
    most = 2 * len(text.ids)  # the longest of a batch
    return type(past) is DynamicCache and bool(past.layers) and all(_holds_each(layer, most) for layer in past.layers)


def watches_prompt(text: RunningText) -> bool:
    """True if probes score the tokens of its prompt, each of which a pass of its own then reads."""
    return text.watch is not None and bool(text.watch.prompt)


def _holds_each(layer: Any, tokens: int) -> bool:
    """True if a layer of a past holds the keys and values of each of so many tokens, and nothing else."""
    if type(layer) is DynamicSlidingWindowLayer:
        return tokens < layer.sliding_window
    return type(layer) is DynamicLayer


def alike_in_length(texts: Sequence[RunningText], most: int) -> list[RunningText]:
    """The first text, and the most others whose lengths are within a factor of two of each other and of its own.

    ``most``: their tokens together, if they are several.
    """
    lengths, longest = [len(text.ids) for text in texts], [texts[0]]
    for shortest in {length for length in lengths if lengths[0] / 2 <= length <= lengths[0]}:
        tried, left = [texts[0]], most - lengths[0]
        for text, length in zip(texts[1:], lengths[1:], strict=True):
            if shortest <= length <= 2 * shortest and length <= left:
                tried.append(text)
                left -= length
        longest = max(longest, tried, key=len)
    return longest


def read_together(
    model: Any, attention: Decoding, points: Points, texts: Sequence[RunningText]
) -> tuple[list[Tensor], Reports]:
    """Read the prompts of several texts in one pass.

    Returns the logits ``[1, V]`` of each one's next token, in float32 or float64, and the reports on them.
    """
    longest = max(texts, key=lambda text: len(text.ids))
    width, device = len(longest.ids), model.device
    ids = [[*text.ids, *text.ids[-1:] * (width - len(text.ids))] for text in texts]
    past = copy.deepcopy(longest.past)
    arguments = longest.prompt_inputs(range(width), whole=True) | {longest.past_name: past}
    arguments["input_ids"] = torch.tensor(ids, device=device)
    if (positions := arguments.get("position_ids")) is not None:
        arguments["position_ids"] = positions.expand(*positions.shape[:-2], len(texts), -1)
    places = sorted({len(text.ids) - 1 for text in texts})
    if "logits_to_keep" in arguments:
        arguments["logits_to_keep"] = torch.tensor(places, device=device)
    else:
        places = list(range(width))
    ends = [len(text.ids) - 1 for text in texts]
    watches = [text.watch for text in texts]
    with attention.running(texts, ends=ends) as weights, scoring(watches, points, ends):
        logits = model(**arguments, return_dict=True).logits
    reports = reports_of(texts, weights)
    logits_of_texts = []
    for row, text in enumerate(texts):
        for own, whole in zip(text.past.layers, past.layers, strict=True):
            if whole.is_initialized:
                _cut(own, whole, row, len(text.ids))
        text.advance({})
        text.seen = len(text.ids)
        at = places.index(len(text.ids) - 1)
        logits_of_texts.append(wide(logits[row : row + 1, at], copy=True))
    return logits_of_texts, reports


def _cut(own: Any, whole: Any, row: int, length: int) -> None:
    """Give a layer of a text's past the keys and values of the first tokens of a row of another."""
    key, value = (x[row : row + 1, :, :length].clone() for x in (whole.keys, whole.values))
    own.lazy_initialization(key, value)
    own.keys, own.values = key, value
    if own.is_sliding:
        own.cumulative_length = length
