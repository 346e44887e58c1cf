"""The tokens of times of a model that divides its text into segments by them, as Whisper does."""

from typing import Any, NamedTuple


class TimeTokens(NamedTuple):
    """Tokens that stand for a time in a window of a sound, one a step. Source: Radford et al. 2023, section 2.3."""

    first: int
    """The token of the beginning of a window; all later ids are of later times."""
    step: float
    """Seconds."""

    def seconds(self, token: int) -> float | None:
        """The time in its window that a token stands for; None of one that is text."""
        return None if token < self.first else (token - self.first) * self.step


def time_tokens_of(generation: Any, step: float) -> TimeTokens | None:
    """The tokens of times of a checkpoint, by its GenerationConfig; None if it has none. ``step``: seconds."""
    before = getattr(generation, "no_timestamps_token_id", None)
    return TimeTokens(before + 1, step) if isinstance(before, int) else None
