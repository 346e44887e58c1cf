"""Statistics of attention weights by head: one table of formulas over tiles of weights.

Notation as in ``core.problem``; R are the queries of one tile. The shares of a query are p = w / Σ w. The position of
query i is i + offset, and key j has position j; ``key_positions`` are those of keys that stand for something else.
Rows are added up in the dtype of the weights, at least float32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_contract.spec import AttentionSpec

Formula = Callable[["WeightTile"], Tensor]
"""A statistic of each query of a tile, ``[B, H, R]``."""
HEAD_STATISTICS: Final[dict[str, Formula]] = {}
"""The statistics that every attention has, by name. A new one is one entry."""
DEFAULT_STATISTICS: Final = ("entropy", "max_weight", "mean_distance", "first_key", "own_position")
RECEIVED: Final = "received"
"""The statistic with a number for each key."""
PAIRS: Final = "pairs"
"""The statistic of given pairs of a query and a key."""
SIGNED_STATISTICS: Final = frozenset({"max_weight", RECEIVED, PAIRS})
"""The statistics of weights that are no distribution."""
TOKEN_STATISTICS: Final = frozenset({"duplicate_token", "induction", "retrieval"})
"""The statistics that compare tokens."""
PAIR_STATISTICS: Final = frozenset({"alignment"})
"""The statistics that compare queries: sums over the earlier queries, whose means are over pairs of queries."""
_FEW_NEAR: Final = 16
"""Keys are near where so many times the window is less than all keys."""
CLASS_SHARES: Final = "classes"
"""The statistic with one value for each class of keys."""
RETRIEVAL: Final = "retrieval"
"""The statistic of the keys that the queries of a text copy together: no mean over queries."""


@dataclass(frozen=True)
class GivenPairs:
    """Pairs of a query and a key, P of the text with the most, of D different queries.

    Those of a text with fewer are filled up with −1, and its different queries with −1.
    """

    queries: Tensor
    """``[B, P]``"""
    keys: Tensor
    """``[B, P]``"""
    different: Tensor
    """``[B, D]``: the different queries."""
    places: Tensor
    """``[B, P]``: the place of each pair's query among them; 0 where there is no pair."""
    same_tokens: bool
    """True if query i and key i are the same token."""
    candidates: Tensor | None = None
    """Bool ``[B, K]``: the keys that may be the first of a query; None for all."""
    swapped_candidates: Tensor | None = None
    """Bool ``[B, K]``: the keys that may be the first of a swapped pair's query; None for all."""
    as_given: bool = False
    """True to tell of the pairs as they are given alone."""

    def of_real_keys(self, real: Tensor | None) -> "GivenPairs":
        """Return those whose candidates are real keys. ``real``: bool ``[B, K]``; None for all."""
        if real is None:
            return self
        given, swapped = (
            real if x is None else pad(x, (0, real.shape[1] - x.shape[1])) & real
            for x in (self.candidates, self.swapped_candidates)
        )
        return replace(self, candidates=given, swapped_candidates=swapped)

    @classmethod
    def of_single_queries(
        cls, keys: Sequence[Sequence[int]], candidates: Sequence[int] | None, count: int, device: torch.device
    ) -> "GivenPairs":
        """Return those of texts of whose queries one is told of: its ``keys`` by text. ``count``: all keys, K."""
        most = max(map(len, keys))
        filled = torch.tensor([[*own, *[-1] * (most - len(own))] for own in keys], dtype=torch.long, device=device)
        queries = torch.where(filled < 0, -1, 0)
        chosen = None
        if candidates is not None:
            chosen = torch.zeros(len(keys), count, dtype=torch.bool, device=device)
            chosen[:, [key for key in candidates if key < count]] = True
        different = torch.zeros(len(keys), 1, dtype=torch.long, device=device)
        return cls(
            queries, filled, different, torch.zeros_like(queries), same_tokens=False, candidates=chosen, as_given=True
        )


@dataclass(frozen=True)
class StatisticInputs:
    """The inputs of statistics beside the weights."""

    window: int = 8
    sinks: int = 1
    tokens: Tensor | None = None
    """``[B, K]``: the token of each key."""
    query_tokens: Tensor | None = None
    """``[B, Q]``: the token of each query."""
    classes: Mapping[str, Tensor] = field(default_factory=dict)
    """Bool ``[B, K]`` by name: the keys of a class."""
    starts: Tensor | None = None
    """``[B]``: the first key of each sequence that is no padding; None for key 0."""
    key_positions: Tensor | None = None
    """``[K]``: the position of each key, first of those with position j; NaN for a key of another text; None for j."""
    able: frozenset[str] = frozenset()
    """The statistics of ``OF_SOME`` that the attention has."""
    chosen: Tensor | None = None
    """Bool ``[B, Q, K]``: the keys that a choice keeps; None without a choice."""
    needle: Tensor | None = None
    """Bool ``[B, K]``: the keys that ``retrieval`` counts."""
    next_tokens: Tensor | None = None
    """``[B, Q]``: the token after each query."""
    absolute: bool = False
    """True for statistics of the shares |w| / Σ|w|."""
    pairs: GivenPairs | None = None

    @cached_property
    def tokens_first(self) -> int | None:
        """The number of keys with position j, which come first; None for all."""
        places = self.key_positions
        return None if places is None else int((places == torch.arange(len(places), device=places.device)).sum())

    def queries(self, rows: slice | list[int]) -> "StatisticInputs":
        """The inputs of these queries."""
        by_query = {name: getattr(self, name) for name in ("query_tokens", "chosen", "next_tokens")}
        return replace(self, **{name: x[:, rows] for name, x in by_query.items() if x is not None})


@dataclass(frozen=True)
class WeightTile:
    """The weights of some queries, with what the formulas share."""

    weights: Tensor
    """``[B, H, R, K]`` in float32 or float64."""
    positions: Tensor
    """``[B, R]``"""
    inputs: StatisticInputs = field(default_factory=StatisticInputs)
    logs: Tensor | None = None
    """ln w of a softmax, if they were computed on the way to the weights; finite where w is 0."""
    signed_weights: bool = False
    """True for implicit weights as they are."""
    counted: Tensor | None = None
    """Bool ``[B, R]``: the real queries; None for all."""
    sums: Tensor | None = None
    """``[B, H, K]``: the shares of the real queries of earlier tiles, added up; None if there are none."""
    visible: Tensor | None = None
    """Bool, broadcastable to ``[B, H, R, K]``: the keys that a query may see; None for all."""
    first: int = 0
    """The index of the tile's first query."""

    @cached_property
    def total(self) -> Tensor:
        """Σ w ``[B, H, R]``; 0 for a query without weights."""
        if self.logs is not None:
            return (self.largest > 0).to(self.weights.dtype)
        return self.weights.sum(-1)

    @cached_property
    def largest(self) -> Tensor:
        """Max w ``[B, H, R]``; 0 without keys."""
        return self.weights.amax(-1) if self.weights.shape[-1] else self.weights.sum(-1)

    @cached_property
    def looking(self) -> Tensor:
        """Bool ``[B, H, R]``: True for a query that has a positive weight, or of implicit weights one besides 0."""
        if self.signed_weights:
            return (self.weights != 0).any(-1)
        if self.weights.device.type == "cpu" and not bool(self.largest.isnan().any()):
            return self.largest > 0
        return (self.weights > 0).any(-1)

    @cached_property
    def shares(self) -> Tensor:
        """The shares p ``[B, H, R, K]``; zeros for a query that does not count or has no weights."""
        real = self.looking if self.counted is None else self.looking & self.counted[:, None]
        return torch.where(real[..., None], self.weights / self.total[..., None], 0)

    @cached_property
    def signed(self) -> Tensor:
        """J − i − offset ``[B, 1, R, K]``: negative for keys before the query."""
        keys: Tensor | None = self.inputs.key_positions
        if keys is None:
            keys = torch.arange(self.weights.shape[-1], dtype=self.weights.dtype, device=self.weights.device)
        keys = keys[: self.weights.shape[-1]].to(self.weights.dtype)
        return keys - self.positions[:, None, :, None]

    @cached_property
    def earlier_tokens(self) -> Tensor:
        """Bool ``[B, 1, R, K]``: the keys before the query that have the query's token."""
        if self.inputs.tokens is None or self.inputs.query_tokens is None:
            raise TypeError("the statistic needs tokens; binding refuses the request")
        equal = self.inputs.query_tokens[:, None, :, None] == self.inputs.tokens[:, None, None, :]
        equal = pad(equal, (0, self.weights.shape[-1] - equal.shape[-1]))
        return equal.logical_and(self.signed < 0)

    @cached_property
    def row_entropy(self) -> Tensor:
        """−Σ p ln p ``[B, H, R]``, in nats."""
        if self.logs is not None:
            return -torch.sum(self.weights * self.logs, -1)
        least = torch.finfo(self.weights.dtype).tiny  # 0 · ln 0 is 0
        logs = self.weights.clamp_min(least).log_()
        return self.total.log() - logs.mul_(self.weights).sum(-1) / self.total

    def share_at(self, distance: int) -> Tensor:
        """The share of the key at this signed distance from the query; 0 where there is none."""
        keys = self.token_keys
        places = (self.positions + distance)[:, None, :, None]  # [B, 1, R, 1]
        inside = (places >= 0) & (places < keys)
        if not keys:
            return self.total
        places = places.clamp(0, keys - 1).expand(*self.weights.shape[:3], 1)
        return torch.where(inside, self.weights.gather(-1, places), 0).squeeze(-1) / self.total

    def share_of_first(self, count: int) -> Tensor:
        """Sum the shares of the first keys of each sequence."""
        starts, keys = self.inputs.starts, self.token_keys
        if starts is None:
            return self.weights[..., : min(count, keys)].sum(-1) / self.total
        place = torch.arange(self.weights.shape[-1], device=starts.device)
        after = place - starts[:, None]  # [B, K]
        return self.share_of(((after >= 0) & (after < count) & (place < keys))[:, None, None])

    @property
    def token_keys(self) -> int:
        """The first keys, those with position j."""
        keys = self.weights.shape[-1]
        return keys if self.inputs.tokens_first is None else min(keys, self.inputs.tokens_first)

    def mean_of(self, distances: Tensor) -> Tensor:
        """Average distances ``[B, 1, R, K]`` over the keys that have one; 0 for a query that looks at none of them."""
        if self.inputs.key_positions is None:
            return self.share_of(distances)
        known = distances.isfinite()
        share = self.share_of(known)
        return torch.where(share > 0, self.share_of(torch.where(known, distances, 0)) / share, 0)

    def share_of(self, chosen: Tensor) -> Tensor:
        """Sum the shares of the chosen keys, bool or numbers broadcastable to ``[B, H, R, K]``."""
        if self.weights.shape[0] == 1 and chosen.shape[:2] == (1, 1):
            # As a matrix product: the weights are read once, and nothing of their size is written. Of several
            # sequences it would copy them.
            alike = chosen[0, 0].to(self.weights.dtype).expand(self.weights.shape[2:])  # of all heads
            return torch.einsum("bhrk,rk->bhr", self.weights, alike) / self.total
        return torch.sum(self.weights * chosen, -1) / self.total


def _register(formula: Formula) -> Formula:
    HEAD_STATISTICS[formula.__name__] = formula
    return formula


@_register
def entropy(tile: WeightTile) -> Tensor:
    """−Σ p ln p, in nats. Source: Clark et al. 2019."""
    return tile.row_entropy


@_register
def effective_keys(tile: WeightTile) -> Tensor:
    """exp(−Σ p ln p): the number of keys of a uniform row with this entropy. Source: Hill 1973, order 1."""
    return tile.row_entropy.exp()


@_register
def max_weight(tile: WeightTile) -> Tensor:
    """Max w. Source: Voita et al. 2019, confidence of a head."""
    return tile.largest


@_register
def mean_distance(tile: WeightTile) -> Tensor:
    """Σ p |j − i − offset|, in tokens. Source: Vig and Belinkov 2019."""
    return tile.mean_of(tile.signed.abs())


@_register
def signed_distance(tile: WeightTile) -> Tensor:
    """Σ p (j − i − offset), in tokens: negative for a head that looks back. Source: Vig and Belinkov 2019."""
    return tile.mean_of(tile.signed)


@_register
def locality(tile: WeightTile) -> Tensor:
    """Σ p [|j − i − offset| ≤ window]. Source: Beltagy et al. 2020, sliding windows."""
    window = tile.inputs.window
    if (
        tile.inputs.key_positions is None and _FEW_NEAR * window < tile.weights.shape[-1]
    ):  # the near keys are gathered, few of all
        return torch.stack([tile.share_at(distance) for distance in range(-window, window + 1)]).sum(0)
    return tile.share_of(tile.signed.abs() <= window)


@_register
def first_key(tile: WeightTile) -> Tensor:
    """The share of key 0. Source: Xiao et al. 2024."""
    return tile.share_of_first(1)


@_register
def sink_share(tile: WeightTile) -> Tensor:
    """Σ p [j < sinks]. Source: Xiao et al. 2024."""
    return tile.share_of_first(tile.inputs.sinks)


@_register
def own_position(tile: WeightTile) -> Tensor:
    """Σ p [j = i + offset]. Source: Clark et al. 2019."""
    return tile.share_at(0)


@_register
def previous_token(tile: WeightTile) -> Tensor:
    """Σ p [j = i + offset − 1]. Source: Voita et al. 2019, positional heads."""
    return tile.share_at(-1)


@_register
def next_token(tile: WeightTile) -> Tensor:
    """Σ p [j = i + offset + 1]. Source: Voita et al. 2019, positional heads."""
    return tile.share_at(1)


@_register
def duplicate_token(tile: WeightTile) -> Tensor:
    """Σ p [token j = token of i, j < i + offset]. Source: Wang et al. 2023, duplicate token heads."""
    return tile.share_of(tile.earlier_tokens)


@_register
def induction(tile: WeightTile) -> Tensor:
    """Σ p [token j − 1 = token of i, j − 1 < i + offset]. Source: Olsson et al. 2022."""
    return tile.share_of(pad(tile.earlier_tokens, (1, 0))[..., :-1])


@_register
def alignment(tile: WeightTile) -> Tensor:
    """Σ over earlier queries of P(key after theirs) − P(key before theirs). Source: Somers 1962, D of key on query."""
    earlier = tile.shares.cumsum(2) - tile.shares
    if tile.sums is not None:
        earlier += tile.sums[..., None, :]
    up_to = earlier.cumsum(-1)
    return torch.sum(tile.shares * (up_to.mul(2) - earlier), -1) - up_to[..., -1]


def sink_mass(tile: WeightTile) -> Tensor:
    """1 − Σ w, NaN without learned sinks. Source: Agarwal et al. 2025, 2.2."""
    total = tile.weights.sum(-1)
    return (1 - total).clamp_(min=0) if "sink_mass" in tile.inputs.able else torch.full_like(total, torch.nan)


def chosen_share(tile: WeightTile) -> Tensor:
    """Σ p [key j is chosen], of the weights without the choice; NaN without one. Source: DeepSeek-AI 2025."""
    if tile.inputs.chosen is None:
        return torch.full_like(tile.total, torch.nan)
    return tile.share_of(tile.inputs.chosen[:, None, :, : tile.weights.shape[-1]])


@dataclass(frozen=True)
class RareStatistic:
    """A statistic that some attentions, or some requests, lack."""

    needs: str
    """The need, as an error names it."""
    formula: Formula | None = None
    """None for one that is no mean over queries."""
    of_spec: Callable[[AttentionSpec], bool] | None = None
    """True for the spec of an attention that has it; None if it takes more than a spec, or a request."""
    spoiled_by: Mapping[str, str] = field(default_factory=dict)
    """The taps whose edits make it another number, with the reason."""


OF_SOME: Final[Mapping[str, RareStatistic]] = {
    "sink_mass": RareStatistic(
        "a softmax with learned sinks",
        sink_mass,
        lambda spec: getattr(spec.normalizer, "sinks", False),
        {"weights": "is 1 − Σ w, which an edit of weights changes without a change of the sink"},
    ),
    "chosen_share": RareStatistic("a layer of a whole model whose indexer chooses keys", chosen_share),
    RETRIEVAL: RareStatistic("a needle in a text and the whole answer to it, which a request for weights takes"),
    PAIRS: RareStatistic("given pairs of a query and a key, which requests for weights and for texts take"),
}
"""The statistics that some attentions lack, by name. NaN stands for one that is not there. A new one is one entry."""
EVERY_STATISTIC: Final[Mapping[str, Formula]] = HEAD_STATISTICS | {
    name: described.formula for name, described in OF_SOME.items() if described.formula is not None
}
"""Every statistic that is a mean over queries."""


def statistics_of(spec: AttentionSpec) -> frozenset[str]:
    """The statistics of ``OF_SOME`` that an attention of this spec has."""
    return frozenset(
        name for name, described in OF_SOME.items() if described.of_spec is not None and described.of_spec(spec)
    )


def absolute_shares(weights: Tensor) -> Tensor:
    """|w| / Σ|w| of each query; zeros for one without weights."""
    size = weights.abs()
    total = size.sum(-1, keepdim=True)
    return size / total.masked_fill(total == 0, 1)


def class_share(tile: WeightTile, name: str) -> Tensor:
    """Σ p [key j is of the class]. Source: Clark et al. 2019, attention to separators."""
    chosen = tile.inputs.classes[name]
    padded = pad(chosen, (0, tile.weights.shape[-1] - chosen.shape[-1]))
    return tile.share_of(padded[:, None, None])
