"""What the comparison of one model type found."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.models_walk.differences import CLOSE


@dataclass
class Found:
    """What the comparison of one model type found. Errors are shares of the largest number; None: not compared."""

    kind: str
    architecture: str = ""
    whole: float | None = None
    weights: float | None = None
    gradients: float | None = None
    generated: bool | None = None
    """True if greedy and drawn tokens of three prompts are those of transformers for each alone."""
    joined: str | None = None
    """Which of its texts share passes: those ``unlike`` in length, those ``alike``, or ``no``."""
    apart: float | None = None
    """The largest difference of joined logits from those of the same texts alone."""
    family: str = ""
    """The family by which its layers are imported as modules."""
    layers: int = 0
    """The attentions of the model."""
    invariants: float | None = None
    """The largest error of what holds whatever the model is: see ``_invariants``."""
    way: str = ""
    """How its attentions are seen: ``computed`` or ``observed``; a dash without attentions."""
    forms: Sequence[str] = ()
    """The heads with which checkpoints of the type open, besides that for tokens."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a part is not compared, or not equal."""
    asked: dict[str, float] = field(default_factory=dict)
    """The error of each younger question (``questions``) that the type answers."""
    refused: dict[str, str] = field(default_factory=dict)
    """The reason for which it refuses one; a fault is one of ``reasons``."""
    implicit: float | None = None
    """The largest difference of implicit weights times values from the layer's own output, in float64."""

    @property
    def equal(self) -> bool:
        """True if the whole pass gives the eager model's numbers."""
        return self.whole is not None and self.whole < CLOSE


def short_error(fault: BaseException) -> str:
    """Return the first sentence of an error on one line."""
    text = getattr(fault, "detail", None) or f"{type(fault).__name__}: {fault}"
    if isinstance(fault, ImportError) and (package := re.search(r"requires the (\S+) library", str(fault))):
        text = f"it needs {package[1]}, which is not installed here"
    return " ".join(str(text).split())[:240]
