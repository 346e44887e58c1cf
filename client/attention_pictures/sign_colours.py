"""The colours of signed numbers in figures, notebooks, pages and the terminal: blue below 0, orange above.

Orange and blue are told apart by colour-blind eyes. The built-in page has the same ends of its scale, in
``web/src/drawing/colour.ts``.
"""

from typing import Final

from attention_contract.schemas.picture_options import Theme

Colour = tuple[int, int, int]
"""Red, green and blue, each up to 255."""
DIVERGING_SCALES: Final[dict[Theme, tuple[Colour, Colour, Colour]]] = {
    "light": ((19, 62, 157), (249, 247, 241), (180, 80, 4)),
    "dark": ((110, 190, 255), (25, 30, 40), (252, 169, 78)),
}
"""The colours of the most negative number, of 0 and of the most positive one."""
POSITIVE: Final[Colour] = (225, 95, 0)
NEGATIVE: Final[Colour] = (30, 110, 240)
"""The colours behind a text, which are drawn through, in both themes."""
STRONGEST: Final = 0.55
"""The opacity of the strongest number; the text on it stays legible in both themes."""


def background(share: float) -> str:
    """The CSS colour behind a text for a number from −1 to 1, which is a share of the largest."""
    red, green, blue = POSITIVE if share >= 0 else NEGATIVE
    return f"rgba({red},{green},{blue},{min(1.0, abs(share)) * STRONGEST:.3f})"
