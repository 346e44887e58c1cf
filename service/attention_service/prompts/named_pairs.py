"""The pairs of a query and a key that a request names, and the candidates, by text.

Those of whole texts are bound to their sizes by ``runtime.binding.bound_pairs``. Here are also those of texts that are
generated, each query of which is told of alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, get_args

from attention_contract.errors import InvalidRequest

PairField = Literal["pairs", "candidates"]
_AT: Final = "statistic_options"


class PairOptions(Protocol):
    """Options with pairs."""

    @property
    def pairs(self) -> Any:
        """A list of pairs, or one for each text."""

    @property
    def candidates(self) -> Any:
        """A list of keys, or one for each text."""


@dataclass(frozen=True)
class TextPairs:
    """The pairs of a text that is generated."""

    pairs: tuple[tuple[int, int], ...]
    """The position of each query, and of its key."""
    candidates: tuple[int, ...] | None
    """The keys that may be the first of a query; None for all."""

    def keys_of(self, query: int) -> list[int]:
        """The keys of the pairs that have this query."""
        return [key for own, key in self.pairs if own == query]


def text_pairs(
    options: PairOptions, queries: Sequence[range], *, asked: bool, own: bool = True,
    sources: Sequence[int] | None = None,
) -> list[TextPairs]:  # fmt: skip
    """The pairs of texts that are generated; none if they are not ``asked``.

    ``queries``: those that choose the tokens of each text; ``own``: True if a layer that is told of looks at the text
    itself; ``sources``: the tokens of each source that such layers look at; None if none does. Raises InvalidRequest
    that names the field at fault.
    """
    at = f"attention.{_AT}"
    check_pairs_asked(options, asked=asked, at=at)
    if not asked:
        return []
    pairs = lists_with_fields("pairs", options.pairs, len(queries), at)
    candidates: list[tuple[str, Any]] = [("", None)] * len(queries)
    if options.candidates is not None:
        candidates = lists_with_fields("candidates", options.candidates, len(queries), at)
    found = []
    for number, ((field, given), (of_candidates, chosen)) in enumerate(zip(pairs, candidates, strict=True)):
        text, source = queries[number], [] if sources is None else [sources[number]]
        for index, (query, key) in enumerate(given):
            if query not in text:
                raise InvalidRequest.at(f"{field}.{index}.0", _no_query(query, text))
            most = min([query + 1] * own + source)
            if key >= most:
                raise InvalidRequest.at(f"{field}.{index}.1", _no_key(key, most, own=own and most == query + 1))
        most = min([text.stop] * own + source)
        for index, key in enumerate(chosen or ()):
            if key >= most:
                raise InvalidRequest.at(f"{of_candidates}.{index}", f"expected a key below {most}; got {key}")
        found.append(TextPairs(tuple(map(tuple, given)), None if chosen is None else tuple(chosen)))
    return found


def _no_query(query: int, text: range) -> str:
    return (
        f"expected a query that chooses a token, {text.start} to {text.stop - 1}; got {query}. Pairs of the prompt "
        "come with the weights of the text (/v1/models/{model}/weights)"
    )


def _no_key(key: int, most: int, *, own: bool) -> str:
    if own:
        return f"expected a key up to its query, {most - 1}; got {key}, a token that is not there yet"
    return f"expected the index of a key of the source, below {most}; got {key}"


def check_pairs_asked(options: PairOptions, *, asked: bool, at: str = _AT) -> None:
    """Raise InvalidRequest for pairs or candidates if the statistic is not ``asked``, and if it is, without pairs."""
    if asked and options.pairs is None:
        raise InvalidRequest.at(f"{at}.pairs", "the statistic pairs has no pair; send [query, key] of each")
    for name in () if asked else get_args(PairField):
        if getattr(options, name) is not None:
            raise InvalidRequest.at(f"{at}.{name}", "it is for the statistic pairs; name that in statistics too")


def lists_by_text(name: PairField, lists: Sequence[Any], texts: int, at: str = _AT) -> list[Sequence[Any]]:
    """Return the pairs or the candidates of each text. Raises InvalidRequest for another number of lists."""
    if is_of_all(name, lists):
        return [lists] * texts
    if len(lists) != texts:
        raise InvalidRequest.at(
            f"{at}.{name}", f"expected one list, or one for each of {texts} texts; got {len(lists)} lists"
        )
    return [*lists]


def lists_with_fields(
    name: PairField, lists: Sequence[Any], texts: int, at: str = _AT
) -> list[tuple[str, Sequence[Any]]]:
    """Return the list of each text with its field, for errors. Raises InvalidRequest."""
    field = f"{at}.{name}"
    names = [field if is_of_all(name, lists) else f"{field}.{number}" for number in range(texts)]
    return [*zip(names, lists_by_text(name, lists, texts, at), strict=True)]


def is_of_all(name: PairField, lists: Sequence[Any]) -> bool:
    """True for one list for all texts."""
    return isinstance(lists[0][0] if name == "pairs" else lists[0], int)
