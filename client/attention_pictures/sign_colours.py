"""The two colours of signed numbers, in every page and notebook: as red, green and blue."""

from typing import Final

POSITIVE: Final = (225, 95, 0)
NEGATIVE: Final = (30, 110, 240)
"""Orange and blue are told apart by colour-blind eyes."""
STRONGEST: Final = 0.55
"""The opacity of the strongest number; the text on it stays legible in both themes."""


def background(share: float) -> str:
    """The CSS colour behind a text for a number from −1 to 1, which is a share of the largest."""
    red, green, blue = POSITIVE if share >= 0 else NEGATIVE
    return f"rgba({red},{green},{blue},{min(1.0, abs(share)) * STRONGEST:.3f})"
