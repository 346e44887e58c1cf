"""Similarity of heads and layers: Jensen-Shannon divergence of weights, and linear CKA of features.

Notation for shapes: A and B compared heads or layers, Lq queries, Lk keys, N tokens, D width.
"""

from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from attention_contract.base import Listed, WireModel, at_fault
from attention_contract.schemas.attention import Ran
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.schemas.recordings import LayerName, RecordingId
from attention_contract.tensors import Encoding, FloatArray

Measure = Literal["jensen_shannon", "cka"]
"""A measure of similarity."""
ComparedTensor = Literal["weights", "q", "k", "v", "context", "output", "hidden"]
"""A recorded tensor: of ``weights`` the divergence is measured, of the others CKA."""


class SimilarityRequest(WireModel):
    """Ask for the similarity of heads whose weights or features are sent."""

    a: FloatArray
    """``[A, Lq, Lk]`` weights, or ``[A, N, D]`` features; ``[Lq, Lk]`` or ``[N, D]`` of one head or layer."""
    b: FloatArray | None = None
    """The heads or layers to compare with, with the same queries and keys, or the same tokens; default: those of
    ``a``."""
    measure: Measure = "jensen_shannon"
    """``jensen_shannon`` of weights, or ``cka`` of features."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""


class SimilarityReply(DrawableReply):
    """The similarity of every pair."""

    measure: Measure
    """``jensen_shannon``: the mean over the queries of H((p + q) / 2) − (H(p) + H(q)) / 2 in nats, with the shares p =
    w / Σ w and the entropy H: 0 for equal weights, at most ln 2. A query that may look nowhere in one of the two is not
    counted. Source: Lin 1991; of attention: Clark et al. 2019.

    ``cka``: linear centred kernel alignment ‖Yᵀ X‖² / (‖Xᵀ X‖ ‖Yᵀ Y‖) in Frobenius norms, from 0 to 1, with the
    means over the tokens subtracted. It is 1 for features that agree up to rotation and scale, 0 if one of them is the
    same for all tokens, and near 1 if there are fewer tokens than features. Source: Kornblith et al. 2019."""
    values: FloatArray
    """``[A, B]``, float64. NaN for a divergence without a query to count."""
    ran: Ran


class RecordingSimilarityRequest(WireModel):
    """Ask for the similarity of every pair of recorded heads or layers, of one recording or of two.

    Two recordings must have the same tokens, as those of two models, of two versions, or of a model with and without
    edits.
    """

    tensor: ComparedTensor = "weights"
    """The tensor to compare. ``weights`` of every head are compared by their divergence; ``context``, ``q``, ``k`` and
    ``v`` of every head, and ``output`` and ``hidden`` of every layer, by CKA."""
    layers: Listed[LayerName] | None = Field(default=None, min_length=1, max_length=4096)
    """The layers to compare, such as ``layers.0``; default: all with this tensor."""
    with_: RecordingId | None = Field(default=None, alias="with")
    """The recording to compare with; default: the same one."""
    with_layers: Listed[LayerName] | None = Field(default=None, min_length=1, max_length=4096)
    """The layers of the other recording; default: ``layers``."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""

    @model_validator(mode="after")
    def _other_layers(self) -> Self:
        if self.with_layers is not None and self.with_ is None:
            raise at_fault("with_layers", "they are layers of the recording in with, and there is none; send with")
        return self


class ComparedPart(WireModel):
    """One head, or one layer."""

    layer: LayerName
    head: str | None = None
    """The head's label; null for a whole layer. Of ``k`` and ``v``, the number of a key/value head."""


class RecordingSimilarity(SimilarityReply):
    """The similarity of every pair of recorded heads or layers."""

    id: RecordingId
    """The recording of ``rows``."""
    with_: RecordingId = Field(alias="with")
    """The recording of ``columns``."""
    rows: list[ComparedPart]
    """A heads or layers."""
    columns: list[ComparedPart]
    """B heads or layers."""
    tokens: int
    """The number of queries or tokens that were compared."""


EXAMPLE_SIMILARITY: Final[dict[str, Any]] = {"a": [[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]]}
"""The weights of two heads over two tokens."""
