"""The look that all pictures share: theme, fonts, margins in inches. No pyplot, whose state all threads would share."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_contract.schemas.picture_options import PictureOptions, Theme

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlepad": 3,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.size": 2,
    "ytick.major.size": 2,
    "xtick.major.pad": 2,
    "ytick.major.pad": 2,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,
    "text.parse_math": False,  # a label is no formula
    "svg.hashsalt": "attention",  # the same picture is the same bytes
}
INK: Final[dict[Theme, str]] = {"light": "#1b1f24", "dark": "#e6e8eb"}
SECOND: Final[dict[Theme, str]] = {"light": "#5f6670", "dark": "#9aa3ad"}
GROUND: Final[dict[Theme, str]] = {"light": "#ffffff", "dark": "#14171c"}
NO_VALUE: Final[dict[Theme, str]] = {"light": "#d9dce0", "dark": "#3a3f47"}
"""The colour of a cell without a number."""
NOTE_IN: Final = 0.17
HEADING_IN: Final = 0.34
EDGE_IN: Final = 0.08
_LOCK = RLock()
"""Matplotlib's settings and fonts are the process's."""


@contextmanager
def styled(theme: Theme) -> Iterator[None]:
    """Set the style while figures are made and written, by one thread at a time."""
    ink = INK[theme]
    colours = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"), ink
    )
    ground = {"figure.facecolor": GROUND[theme], "axes.facecolor": GROUND[theme], "savefig.facecolor": GROUND[theme]}
    with _LOCK, rc_context(_STYLE | colours | ground), warnings.catch_warnings():
        # A viewer's font may have the glyphs of a label that matplotlib's own lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


@dataclass
class Sheet:
    """A figure of a width in inches that is filled from the top down; its height is known before it is made."""

    options: PictureOptions
    heading: str
    notes: Sequence[str] = ()
    body_in: float = 0.0
    """Height between heading and notes, in inches."""
    figure: Figure = field(init=False)

    def __post_init__(self) -> None:
        self.width = self.options.width / self.options.dpi
        self.height = self.body_in + HEADING_IN + NOTE_IN * len(self.notes) + EDGE_IN
        self.figure = Figure(figsize=(self.width, self.height), dpi=self.options.dpi)
        top = 1 - (EDGE_IN + 0.02) / self.height
        room = int((self.width - 2 * EDGE_IN) / 0.072)
        self.figure.text(EDGE_IN / self.width, top, clipped(self.heading, room), fontsize=9, va="top", weight="bold")
        for at, note in enumerate(reversed(self.notes)):
            place = EDGE_IN / self.width, (EDGE_IN / 2 + NOTE_IN * at) / self.height
            small = clipped(note, int((self.width - 2 * EDGE_IN) / 0.052))
            self.figure.text(*place, small, fontsize=7, va="bottom", color=SECOND[self.options.theme])

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes at a place in inches, from the left and from below the heading."""
        bottom = self.height - HEADING_IN - top - height
        return self.figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))


def clipped(text: str, most: int) -> str:
    """The text, its end cut off if it has more characters than these."""
    return text if len(text) <= most else f"{text[: max(most - 1, 1)]}…"


def spaced(name: str) -> str:
    """A field's name as words."""
    return name.replace("_", " ")
