"""Effects of edits: one edit for each head, query or key of a sweep, and what each does to the output."""

from typing import Final, Literal

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.attention import MAX_EDITS, MAX_INDICES, AttentionInputs, Edit, Ran, RawInputs
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.tensors import FloatArray

Axis = Literal["heads", "queries", "keys"]
MAX_EFFECTS: Final = 65_536
"""The most edits of one sweep."""


def _over_heads() -> list[Axis]:
    return ["heads"]


class SweptEdit(Edit):
    """One edit for each index of the swept axes: every other axis keeps the indices that the edit lists."""

    over: Listed[Axis] = Field(default_factory=_over_heads, min_length=1, max_length=3)
    """The axes to sweep. Along each, one edit changes one of the listed indices, or one of all indices if none are
    listed. A tensor in ``value`` or ``add`` covers all indices, and each edit uses its own part of it."""

    @model_validator(mode="after")
    def _distinct(self) -> "SweptEdit":
        if self.tap == "output":
            raise at_fault("tap", "effects are measured at the output; sweep a tap before it")
        if len(set(self.over)) < len(self.over):
            raise at_fault("over", "an axis is listed twice; list each once")
        return self


class EffectsRequest(AttentionInputs):
    """Ask for the effect of each edit of a sweep on the output."""

    sweep: SweptEdit
    """The edits to try, one at a time."""
    edits: Listed[Edit] = Field(default_factory=list, max_length=MAX_EDITS)
    """Edits that apply in every run, also in the baseline. An effect is the change by one further edit. ``output``
    cannot be edited."""
    queries: Listed[Index] | None = Field(default=None, min_length=1, max_length=MAX_INDICES)
    """The queries whose outputs are compared; default: all."""
    direction: FloatArray | None = None
    """Broadcastable to the compared outputs: ``projection`` measures the change along it. With ∂L/∂output it predicts
    the change of L; with the difference of two rows of an unembedding, the change of the difference of two logits."""
    return_differences: bool = False
    """Return the change of the output of each edit."""


class RawEffectsRequest(RawInputs, EffectsRequest):
    """Ask for the effect of each edit of a sweep on the output of raw attention."""


class Effects(WireModel):
    """The change Δ of the compared outputs by each edit: ``[B, *swept]``, the swept axes in the order of ``over``."""

    norm: FloatArray
    """‖Δ‖, over the compared queries and the width of the output."""
    relative: FloatArray
    """‖Δ‖ / ‖output‖ of the output without the edit; infinite or NaN where that output is zero."""
    max: FloatArray
    """max |Δ|"""
    projection: IfRequested[FloatArray] = ABSENT
    """Σ direction · Δ, where a direction was sent."""


class EffectsReply(DrawableReply):
    """The change of the output by each edit of the sweep. Source: Vig et al. 2020, causal mediation analysis."""

    swept: dict[str, list[int]]
    """The indices along each swept axis."""
    effects: Effects
    differences: IfRequested[FloatArray] = ABSENT
    """``[B, *swept, Lq, d_model]`` of a module; of raw attention the output's own dimensions stand at the end."""
    ran: Ran
