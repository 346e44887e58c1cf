"""Pairs of queries and keys, and candidates, checked against the sizes of each text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from attention_contract.errors import InvalidRequest
from attention_service.core.inspection.statistics import GivenPairs
from attention_service.core.tensors import to_device

_AT: Final = "statistic_options"
PairField = Literal["pairs", "candidates"]


class PairOptions(Protocol):
    """Options with pairs."""

    @property
    def pairs(self) -> Any:
        """A list of pairs, or one for each text."""

    @property
    def candidates(self) -> Any:
        """A list of keys, or one for each text."""


@dataclass(frozen=True)
class BoundPairs:
    """``GivenPairs`` on the host."""

    queries: NDArray[np.int64]
    """``[B, P]``, filled up with −1, as those below."""
    keys: NDArray[np.int64]
    """``[B, P]``"""
    different: NDArray[np.int64]
    """``[B, D]``: the different queries."""
    places: NDArray[np.int64]
    """``[B, P]``: the place of each pair's query among them; 0 where there is no pair."""
    same_tokens: bool
    candidates: NDArray[np.bool_] | None = None
    """``[B, K]``"""
    swapped_candidates: NDArray[np.bool_] | None = None
    """``[B, K]``"""

    @property
    def sizes(self) -> tuple[int, int, bool, bool]:
        """All that their cost depends on."""
        return self.queries.shape[1], self.different.shape[1], self.same_tokens, self.candidates is not None

    def repeated(self, times: int) -> "BoundPairs":
        """Return those of a batch that is so many times this one."""
        arrays: dict[str, Any] = {
            name: np.tile(x, (times, 1)) for name, x in vars(self).items() if isinstance(x, np.ndarray)
        }
        return replace(self, **arrays)

    def on(self, device: torch.device) -> GivenPairs:
        """Copy them to the device."""
        fields: dict[str, Any] = {
            name: to_device(torch.from_numpy(x), device) if isinstance(x, np.ndarray) else x
            for name, x in vars(self).items()
        }
        return GivenPairs(**fields)


class TextTokens(NamedTuple):
    """The tokens of a text among the queries and the keys; the rest is padding."""

    queries: range
    keys: range


def bind_pairs(
    options: PairOptions, texts: Sequence[TextTokens], keys: int, *, same_tokens: bool, where: str = ""
) -> BoundPairs:
    """Check pairs and candidates, which count the tokens of their text. Raises InvalidRequest that names one at fault.

    ``keys``: K, padding included; ``same_tokens``: query i and key i are the same token; ``where``: the layer.
    """
    rows: list[NDArray[np.int64]] = []
    for (param, own), text in zip(_with_fields("pairs", options.pairs, len(texts)), texts, strict=True):
        array: NDArray[np.int64] = np.array(own, np.int64)
        for side, (name, there) in enumerate((("query", text.queries), ("key", text.keys))):
            _check_within(array[:, side], len(there), name, where, f"{param}.{{}}.{side}")
        rows.append(array + np.array([text.queries.start, text.keys.start]))
    candidates = swapped = None
    if options.candidates is not None:
        candidates, swapped = np.zeros((len(texts), keys), bool), np.zeros((len(texts), keys), bool)
        named = _with_fields("candidates", options.candidates, len(texts))
        for row, ((param, own), text) in enumerate(zip(named, texts, strict=True)):
            array = np.array(own, np.int64)
            _check_within(array, len(text.keys), "key", where, f"{param}.{{}}")
            candidates[row, array + text.keys.start] = True
            if same_tokens:
                swapped[row, rows[row][:, 0]] = True
    different, places = zip(*(np.unique(array[:, 0], return_inverse=True) for array in rows), strict=True)
    return BoundPairs(
        _filled([array[:, 0] for array in rows], -1), _filled([array[:, 1] for array in rows], -1),
        _filled(different, -1), _filled(places, 0), same_tokens, candidates, swapped,
    )  # fmt: skip


def most_pairs(lists: Sequence[Any] | None) -> int:
    """Return the number of pairs of the text with the most."""
    if lists is None:
        return 0
    return len(lists) if _is_of_all("pairs", lists) else max(map(len, lists))


def check_pairs_asked(options: PairOptions, *, asked: bool) -> None:
    """Raise InvalidRequest for pairs or candidates if the statistic is not ``asked``, and if it is, without pairs."""
    if asked and options.pairs is None:
        raise InvalidRequest.at(f"{_AT}.pairs", "the statistic pairs has no pair; send [query, key] of each")
    for name in () if asked else get_args(PairField):
        if getattr(options, name) is not None:
            raise InvalidRequest.at(f"{_AT}.{name}", "it is for the statistic pairs; name that in statistics too")


def lists_by_text(name: PairField, lists: Sequence[Any], texts: int) -> list[Sequence[Any]]:
    """Return the pairs or the candidates of each text. Raises InvalidRequest for another number of lists."""
    if _is_of_all(name, lists):
        return [lists] * texts
    if len(lists) != texts:
        raise InvalidRequest.at(
            f"{_AT}.{name}", f"expected one list, or one for each of {texts} texts; got {len(lists)} lists"
        )
    return [*lists]


def _is_of_all(name: PairField, lists: Sequence[Any]) -> bool:
    """True for one list for all texts."""
    return isinstance(lists[0][0] if name == "pairs" else lists[0], int)


def _with_fields(name: PairField, lists: Sequence[Any], texts: int) -> list[tuple[str, Sequence[Any]]]:
    """Return the list of each text with its field, for errors. Raises InvalidRequest."""
    field = f"{_AT}.{name}"
    names = [field if _is_of_all(name, lists) else f"{field}.{at}" for at in range(texts)]
    return [*zip(names, lists_by_text(name, lists, texts), strict=True)]


def _check_within(indices: NDArray[np.int64], count: int, name: str, where: str, param: str) -> None:
    """Raise InvalidRequest for the first index beyond this count; ``param`` has a place for its index."""
    beyond = indices >= count
    if beyond.any():
        at = int(beyond.argmax())
        raise InvalidRequest.at(
            param.format(at), f"expected the index of a {name}{where}, below {count}; got {indices[at]}"
        )


def _filled(rows: Sequence[NDArray[np.int64]], fill: int) -> NDArray[np.int64]:
    """Rows of one length, filled up."""
    filled = np.full((len(rows), max(map(len, rows))), fill, np.int64)
    for own, row in zip(filled, rows, strict=True):
        own[: len(row)] = row
    return filled
