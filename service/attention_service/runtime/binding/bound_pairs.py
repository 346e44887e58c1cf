"""Pairs of queries and keys, and candidates, checked against the sizes of each text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attention_contract.errors import InvalidRequest
from attention_service.core.inspection.statistics import GivenPairs
from attention_service.core.tensors import to_device
from attention_service.prompts.named_pairs import PairOptions, is_of_all, lists_with_fields


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
    for (param, own), text in zip(lists_with_fields("pairs", options.pairs, len(texts)), texts, strict=True):
        array: NDArray[np.int64] = np.array(own, np.int64)
        for side, (name, there) in enumerate((("query", text.queries), ("key", text.keys))):
            _check_within(array[:, side], len(there), name, where, f"{param}.{{}}.{side}")
        rows.append(array + np.array([text.queries.start, text.keys.start]))
    candidates = swapped = None
    if options.candidates is not None:
        candidates, swapped = np.zeros((len(texts), keys), bool), np.zeros((len(texts), keys), bool)
        named = lists_with_fields("candidates", options.candidates, len(texts))
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
    return len(lists) if is_of_all("pairs", lists) else max(map(len, lists))


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
