"""Attention weights and their statistics. Notation as in ``attention``."""

from typing import Annotated, Any, ClassVar, Final, Literal, Protocol

from pydantic import Discriminator, Field, Tag, model_validator

from attention_contract.arrow_tables import TableRows
from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.attention import AttentionInputs, Edit, Ran, RawInputs, TokenLabels, WeightsSelect
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.tensors import BoolArray, FloatArray, IntArray

StatisticName = Literal[
    "entropy", "effective_keys", "max_weight", "mean_distance", "signed_distance", "locality", "first_key",
    "sink_share", "own_position", "previous_token", "next_token", "duplicate_token", "induction", "alignment",
    "retrieval", "classes", "sink_mass", "chosen_share", "received", "pairs",
]  # fmt: skip
"""The statistics of a head."""
OF_SOME_ATTENTIONS: Final = frozenset({"sink_mass", "chosen_share"})
"""The statistics of attentions that have a learned sink, or that choose keys."""
NEEDS_NEEDLE: Final = frozenset({"retrieval"})
"""The statistics of a needle in a text."""
NEEDS_PAIRS: Final = frozenset({"pairs"})
"""The statistics of given pairs of a query and a key."""
BY_KEY: Final = frozenset({"received"})
"""The statistics with a number for each key: ``[B, H, Lk]``, where others are ``[B, H]``."""
MAX_PAIRS: Final = 2**16
"""The most pairs of one text, and the most candidates."""
MAX_LISTS: Final = 1024
"""The most texts with lists of their own."""
MAX_CLASSES = 64
"""The most classes of tokens in one request."""
ClassName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^.]*$")]
PairsOfText = Annotated[Listed[tuple[Index, Index]], Field(min_length=1, max_length=MAX_PAIRS)]
"""Pairs of the index of a query and that of a key."""
CandidatesOfText = Annotated[Listed[Index], Field(min_length=1, max_length=MAX_PAIRS)]
"""Indices of keys."""


def _by_depth(of_text: int) -> Discriminator:
    """Tell the lists of one text, which are in each other so many times, from a list of them by text."""

    def tag(value: Any) -> str:
        depth = 0
        while isinstance(value, list | tuple) and value:
            value, depth = value[0], depth + 1
        return "texts" if depth > of_text else "text"

    return Discriminator(tag)


PairsByText = Annotated[
    Annotated[PairsOfText, Tag("text")]
    | Annotated[list[PairsOfText], Field(min_length=1, max_length=MAX_LISTS), Tag("texts")],
    _by_depth(2),
]
"""Pairs of each text, or of all."""
CandidatesByText = Annotated[
    Annotated[CandidatesOfText, Tag("text")]
    | Annotated[list[CandidatesOfText], Field(min_length=1, max_length=MAX_LISTS), Tag("texts")],
    _by_depth(1),
]
"""Candidates of each text, or of all."""
Normalization = Literal["absolute", "apc"]
"""``absolute``: the statistics are those of the shares |w| / Σ|w| of each query. ``apc``: all that is returned is of
A = w + wᵀ with the average product correction A − (row sums · column sums) / sum. Source: Dunn et al. 2008."""


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
    pairs: PairsByText | None = None
    """The ``[query, key]`` of ``pairs``, as indices among the queries and among the keys: a list for each text, or one
    list for all."""
    candidates: CandidatesByText | None = None
    """The keys among which ``pairs`` looks for the first of a query: a list for each text, or one list for all.
    Default: all keys."""


class _NarrowedWeights(Protocol):
    @property
    def select(self) -> WeightsSelect | None: ...
    @property
    def return_weights(self) -> bool: ...
    @property
    def average_heads(self) -> bool: ...
    @property
    def top_k(self) -> int: ...
    @property
    def pool(self) -> int | None: ...


def check_narrowing(request: _NarrowedWeights) -> None:
    """Raise an error of validation for a request for weights that narrows or averages nothing that is returned."""
    if request.average_heads and not request.return_weights:
        raise at_fault("average_heads", "it averages returned weights; leave return_weights or it out")
    if request.select is not None and not (request.return_weights or request.top_k or request.pool):
        raise at_fault(
            "select", "it narrows returned weights, top_k and pool, and the statistics cover all; leave it out"
        )
    if request.pool is not None and request.select is not None and request.select.keys is not None:
        raise at_fault("pool", "it makes squares of all keys; leave it or the keys of select out")


class WeightsRequest(TokenLabels, AttentionInputs):
    """Ask for the attention weights of each head."""

    edits: Listed[Edit] = Field(default_factory=list, max_length=256)
    """Applied in the order of the taps, then in the order given; the weights, their statistics and the top keys are
    those after the edits."""
    top_k: int = Field(default=0, ge=0, le=1024)
    """The number of most attended keys to name for each query, at most the number of keys; 0 for none."""
    select: WeightsSelect | None = None
    """Return the weights of these heads, queries and keys. ``top_k`` covers the same selection, and names keys by their
    index among all; ``pool`` takes no selected keys; the statistics cover all."""
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
    weights without ``normalize``, and with ``apc``, max_weight alone."""
    statistic_options: StatisticOptions = Field(default_factory=StatisticOptions)
    """Options and further inputs of those statistics, each read by the statistics that need it."""
    normalize: Normalization | None = None
    """``absolute``: compute the statistics of the shares |w| / Σ|w| of each query. All statistics but ``max_weight``,
    ``received`` and ``pairs`` need it for implicit weights, which may be negative and do not sum to 1. ``apc``: return
    everything of A = w + wᵀ, less row sums · column sums / sum of all A, over the real queries; the statistics are
    those three. It needs queries and keys that are the same tokens, and sets the rows and columns of padding to 0.
    Source: Dunn et al. 2008; Rao et al. 2021."""
    compare: Literal["unedited"] | None = None
    """``unedited``: return ``differences`` too, the results after the edits minus those without them."""

    @model_validator(mode="after")
    def _narrows_something(self) -> "WeightsRequest":
        check_narrowing(self)
        if self.normalize == "absolute" and self.statistics == []:
            raise at_fault("normalize", "it is of the statistics, and none are asked; leave it or statistics out")
        return self


class RawWeightsRequest(RawInputs, WeightsRequest):
    """Ask for the attention weights of each head of raw attention."""


class HeadStatistics(WireModel):
    """Means over the real queries, for each head: ``[B, H]``, but of ``received``. NaN for a sequence without one.

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
    """The mean over pairs of queries, i' before i, of P(i looks at a later key than i') − P(i looks at an earlier one),
    where each looks at one key that is drawn by its shares. 1 for a head whose every query looks at later keys than the
    queries before it, as one that follows a sound in time; 0 if all look at the same keys; −1 for a head that goes
    back. NaN for a single query.
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
    received: IfRequested[FloatArray] = ABSENT
    """``[B, H, Lk]``: for each key, the mean of its weights, as they are, over the real queries that may see it. NaN
    for a key that none of them may see. Where the masks are not known, as of a recording or a model that computes its
    attention itself, they are the queries that give it a weight. Source: Gu et al. 2025, α of a key."""
    pairs: IfRequested[dict[str, FloatArray]] = ABSENT
    """Means over the given pairs of a query q and a key k. ``share``: w[q, k], as it is. ``first``: the share of the
    pairs whose key has the largest weight of its query among the candidates, the first of equal ones, and not 0.
    ``swapped_share`` and ``swapped_first``: those of the pairs (k, q); if there are candidates, those of k are the
    queries of the text's pairs. ``both_share`` and ``both_first``: those of the pairs (q, k) with w + wᵀ in place of w.
    These four are NaN where queries and keys are not the same tokens. A query that is not real has weights of 0."""


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

    picture_names: ClassVar = frozenset({"labels", "query_labels", "heads"})

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

    def to_table(self) -> Any:
        """Return the statistics as a ``pyarrow.Table``: a row for each text and head. Needs the extra ``tables``.

        Columns: ``text`` and ``head`` are numbers; a column for each statistic, as in ``classes.names`` for a class,
        ``differences.entropy`` with ``compare``, and lists by key for ``received``. Raises ImportError.
        """
        rows = TableRows()
        differences = None if self.differences is None else self.differences.statistics
        rows.add_heads({"text": 0}, {"": self.statistics, "differences.": differences}, BY_KEY)
        return rows.table()
