"""Tokens and the likeliest ones in their places, with log-probabilities, in the forms of OpenAI's API."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from attention_service.models.inputs.token_texts import TokenDecoder, shown

Json = dict[str, Any]
_UNLIKELY: Final = -9999.0
"""The log-probability by which OpenAI's API tells of a token that is very unlikely."""


@dataclass(slots=True)
class ScoredToken:
    """A token with its log-probability."""

    id: int
    name: str
    """The token as the vocabulary has it."""
    raw: bytes
    """The bytes that it adds to its text."""
    is_special: bool
    """True for a token that a text leaves out, unless it stands for a part of a prompt that came as text."""
    logprob: float | None
    """None of the first token of a prompt."""

    @property
    def entry(self) -> Json:
        """The fields of the schema ``TokenLogprob``."""
        return {
            "token": shown(self.raw) if self._has_text else self.name,
            "bytes": list(self.raw),
            "logprob": self._shown_logprob,
        }

    @property
    def text(self) -> str:
        r"""The token in the form of completions, which have no bytes: a part of a character as ``bytes:\xe2``."""
        if not self._has_text:
            return self.name
        try:
            return self.raw.decode()
        except UnicodeDecodeError:
            return f"bytes:{shown(self.raw)}"

    @property
    def _has_text(self) -> bool:
        return bool(self.raw) or not self.is_special

    @property
    def _shown_logprob(self) -> float | str | None:
        if self.logprob is None:
            return None
        return "NaN" if math.isnan(self.logprob) else max(self.logprob, _UNLIKELY)


@dataclass(slots=True)
class TokenLogprobs:
    """The token of a place, and the likeliest tokens there."""

    chosen: ScoredToken
    top: list[ScoredToken] | None
    """The likeliest first, and then the named ones; None where nothing was predicted."""

    @property
    def entry(self) -> Json:
        """The fields of the schema ``ChosenLogprob``."""
        return self.chosen.entry | {"top_logprobs": [scored.entry for scored in self.top or ()]}

    @property
    def by_text(self) -> Json | None:
        """The log-probability of each of the likeliest tokens, and of the chosen one, by its text.

        A token that has the text of another, as two may at the beginning of a text, is named as the vocabulary has it.
        """
        if not self.top:
            return None
        keys: dict[int, str] = {}
        for scored in (self.chosen, *sorted(self.top, key=lambda scored: scored.name != scored.text)):
            if scored.id not in keys:
                names = (scored.text, scored.name, f"token_id:{scored.id}")
                keys[scored.id] = next(name for name in names if name not in keys.values())
        return {keys[scored.id]: scored.entry["logprob"] for scored in (*self.top, self.chosen)}


def logprobs_of(
    decoder: TokenDecoder, token: int, peek: Callable[[int], bytes], logs: Tensor | None, count: int,
    named: Sequence[int] = (),
) -> TokenLogprobs:  # fmt: skip
    """A token by its ln p among those of all tokens ``[V]``, so many of the likeliest, and the named ones.

    ``peek`` returns the bytes of a token in its place; ``logs``: None where nothing was predicted.
    """

    def scored(token_id: int, logprob: float | None) -> ScoredToken:
        name = decoder.name(token_id)
        is_special = name is None or decoder.is_special(token_id)
        return ScoredToken(token_id, str(token_id) if name is None else name, peek(token_id), is_special, logprob)

    if logs is None:
        return TokenLogprobs(scored(token, None), None)
    top = logs.topk(min(count, len(logs)), -1)
    others = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    if further := [token_id for token_id in dict.fromkeys(named) if token_id not in others]:
        others |= zip(further, logs[further].tolist(), strict=True)
    return TokenLogprobs(scored(token, float(logs[token])), [scored(*other) for other in others.items()])
