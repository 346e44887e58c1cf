"""Attributions: the share of each weight and of each head in a number that depends on the output.

Notation as in ``attention``. A is the weights after the edits, L the number, v the values, W_O the output projection.
"""

from typing import ClassVar, Final, Literal

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.schemas.attention import MAX_EDITS, AttentionInputs, Edit, Ran, RawInputs, Select, TokenLabels
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.tensors import FloatArray, IntArray

AttributionMethod = Literal["gradient_attention", "integrated", "relevance", "norm", "head_importance"]
"""The ways to attribute."""
SIGNED_METHODS: Final[tuple[AttributionMethod, ...]] = ("gradient_attention", "integrated")
"""The methods whose attributions may be negative."""


_STEPS: Final = 32


class Readout(WireModel):
    """A linear classifier of the output: L = Σ log softmax(weight · output + bias)[target] over the queries."""

    weight: FloatArray
    """``[C, width]``: one row for each class. The width is that of the output, heads side by side."""
    bias: FloatArray | None = None
    """``[C]``"""
    targets: IntArray
    """``[B, Lq]``: the class of each query; −1 leaves a query out of L."""


class AttributionRequest(TokenLabels, AttentionInputs):
    """Ask for the share of each weight and head in L, which is Σ output · upstream unless there is a readout."""

    methods: Listed[AttributionMethod] = Field(
        default_factory=lambda: list[AttributionMethod](["gradient_attention"]), min_length=1, max_length=64
    )
    """The attribution methods; the reply has a tensor for each."""
    upstream: FloatArray | None = None
    """∂L/∂output, of the output's shape; default: ones (L is the sum of the output)."""
    readout: Readout | None = None
    """A linear classifier, whose log-likelihood is L. Replaces ``upstream``."""
    steps: int = Field(default=_STEPS, ge=1, le=1024)
    """The number of points on the path of ``integrated``. Without a readout L is linear in the weights, and one point
    is exact."""
    edits: Listed[Edit] = Field(default_factory=list, max_length=MAX_EDITS)
    """Applied in the order of the taps, then in the order given. The attributed weights are those after the edits."""
    select: Select | None = None
    """Attribute to the weights of these heads and queries. ``relevance`` and ``norm_of_sum`` are over these heads;
    ``head_importance`` and ``completeness`` cover all heads and queries."""
    compare: Literal["unedited"] | None = None
    """``unedited``: return ``differences`` too, the attributions after the edits minus those without them."""

    @model_validator(mode="after")
    def _one_loss(self) -> "AttributionRequest":
        if self.upstream is not None and self.readout is not None:
            raise at_fault("upstream", "the readout determines it; leave upstream or readout out")
        return self

    @model_validator(mode="after")
    def _changes_something(self) -> "AttributionRequest":
        asked = set(self.methods)
        if self.steps != _STEPS and "integrated" not in asked:
            raise at_fault("steps", "they are of the method integrated; add it to methods, or leave them out")
        if self.select is not None and asked == {"head_importance"}:
            raise at_fault("select", "head_importance covers all heads and queries; leave it out, or add a method")
        for name in ("upstream", "readout"):
            if getattr(self, name) is not None and asked == {"norm"}:
                raise at_fault(name, "the method norm is of no L; leave it out, or add a method")
        return self


class RawAttributionRequest(RawInputs, AttributionRequest):
    """Ask for the share of each weight and head of raw attention in L."""


class Completeness(WireModel):
    """The sum of the integrated attributions against the change of L that they explain: ``[B]`` each."""

    attributed: FloatArray
    """The sum over all heads, queries and keys."""
    expected: FloatArray
    """L(A) − L(0): L of the sequence as it is, minus L with all weights zero."""
    gap: FloatArray
    """``attributed`` − ``expected``; it goes to zero as ``steps`` grow."""


class Attributions(WireModel):
    """A tensor for each method."""

    gradient_attention: IfRequested[FloatArray] = ABSENT
    """A ⊙ ∂L/∂A: ``[B, H, Lq, Lk]``. Source: Barkan et al. 2021; as a product of input and gradient Shrikumar et al.
    2017."""
    integrated: IfRequested[FloatArray] = ABSENT
    """A ⊙ (1/m) Σ ∂L/∂A at (k/m)·A, k = 1 … m, m = ``steps``: ``[B, H, Lq, Lk]``. Source: Hao et al. 2021, eq. 4, after
    Sundararajan et al. 2017."""
    relevance: IfRequested[FloatArray] = ABSENT
    """The mean over heads of (A ⊙ ∂L/∂A)⁺: ``[B, Lq, Lk]``, the layer's update R ← R + relevance · R. Source: Chefer
    et al. 2021, eqs. 5 and 6."""
    norm: IfRequested[FloatArray] = ABSENT
    """‖A v W_O‖, the length of what a key adds to the output through one head: ``[B, H, Lq, Lk]``. Raw attention has no
    W_O. Source: Kobayashi et al. 2020, section 3."""
    norm_of_sum: IfRequested[FloatArray] = ABSENT
    """‖Σ A v W_O‖ over the heads, with ``norm``: ``[B, Lq, Lk]``. Source: Kobayashi et al. 2020, section 3."""
    head_importance: IfRequested[FloatArray] = ABSENT
    """|∂L/∂ξ| at ξ = 1 of a gate ξ that multiplies the head's context after its edits: ``[B, H]``. Source: Michel et
    al. 2019, eq. 2."""


class AttributionReply(Attributions, DrawableReply):
    """A tensor for each method, in the layout of the taps."""

    picture_names: ClassVar = frozenset({"labels", "query_labels", "heads"})

    completeness: IfRequested[Completeness] = ABSENT
    """The accuracy of the path, with ``integrated``."""
    differences: IfRequested[Attributions] = ABSENT
    """The effect of the edits, with ``compare``."""
    ran: Ran

    def names_in(self, options: PictureOptions) -> frozenset[str]:
        """Return the arguments of ``plot`` that a picture uses: none of one of heads alone."""
        maps = set(Attributions.model_fields) - {"head_importance"}
        shown = {name for name in maps if getattr(self.differences or self, name) is not None}
        return super().names_in(options) if shown else frozenset()
