"""Prompts that are read on from a past, and the trial that finds out whether those of a model can be."""

import math
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn

from attention_service.models.generation.decoding.decode_attention import Decoding
from attention_service.models.generation.decoding.running_text import RunningText
from attention_service.models.generation.decoding.trial_texts import TOLERANCE, TrialTexts
from attention_service.models.loaded.loaded_model import LoadedModel

_PARTS: Final = [1, 2, 3, 1, 1, 2], [3, 2, 2, 1, 3]
"""A prompt in two parts, each longer than the usual convolution of a recurrence."""
_TIME_LIMIT: Final = "time_step_limit"
"""The attribute of Mamba 2's modules with the least and the largest time step."""


@dataclass(frozen=True)
class ReadingOn:
    """The passes by which a prompt is read on from a past with the numbers of one that is read whole."""

    in_parts: bool = False
    """True for passes over several tokens."""
    by_steps: bool = False
    """True for passes over one token, as those that generate are."""
    reason: str | None = None
    """Why there are none."""

    def part_of(self, text: RunningText, most: int) -> range:
        """The tokens of a prompt that are read next, where it may be divided: at most so many in a pass."""
        left = len(text.ids) - text.seen
        if text.seen and not self.in_parts:
            return range(text.seen, text.seen + 1)
        if left <= most or not self.in_parts:
            return range(text.seen, len(text.ids))
        return range(text.seen, text.seen + (most if self.by_steps or left > most + 1 else most - 1))


def try_reading_on(loaded: LoadedModel, attention: Decoding) -> ReadingOn:
    """Read a short prompt whole, in two parts and by steps, and compare the logits behind it."""
    texts, (first, second) = TrialTexts(loaded, attention), _PARTS
    ids = [*first, *second]
    whole: Tensor

    def differs(*lengths: int) -> str | None:
        """The difference of the logits of a prompt in parts from those of the whole, in words; None without one."""
        text = texts.unread(ids)
        try:
            for length in lengths:
                logits = texts.read(text, range(text.seen, text.seen + length))
        except Exception as fault:  # of a model that reads several tokens at its beginning alone
            return _told(fault)
        share = float((logits - whole).abs().max() / whole.abs().max())
        close = share <= TOLERANCE[loaded.model.dtype]
        return None if close else f"logits behind a prompt in parts differ by {share:.1e} of the largest"

    try:
        text = texts.unread(ids)
        whole = texts.read(text)
    except Exception as fault:
        return ReadingOn(reason=_told(fault))
    if text.past is None:
        return ReadingOn(reason="it keeps no past")
    reason = differs(len(first), len(second))
    by_steps = differs(len(first), *[1] * len(second)) is None and not _limits_steps(loaded.model)
    return ReadingOn(reason is None, by_steps, None if by_steps else reason)


def _told(fault: Exception) -> str:
    return f"a trial failed: {type(fault).__name__}: {str(fault).partition(chr(10))[0][:200]}"


def _limits_steps(model: nn.Module) -> bool:
    """True if passes over several tokens limit a recurrence's time step; those over one do not, in transformers."""
    limits = [limit for module in model.modules() if (limit := getattr(module, _TIME_LIMIT, None)) is not None]
    return any(limit[0] > 0 or limit[1] < math.inf for limit in limits)
