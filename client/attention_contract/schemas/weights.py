"""Attention weights and their statistics. Notation as in ``attention``."""

from typing import Annotated, Final, Literal

from pydantic import Field

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel
from attention_contract.schemas.attention import AttentionInputs, Edit, Ran, RawInputs, Select, TokenLabels
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.tensors import BoolArray, FloatArray, IntArray

StatisticName = Literal[
    "entropy", "effective_keys", "max_weight", "mean_distance", "signed_distance", "locality", "first_key",
    "sink_share", "own_position", "previous_token", "next_token", "duplicate_token", "induction", "alignment",
    "retrieval", "classes", "sink_mass", "chosen_share",
]  # fmt: skip
"""The statistics of a head."""
OF_SOME_ATTENTIONS: Final = frozenset({"sink_mass", "chosen_share"})
"""The statistics of attentions that have a learned sink, or that choose keys."""
NEEDS_NEEDLE: Final = frozenset({"retrieval"})
"""The statistics of a needle in a text."""
MAX_CLASSES = 64
"""The most classes of tokens in one request."""
ClassName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^.]*$")]


Normalization = Literal["absolute"]
"""``absolute``: the statistics are those of the shares |w| / Σ|w| of each query."""


class StatisticOptions(WireModel):
    """Options and further inputs of the statistics."""

    window: int = Field(default=8, ge=0, lt=2**31)
    """Tokens to each side that ``locality`` counts."""
    sinks: int = Field(default=1, ge=0, lt=2**31)
    """First keys that ``sink_share`` counts."""
    tokens: IntArray | None = None
    """``[B, Lk]`` or ``[Lk]``: the token id of each key, the past included. ``duplicate_token``, ``induction``,
    ``retrieval`` and ``token_classes`` need it."""
    query_tokens: IntArray | None = None
    """``[B, Lq]`` or ``[Lq]``: the token id of each query. Default: the token id of the key at the query's position i +
    offset; a query without such a key matches no key."""
    classes: dict[ClassName, BoolArray] = Field(default_factory=dict, max_length=MAX_CLASSES)
    """``[B, Lk]`` or ``[Lk]`` by name: true for the keys of a class."""
    token_classes: dict[ClassName, Listed[int]] = Field(default_factory=dict, max_length=MAX_CLASSES)
    """Token ids by name: the class has the keys with one of these tokens."""
    needle: BoolArray | None = None
    """``[B, Lk]`` or ``[Lk]``: true for the keys that ``retrieval`` counts."""
    next_tokens: IntArray | None = None
    """``[B, Lq]`` or ``[Lq]``: the token id after each query, for ``retrieval``; one that no key has leaves the query
    out. Default: the token id of the key at position i + offset + 1; a query without such a key copies nothing."""


class WeightsRequest(TokenLabels, AttentionInputs):
    """Ask for the attention weights of each head."""

    edits: Listed[Edit] = Field(default_factory=list, max_length=256)
    """Applied in the order of the taps, then in the order given; the weights, their statistics and the top keys are
    those after the edits."""
    top_k: int = Field(default=0, ge=0, le=1024)
    """The number of most attended keys to name for each query, at most the number of keys; 0 for none."""
    select: Select | None = None
    """Return the weights of these heads and queries. ``top_k`` covers the same selection; the statistics cover all."""
    return_weights: bool = True
    """False omits the weights; the reply then has only statistics and top keys."""
    pool: int | None = Field(default=None, ge=2, lt=2**31)
    """With n, return ``pooled``: the largest weight of each square of n selected queries and n keys. If
    ``return_weights`` is false too, the weights of long sequences are never in memory at once."""
    average_heads: bool = False
    """Return the weights averaged over the (selected) heads, without the head dimension."""
    query_mask: BoolArray | None = None
    """``[B, Lq]``, true for a real query. Default: in self-attention (as many queries as new keys) the queries whose
    own key is real; otherwise all. A query that may look nowhere is never counted."""
    statistics: Listed[StatisticName] | None = Field(default=None, max_length=64)
    """The statistics to return. Default: entropy, max_weight, mean_distance, first_key and own_position; of implicit
    weights without ``normalize``, max_weight alone."""
    statistic_options: StatisticOptions = Field(default_factory=StatisticOptions)
    """Options and further inputs of those statistics."""
    normalize: Normalization | None = None
    """``absolute``: compute the statistics of the shares |w| / Σ|w| of each query. All statistics but ``max_weight``
    need it for implicit weights, which may be negative and do not sum to 1."""
    compare: Literal["unedited"] | None = None
    """``unedited``: return ``differences`` too, the results after the edits minus those without them."""


class RawWeightsRequest(RawInputs, WeightsRequest):
    """Ask for the attention weights of each head of raw attention."""


class HeadStatistics(WireModel):
    """Means over the real queries, for each head: ``[B, H]``. NaN for a sequence without a real query.

    All but ``max_weight`` are of the shares p = w / Σ w, which are the weights themselves where those sum to 1, as they
    do unless the spec uses sinks or a sigmoid. With ``normalize``, all are of the shares |w| / Σ|w|. The position of
    query i is i + offset. Distances are in tokens, and means over the keys that have a position, as not all keys of a
    whole model's layer may.
    """

    entropy: IfRequested[FloatArray] = ABSENT
    """−Σ p ln p of the shares p, in nats. Source: Clark et al. 2019."""
    max_weight: IfRequested[FloatArray] = ABSENT
    """The largest weight of a query, as it is. Source: Voita et al. 2019."""
    mean_distance: IfRequested[FloatArray] = ABSENT
    """Σ p · |i + offset − j| of the shares p: how far away a head looks, in tokens. Source: Vig and Belinkov 2019."""
    first_key: IfRequested[FloatArray] = ABSENT
    """The share of the first key. Source: Xiao et al. 2024."""
    own_position: IfRequested[FloatArray] = ABSENT
    """The share of the key at the query's own position, i + offset; queries that have none there count 0."""
    effective_keys: IfRequested[FloatArray] = ABSENT
    """exp(−Σ p ln p): the number of keys of a uniform row with this entropy. Source: Hill 1973, order 1."""
    signed_distance: IfRequested[FloatArray] = ABSENT
    """Σ p · (j − i − offset): negative for a head that looks back."""
    locality: IfRequested[FloatArray] = ABSENT
    """Σ p · [|j − i − offset| ≤ window]. Source: Beltagy et al. 2020, sliding windows."""
    sink_share: IfRequested[FloatArray] = ABSENT
    """Σ p · [j < sinks]: the share of the first keys. Source: Xiao et al. 2024."""
    previous_token: IfRequested[FloatArray] = ABSENT
    """The share of the key before the query's position. Source: Voita et al. 2019, positional heads."""
    next_token: IfRequested[FloatArray] = ABSENT
    """The share of the key after the query's position. Source: Voita et al. 2019, positional heads."""
    duplicate_token: IfRequested[FloatArray] = ABSENT
    """The share of the keys before the query that have its token. Source: Wang et al. 2023."""
    induction: IfRequested[FloatArray] = ABSENT
    """The share of the keys right after a key before the query that has its token. Source: Olsson et al. 2022."""
    alignment: IfRequested[FloatArray] = ABSENT
    """The mean over pairs of queries, i' before i, of P(i looks behind i') − P(i looks before i'), where each looks at
    one key that is drawn by its shares. 1 for a head whose every query looks behind the earlier ones, as one that
    follows a sound in time; 0 if all look at the same keys; −1 for a head that goes back. NaN for a single query.
    Source: Somers 1962, D of the key on the query."""
    classes: IfRequested[dict[str, FloatArray]] = ABSENT
    """The share of the keys of each class, by name. Source: Clark et al. 2019, attention to separators."""
    sink_mass: IfRequested[FloatArray] = ABSENT
    """1 − Σ w: the weight that a softmax with learned sinks gives to the sink of the head. NaN for a layer of a model
    without one. Refused beside an edit of ``weights``. Source: Agarwal et al. 2025."""
    chosen_share: IfRequested[FloatArray] = ABSENT
    """Σ p over the keys that an indexer chose, p the weights of the same attention without the choice. Only layers of
    whole models choose keys; NaN for one that does not. Source: DeepSeek-AI 2025, DeepSeek-V3.2."""
    retrieval: IfRequested[FloatArray] = ABSENT
    """The share of the needle's keys that are copied, each counted once. A query copies its most attended key if that
    key has the token after the query. No mean over queries; NaN without a key of the needle. Source: Wu et al. 2024."""


class TopKeys(WireModel):
    """The most attended keys, the largest weight first."""

    keys: IntArray
    """``[B, H, Lq, k]``: positions among the keys; −1 where no further key has weight, as where fewer than k are
    visible. Where the weights are NaN the positions mean nothing."""
    weights: FloatArray
    """``[B, H, Lq, k]``; NaN as in ``weights`` of the reply."""


class WeightsDifferences(WireModel):
    """Results after the edits minus those without them."""

    statistics: HeadStatistics
    weights: IfRequested[FloatArray] = ABSENT
    """In the shape of the reply's ``weights``, where those are returned."""
    pooled: IfRequested[FloatArray] = ABSENT
    """In the shape of the reply's ``pooled``: the difference of largest magnitude of each square, with its sign."""


class WeightsReply(DrawableReply):
    """The attention weights of each head."""

    statistics: HeadStatistics
    queries: IntArray
    """``[B]``: the number of real queries in the statistics."""
    implicit: IfRequested[bool] = ABSENT
    """True for the weights of a running state (method ``linear``): the matrix M for which M·V is the context of an
    empty state. They may be negative and need not sum to 1. The top keys, and the squares of ``pooled``, are then those
    of the largest magnitude, with their signs."""
    top: IfRequested[TopKeys] = ABSENT
    weights: IfRequested[FloatArray] = ABSENT
    """``[B, H, Lq, Lk]`` of the selected heads and queries, or ``[B, Lq, Lk]`` averaged over heads. An infinity or NaN
    in a key, or in its value, makes the weights of the queries that may look at it NaN; a sigmoid's at that key alone.
    """
    pooled: IfRequested[FloatArray] = ABSENT
    """``[B, H, ⌈Lq / pool⌉, ⌈Lk / pool⌉]`` of the selected heads and queries, with ``pool``."""
    differences: IfRequested[WeightsDifferences] = ABSENT
    """The effect of the edits, with ``compare``."""
    ran: Ran
