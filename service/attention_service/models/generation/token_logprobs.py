"""A token and the likeliest ones in its place, with their log-probabilities, in the form of OpenAI's API."""

import math
from typing import Any, Final

from torch import Tensor

from attention_service.models.generation.completion_objects import Json

_UNLIKELY: Final = -9999.0
"""The log-probability by which OpenAI's API tells of a token that is very unlikely."""


def logprob_of(tokenizer: Any, token: int, logs: Tensor | None, count: int) -> Json:
    """A token by its ln p among those of all tokens ``[V]``, and so many of the likeliest; without them, its name."""
    if logs is None:
        return {"token": _text(tokenizer, token)}
    top = logs.topk(min(count, len(logs)), -1)
    others = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    chosen = _named(tokenizer, token, float(logs[token]))
    return chosen | {"top_logprobs": [_named(tokenizer, *each) for each in others]}


def _named(tokenizer: Any, token: int, logprob: float) -> Json:
    text = _text(tokenizer, token)
    whole = "\N{REPLACEMENT CHARACTER}" not in text
    shown = "NaN" if math.isnan(logprob) else max(logprob, _UNLIKELY)
    return {"token": text, "bytes": list(text.encode()) if whole else None, "logprob": shown}


def _text(tokenizer: Any, token: int) -> str:
    return tokenizer.decode([token]) or str(tokenizer.convert_ids_to_tokens(token) or token)
