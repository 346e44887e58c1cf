"""Attention weights and their statistics. Notation as in ``attention``."""

from pydantic import Field

from attention_contract.base import ABSENT, Asked, Listed, WireModel
from attention_contract.schemas.attention import AttentionInputs, Edit, Ran, RawInputs, Select
from attention_contract.tensors import BoolArray, FloatArray, IntArray


class WeightsRequest(AttentionInputs):
    """Ask for the attention weights of each head."""

    edits: Listed[Edit] = Field(default_factory=list, max_length=256)
    """Applied in the order of the taps, then in the order given; the weights, their statistics and the top keys are
    those after the edits."""
    top_k: int = Field(default=0, ge=0, le=1024)
    """The number of most attended keys to name for each query, at most the number of keys; 0 for none."""
    select: Select | None = None
    """Return the weights of these heads and queries. ``top_k`` covers the same selection; the statistics cover all."""
    return_weights: bool = True
    """False leaves the weights themselves out and gives statistics and top keys only."""
    average_heads: bool = False
    """Return the weights averaged over the (selected) heads, without the head dimension."""
    query_mask: BoolArray | None = None
    """``[B, Lq]``, true for a real query. Default: in self-attention (as many queries as new keys) the queries whose
    own key is real; otherwise all. A query that may look nowhere is never counted."""


class RawWeightsRequest(RawInputs, WeightsRequest):
    """Ask for the attention weights of each head of raw attention."""


class HeadStatistics(WireModel):
    """Means over the real queries, for each head: ``[B, H]``. NaN for a sequence without a real query.

    All but ``max_weight`` are of the shares w / Σ w, which are the weights themselves where those sum to 1, as they do
    unless the spec uses sinks or a sigmoid.
    """

    entropy: FloatArray
    """−Σ p ln p of the shares p, in nats."""
    max_weight: FloatArray
    """The largest weight of a query, as it is."""
    mean_distance: FloatArray
    """Σ p · |i + offset − j| of the shares p: how far away a head looks, in tokens."""
    first_key: FloatArray
    """The share of the first key."""
    own_position: FloatArray
    """The share of the key at the query's own position, i + offset; queries that have none there count 0."""


class TopKeys(WireModel):
    """The most attended keys, the largest weight first."""

    keys: IntArray
    """``[B, H, Lq, k]``: positions among the keys; −1 where no further key has weight."""
    weights: FloatArray
    """``[B, H, Lq, k]``"""


class WeightsReply(WireModel):
    """The attention weights of each head."""

    statistics: HeadStatistics
    queries: IntArray
    """``[B]``: how many real queries the statistics are over."""
    top: Asked[TopKeys] = ABSENT
    weights: Asked[FloatArray] = ABSENT
    """``[B, H, Lq, Lk]`` of the selected heads and queries, or ``[B, Lq, Lk]`` averaged over heads."""
    ran: Ran
