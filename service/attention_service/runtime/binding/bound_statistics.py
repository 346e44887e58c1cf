"""Statistics of a request for weights: their options and token ids, checked against the sizes."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit
from attention_contract.schemas.weights import (
    NEEDS_NEEDLE,
    Normalization,
    StatisticName,
    StatisticOptions,
)
from attention_contract.tensors import Array
from attention_service.core.inspection.statistics import (
    CLASS_SHARES,
    DEFAULT_STATISTICS,
    OF_SOME,
    PAIR_STATISTICS,
    PAIRS,
    SIGNED_STATISTICS,
    TOKEN_STATISTICS,
    StatisticInputs,
)
from attention_service.core.tensors import to_device
from attention_service.prompts.named_pairs import check_pairs_asked
from attention_service.runtime.binding.bound_pairs import BoundPairs, TextTokens, bind_pairs
from attention_service.runtime.binding.bound_request import wrong_shape

_AT = "statistic_options"
_BY_TEXT: Final = ("tokens", "query_tokens", "needle", "next_tokens")
"""The inputs with a row for each text."""


@dataclass(frozen=True)
class BoundStatistics:
    """The names of the statistics, and their inputs on the host."""

    names: tuple[str, ...] = DEFAULT_STATISTICS
    window: int = 8
    sinks: int = 1
    tokens: NDArray[np.int64] | None = None
    """``[B, K]``"""
    query_tokens: NDArray[np.int64] | None = None
    """``[B, Q]``"""
    classes: tuple[tuple[str, NDArray[np.bool_]], ...] = ()
    """``[B, K]`` each."""
    starts: NDArray[np.int64] | None = None
    """``[B]``: the first key that is no padding; None for key 0."""
    key_positions: NDArray[np.float64] | None = None
    """``[K]``: the positions of keys that are not all tokens of the queries' text; NaN for none, None for j."""
    able: frozenset[str] = frozenset()
    """The statistics of ``OF_SOME`` that the attention has."""
    needle: NDArray[np.bool_] | None = None
    """``[B, K]``"""
    next_tokens: NDArray[np.int64] | None = None
    """``[B, Q]``"""
    absolute: bool = False
    """True for statistics of the shares |w| / Σ|w|."""
    implicit: bool = False
    """True for weights that may be negative."""
    pairs: BoundPairs | None = None
    corrected: bool = False
    """True for w + wᵀ with the average product correction."""

    def repeated(self, times: int) -> "BoundStatistics":
        """Return those of a batch that is so many times this one."""
        if times == 1:
            return self
        rows: dict[str, Any] = {name: getattr(self, name) for name in _BY_TEXT}
        arrays: dict[str, Any] = {name: np.tile(x, (times, 1)) for name, x in rows.items() if x is not None}
        classes = tuple((name, np.tile(x, (times, 1))) for name, x in self.classes)
        starts = None if self.starts is None else np.tile(self.starts, times)
        pairs = None if self.pairs is None else self.pairs.repeated(times)
        return replace(self, classes=classes, starts=starts, pairs=pairs, **arrays)

    def inputs(self, device: torch.device, positions: torch.Tensor) -> StatisticInputs:
        """Copy them to the device. ``positions [B, Q]`` of the queries name their tokens if the request does not."""

        def placed(x: NDArray[Any] | None) -> torch.Tensor | None:
            return None if x is None else to_device(torch.from_numpy(x), device)

        tokens, queries, following = placed(self.tokens), placed(self.query_tokens), placed(self.next_tokens)
        classes = {name: to_device(torch.from_numpy(x), device) for name, x in self.classes}
        if tokens is not None and queries is None:
            queries = _tokens_at(tokens, positions)
        if tokens is not None and self.needle is not None and following is None:
            following = _tokens_at(tokens, positions + 1)
        return StatisticInputs(
            self.window, self.sinks, tokens, queries, classes, placed(self.starts), placed(self.key_positions),
            able=self.able, absolute=self.absolute,
            needle=placed(self.needle), next_tokens=following,
            pairs=None if self.pairs is None else self.pairs.on(device),
        )  # fmt: skip


def bind_statistics(
    names: Sequence[StatisticName] | None,
    options: StatisticOptions,
    *,
    batch: int,
    queries: int,
    keys: int,
    able: frozenset[str] = frozenset(),
    normalize: Normalization | None = None,
    implicit: bool = False,
    same_tokens: bool = False,
    texts: Sequence[TextTokens] | None = None,
    where: str = "",
) -> BoundStatistics:
    """Check the options of these statistics against the sizes.

    ``able``: those of ``OF_SOME`` that the attention has; ``implicit``: the weights may be negative; ``same_tokens``:
    query i and key i are the same token; ``texts``: the tokens of each text, where not all are; ``where``: the
    layer, for errors.

    Raises InvalidRequest for token ids or classes that are missing, for statistics that need a distribution, for pairs
    out of range and for a correction that there is not, and ShapeMismatch.
    """
    corrected = normalize == "apc"
    if corrected and (implicit or not same_tokens):
        why = "the weights are implicit" if implicit else "queries and keys are not the same tokens"
        raise InvalidRequest.at(
            "normalize", f"apc adds the transpose of the weights, and {why}{where}; leave it out, or the layer"
        )
    signed = corrected or (implicit and normalize is None)
    default = (
        DEFAULT_STATISTICS
        if not signed
        else tuple(statistic for statistic in DEFAULT_STATISTICS if statistic in SIGNED_STATISTICS)
    )
    chosen = default if names is None else tuple(dict.fromkeys(names))
    if signed:
        _check_signed(names or (), corrected=corrected)
    for name in chosen:
        if name in TOKEN_STATISTICS and options.tokens is None:
            raise InvalidRequest.at(
                f"{_AT}.tokens",
                f"the statistic {name} compares tokens; send the token id of each key, [{batch}, {keys}]",
            )
    if options.token_classes and options.tokens is None:
        raise InvalidRequest.at(
            f"{_AT}.tokens", f"token_classes holds token ids; send the token id of each key, [{batch}, {keys}]"
        )
    if CLASS_SHARES in chosen and not (options.classes or options.token_classes):
        raise InvalidRequest.at(f"{_AT}.classes", "the statistic classes has no class; send classes or token_classes")
    if options.needle is None and (needing := NEEDS_NEEDLE.intersection(chosen)):
        raise InvalidRequest.at(
            f"{_AT}.needle",
            f"the statistic {min(needing)} counts the keys of a needle; send true for each of them, [{batch}, {keys}]",
        )
    pairs = None
    if PAIRS in chosen or options.pairs is not None or options.candidates is not None:
        check_pairs_asked(options, asked=PAIRS in chosen)
        texts = texts or [TextTokens(range(queries), range(keys))] * batch
        pairs = bind_pairs(options, texts, keys, same_tokens=same_tokens, where=where)
    if both := options.classes.keys() & options.token_classes.keys():
        twice = min(both)
        raise InvalidRequest.at(f"{_AT}.token_classes", f"class {twice!r} is in classes too; name each class once")
    tokens = None if options.tokens is None else _fitted("tokens", options.tokens, batch, keys).astype(np.int64)
    rows, following = (
        None if x is None else _fitted(name, x, batch, queries).astype(np.int64)
        for name, x in (("query_tokens", options.query_tokens), ("next_tokens", options.next_tokens))
    )
    needle = None if options.needle is None else _fitted("needle", options.needle, batch, keys).astype(bool)
    classes = {name: _fitted(f"classes.{name}", x, batch, keys).astype(bool) for name, x in options.classes.items()}
    if tokens is not None:
        classes |= {name: np.isin(tokens, ids) for name, ids in options.token_classes.items()}
    named, absolute = tuple(classes.items()), normalize == "absolute"
    return BoundStatistics(
        chosen, options.window, options.sinks, tokens, rows, named,
        able=able, absolute=absolute, implicit=implicit, needle=needle, next_tokens=following,
        pairs=pairs, corrected=corrected,
    )  # fmt: skip


def _check_signed(names: Sequence[StatisticName], *, corrected: bool) -> None:
    """Raise InvalidRequest for a statistic of shares, where weights may be negative."""
    for index, name in enumerate(names):
        if name not in SIGNED_STATISTICS:
            raise InvalidRequest.at(
                f"statistics.{index}",
                f"{name} needs a distribution, and corrected weights may be negative; ask for max_weight, received or "
                "pairs, or leave normalize out"
                if corrected
                else f"{name} needs a distribution, and these weights are implicit: they may be negative and need not "
                'sum to one; send "normalize": "absolute" for shares of |w|, or leave it out',
            )


def _tokens_at(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The token ids ``[B, Q]`` of the keys at these positions; one that no key has where there is no such key."""
    keys = tokens.shape[1]
    if not keys:
        return torch.full_like(positions, -1)
    inside = (positions >= 0) & (positions < keys)
    return torch.where(inside, tokens.gather(1, positions.clamp(0, keys - 1)), tokens.amin() - 1)


def check_able(names: Sequence[StatisticName] | None, able: Collection[str], param: str = "statistics") -> None:
    """Raise InvalidRequest for a statistic that some attentions lack, if there is none that has it.

    ``able``: those that there are.
    """
    for index, name in enumerate(names or ()):
        if name in OF_SOME and name not in able:
            raise InvalidRequest.at(
                f"{param}.{index}", f"{name} needs {OF_SOME[name].needs}, which there is not here; leave it out"
            )


def check_single_query(names: Sequence[StatisticName] | None, param: str = "statistics") -> None:
    """Raise InvalidRequest for a statistic that compares queries, where each query is reported alone."""
    for index, name in enumerate(names or ()):
        if name in PAIR_STATISTICS:
            raise InvalidRequest.at(
                f"{param}.{index}",
                f"{name} compares the queries of a text, and each generated token is reported alone; leave it out, and "
                "ask for the weights of the whole text",
            )


def check_unspoiled(names: Sequence[StatisticName] | None, edits: Iterable[Edit], param: str = "statistics") -> None:
    """Raise InvalidRequest for a statistic beside an edit that makes it another number."""
    edited = {edit.tap for edit in edits}
    for index, name in enumerate(names or ()):
        reasons = OF_SOME[name].spoiled_by if name in OF_SOME else {}
        if spoiled := edited.intersection(reasons):
            raise InvalidRequest.at(f"{param}.{index}", f"{name} {reasons[min(spoiled)]}; leave one of the two out")


def _fitted(name: str, array: Array, batch: int, length: int) -> Array:
    """``[B, L]`` from ``[B, L]`` or ``[L]``."""
    if array.shape not in {(batch, length), (length,)}:
        raise wrong_shape(f"{_AT}.{name}", f"{[batch, length]} or {[length]}", array, [batch, length])
    return np.broadcast_to(array, (batch, length))
