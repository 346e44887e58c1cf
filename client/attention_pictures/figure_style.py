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

from attention_contract.schemas.picture_options import NO_TITLE, PictureOptions, Theme
from attention_pictures.text_sizes import families, wrapped

_STYLE: Any = {
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
    "text.parse_math": False,  # a label is no formula
    "svg.hashsalt": "attention",  # the same picture is the same bytes
}
INK: Final[dict[Theme, str]] = {"light": "#1b1f24", "dark": "#e6e8eb"}
SECOND: Final[dict[Theme, str]] = {"light": "#5f6670", "dark": "#9aa3ad"}
GROUND: Final[dict[Theme, str]] = {"light": "#ffffff", "dark": "#14171c"}
NO_VALUE: Final[dict[Theme, str]] = {"light": "#d9dce0", "dark": "#3a3f47"}
"""The colour of a cell without a number."""
EDGE_IN: Final = 0.08
_NOTE_IN: Final = 0.15
"""Inches of a line of a note."""
_HEADING_IN: Final = 0.18
"""Inches of a line of the heading."""
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
    fonts = {"font.family": [*families(), "sans-serif"], "font.sans-serif": families()[:1]}
    with _LOCK, rc_context(_STYLE | fonts | colours | ground), warnings.catch_warnings():
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
        self.width = self.options.inches
        width = self.width - 2 * EDGE_IN
        title = self.options.title or self.heading
        lines = [] if title == NO_TITLE else wrapped(title, 9, width, bold=True)
        notes = [line for note in self.notes for line in wrapped(note, 7, width)]
        self.above = 2 * EDGE_IN + _HEADING_IN * len(lines)
        self.height = self.body_in + self.above + _NOTE_IN * len(notes) + EDGE_IN
        self.figure = Figure(figsize=(self.width, self.height), dpi=self.options.resolution)
        for at, line in enumerate(lines):
            self.write(line, EDGE_IN, EDGE_IN + 0.02 + _HEADING_IN * at - self.above, fontsize=9, weight="bold")
        ink = SECOND[self.options.theme]
        for at, note in enumerate(notes):
            self.write(note, EDGE_IN, self.body_in + EDGE_IN / 2 + _NOTE_IN * at, fontsize=7, color=ink)

    def write(self, text: str, left: float, top: float, **look: Any) -> None:
        """Write a text at a place in inches, from the left and from below the heading."""
        place = left / self.width, 1 - (self.above + top) / self.height
        self.figure.text(*place, text, **({"va": "top"} | look))

    def name_axes(self, names: tuple[str, str], place: tuple[float, float, float, float], depth: float) -> None:
        """Name the rows and the columns of the maps at a place: left, top, width and height in inches.

        ``depth``: the inches of the labels below them.
        """
        left, top, width, height = place
        self.write(names[0], EDGE_IN, top + height / 2, rotation=90, va="center")
        self.write(names[1], left + width / 2, top + height + depth + 0.03, ha="center")

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes at a place in inches, from the left and from below the heading."""
        bottom = self.height - self.above - top - height
        return self.figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))


def spaced(name: str) -> str:
    """A field's name as words."""
    return name.replace("_", " ")
