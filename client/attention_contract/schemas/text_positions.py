"""Positions of tokens in texts: the same in every text, or a list for each."""

from typing import Annotated

from pydantic import AfterValidator, Field

from attention_contract.base import Listed
from attention_contract.schemas.attention import MAX_INDICES
from attention_contract.schemas.prompts import MAX_TEXTS

OfEach = Annotated[Listed[int], Field(min_length=1, max_length=MAX_INDICES)]


def _check_alike(by_text: list[list[int]]) -> list[list[int]]:
    counts = {len(positions) for positions in by_text}
    if len(counts) > 1:
        raise ValueError(f"expected as many positions for each text; got {min(counts)} and {max(counts)}. Repeat some")
    return by_text


TokenPositions = (
    OfEach | Annotated[list[OfEach], Field(min_length=1, max_length=MAX_TEXTS), AfterValidator(_check_alike)]
)
"""Positions, or a list of as many for each text."""


def position_count(positions: TokenPositions | None) -> int:
    """Return the positions of each text; 0 of none."""
    if not positions:
        return 0
    return len(positions[0]) if isinstance(positions[0], list) else len(positions)
