"""Pictures of replies: the views, and the options that a request states in its query string."""

from math import ceil
from typing import Any, ClassVar, Final, Literal, TypedDict, get_args

from pydantic import Field, model_validator

from attention_contract.base import WireModel, at_fault

View = Literal[
    "heads", "head", "lines", "statistics", "output", "costs", "spectra", "composition", "similarity", "effects",
    "rollout", "image", "lens",
]  # fmt: skip
"""``heads``: a heat map of every head. ``head``: one head's. ``lines``: one head's weights as lines from queries to
keys. ``statistics``: heads × statistics, or layers × heads. ``output``: queries × width. ``costs``: time and memory
along a sweep. ``spectra``: singular values of circuits and parameters. ``composition``: scores of heads × heads of a
later module.
``similarity``: of every pair. ``effects``: the change of the output by each edit of a sweep. ``rollout``: the share of
each input in each token. ``image``: the weights of one token over the image that they look at. ``lens``: the
likeliest token of each layer at each token."""
Theme = Literal["light", "dark"]
Positions = Literal["repeated", "all", "none"]
Scale = Literal["auto", "linear", "log"]
Sequential = Literal["viridis", "cividis", "magma", "inferno", "plasma"]
"""Perceptually uniform palettes for weights. Sources: Smith and van der Walt 2015; Nuñez et al. 2018 (cividis)."""
Diverging = Literal["blue_orange", "rdbu", "puor", "brbg", "berlin", "vanimo"]
"""Palettes for differences that a colour-blind reader can tell apart, light or (the last two) dark in the middle.
Sources: Brewer 2003; Crameri et al. 2020."""
SEQUENTIAL: Final = get_args(Sequential)
DIVERGING: Final = get_args(Diverging)
WEIGHT_VIEWS: Final[tuple[View, ...]] = ("heads", "head", "lines", "statistics")
PictureFormat = Literal["svg", "png", "pdf"]
Background = Literal["theme", "none"]
NO_TITLE: Final = "none"
_WIDTH, _DPI, _DPI_OF_PRINT, _MOST_PIXELS = 960, 96, 300, 4096
_MM: Final = 25.4
"""Millimetres of an inch."""
_LEAST_INCHES: Final = 2.5
"""The width in which every view has room for its labels and its colour bar."""


class PictureOptions(WireModel):
    """The look of a picture."""

    reads_text: ClassVar[bool] = True

    view: View | None = None
    """The kind of picture. Default: ``heads``, or ``head`` if the reply has only one head; other operations have only
    one view."""
    head: int | None = Field(default=None, ge=0, lt=2**31)
    """The head that ``head`` and ``lines`` show. Default: the first of those selected."""
    sequence: int = Field(default=0, ge=0, lt=2**31)
    """The sequence of the batch to show."""
    width: int | None = Field(default=None, ge=160, le=_MOST_PIXELS)
    """Width in pixels, at least 2.5 inches; the height follows. In print, the picture is width / dpi inches wide.
    Default: 960."""
    width_mm: float | None = Field(default=None, gt=0, le=2000, allow_inf_nan=False)
    """Width in print in place of ``width``, in millimetres: 85 for a column of a paper and 170 for two."""
    dpi: int | None = Field(default=None, ge=36, le=600)
    """Pixels per inch, which determine the size of text. Default: 96; with ``width_mm`` 300."""
    theme: Theme = "light"
    """The colours of text and background: black on white, or light on dark."""
    background: Background = "theme"
    """``theme``: the theme's colour, white by default. ``none``: transparent."""
    token_positions: Positions | None = None
    """The tokens whose labels have their index behind them, as in ``cat·2``: ``repeated``, those of which the axis has
    several; ``all``; or ``none``. Default: ``repeated``; ``none`` for labels that the request gives."""
    title: str | None = Field(default=None, min_length=1, max_length=200)
    """The heading; ``none`` for no heading. Default: the module and the content of the picture."""
    palette: Sequential | Diverging | None = None
    """The colours: viridis, cividis, magma, inferno or plasma; for differences blue_orange, rdbu, puor, brbg, berlin or
    vanimo. Default: viridis; for differences blue_orange."""
    scale: Scale = "auto"
    """The colour range. ``auto`` is logarithmic if most weights are far below the largest, else linear."""

    @model_validator(mode="after")
    def _wide_enough(self) -> "PictureOptions":
        if self.width is not None and self.width_mm is not None:
            raise at_fault("width_mm", "it takes the place of width; leave one of the two out")
        given, field = (self.width_mm, "width_mm") if self.width_mm is not None else (self.width or _WIDTH, "width")
        a_inch = _MM if field == "width_mm" else self.resolution
        if self.inches < _LEAST_INCHES:
            least = ceil(_LEAST_INCHES * a_inch * 10) / 10 if field == "width_mm" else ceil(_LEAST_INCHES * a_inch)
            of = "" if field == "width_mm" else f" at {self.resolution} dpi"
            raise at_fault(field, f"expected at least {least}{of}, which are {_LEAST_INCHES} inches, got {given:g}")
        if self.inches * self.resolution > _MOST_PIXELS + 1:
            most = _MOST_PIXELS / self.resolution * _MM
            raise at_fault(field, f"expected at most {most:.0f} at {self.resolution} dpi, got {given:g}")
        return self

    @property
    def resolution(self) -> int:
        """Pixels per inch."""
        return self.dpi or (_DPI if self.width_mm is None else _DPI_OF_PRINT)

    @property
    def inches(self) -> float:
        """The width in inches."""
        return (self.width or _WIDTH) / self.resolution if self.width_mm is None else self.width_mm / _MM

    def stated(self) -> dict[str, Any]:
        """The options that differ from their defaults, as a query string has them."""
        return self.model_dump(mode="json", exclude_defaults=True)


class PictureFields(TypedDict, total=False):
    """The options as keywords; see ``PictureOptions``."""

    view: View
    head: int
    sequence: int
    width: int
    width_mm: float
    dpi: int
    token_positions: Positions
    theme: Theme
    background: Background
    title: str
    palette: Sequential | Diverging
    scale: Scale
