"""Rollout and flow: where the state of a token comes from, over several layers of self-attention.

Notation for shapes: N layers, H heads, L tokens.
"""

from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from attention_contract.base import Listed, WireModel
from attention_contract.exact_types import Index
from attention_contract.schemas.attention import MAX_INDICES, MAX_LABELS, Ran, TokenLabel
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.schemas.recordings import Label, LayerName, RecordingId
from attention_contract.tensors import Encoding, FloatArray

RolloutMethod = Literal["rollout", "flow"]
SentMethod = Literal["rollout", "flow", "relevance"]
CombinedHeads = Literal["mean", "max", "min"]


class RolloutOptions(WireModel):
    """The options of a rollout, a flow, and accumulated relevance.

    Rollout and flow take each layer as M = residual · I + (1 − residual) · A, where A are the weights of its heads in
    one, each row divided by its sum. A token that attends to nothing keeps its own state.
    """

    method: SentMethod = "rollout"
    """``rollout``: the product of all M. ``flow``: the maximum flow from a token of the last layer to each input, where
    every edge carries at most its entry of M. Source: Abnar and Zuidema 2020. ``relevance``: R ← R + relevance · R from
    R = I, where the relevance of a layer is the mean over its heads of the positive part of what is sent; ``combine``,
    ``residual`` and ``discard`` have no part in it. Source: Chefer et al. 2021, eqs. 5 and 6."""
    combine: CombinedHeads = "mean"
    """The weights of a layer: the mean, the largest or the smallest of its heads."""
    residual: float = Field(default=0.5, ge=0, le=1, allow_inf_nan=False)
    """The share of the residual connection."""
    discard: float = Field(default=0.0, ge=0, lt=1, allow_inf_nan=False)
    """Drop this share of the positive weights in each row of A, the smallest first. Source: Gildenblat 2020, who drops
    a share of the whole matrix."""
    queries: Listed[Index] | None = Field(default=None, min_length=1, max_length=MAX_INDICES)
    """The tokens of the last layer to trace back; default: all. A flow takes a long time for each token."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""


class RolloutRequest(RolloutOptions):
    """Ask for the rollout or the flow of weights that are sent."""

    weights: FloatArray
    """``[N, H, L, L]``, or ``[N, L, L]`` of one head; the first layer first. Method ``relevance`` takes the
    ``relevance`` or the ``gradient_attention`` of an attribution to each layer, which may be negative."""
    labels: Listed[TokenLabel] | None = Field(default=None, max_length=MAX_LABELS)
    """A label for each of the L tokens, for a picture."""


class RolloutReply(DrawableReply):
    """The share, or the flow, that each token of the last layer has from each input."""

    picture_names: ClassVar = frozenset({"labels", "query_labels"})

    values: FloatArray
    """``[queries, L]``, float64. The rows of a rollout sum to 1; a flow is at most 1 to each input; relevance is not
    bounded."""
    ran: Ran


class RecordingRolloutRequest(RolloutOptions):
    """Ask for the rollout or the flow of recorded weights."""

    method: RolloutMethod = "rollout"
    """``rollout`` or ``flow``, as in ``RolloutOptions``."""
    layers: Listed[LayerName] | None = Field(default=None, min_length=1, max_length=4096)
    """The attentions to go through, in the order of the model; default: all self-attention of the first stack."""


class RecordingRollout(RolloutReply):
    """The rollout or the flow of recorded weights."""

    picture_names: ClassVar = frozenset[str]()  # it names its tokens itself

    id: RecordingId
    layers: list[LayerName]
    """The attentions in the rollout, in order."""
    tokens: list[Label]
    """The labels of the L inputs."""
    unseen: dict[LayerName, Label] = Field(default_factory=dict)
    """The layers of this stack that also mix tokens, but whose weights are not recorded, with the reason: what passes
    through them has no part in ``values``."""


EXAMPLE_ROLLOUT: Final[dict[str, Any]] = {"weights": [[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [1.0, 0.0]]]}
"""Two layers of one head over two tokens."""
