"""The names of what a reply has numbers of, for its pictures and for the maps of a notebook."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

OF_REPLY: Final = "{token}"
"""Stands for the token of a reply in the name of what was measured."""
_MOST_HEADS: Final = 6
"""Heads that are named where weights are averaged over some."""
_MOST_NAMED_TOKENS: Final = 3
"""Tokens that the name of a group has."""


@dataclass(frozen=True)
class Names:
    """The names of what a reply has numbers of."""

    title: str = ""
    """The module, recording or model."""
    keys: Sequence[str] | None = None
    """A label for each key; of those that ``columns`` chooses from."""
    queries: Sequence[str] | None = None
    """A label for each query; of those that ``rows`` chooses from."""
    rows: Sequence[int] | None = None
    """The index of each returned query; default: all."""
    columns: Sequence[int] | None = None
    """The index of each returned key; default: all."""
    heads: Sequence[int] | None = None
    """The index of each returned head; default: counted from 0."""
    averaged: bool = False
    """The weights are averaged over heads."""
    by_head: bool = False
    """The output has a part for each head: raw attention without ``num_heads``."""
    method: str | None = None
    """The attribution to draw, by default the first of the reply; or the way of a rollout."""
    pool: int = 1
    """The queries and keys of each cell of the reply's pooled weights."""
    sizes: tuple[int, int] | None = None
    """Queries and keys; default: the cells' number."""
    images: Sequence[str] = ()
    """The images of the request, the bytes of their files in base64."""
    sweep: Any = None
    """The ``Sweep`` that a reply about costs is along, or None."""
    measured: str = ""
    """The number of a model's prediction whose change is measured, ``OF_REPLY`` for its token; empty if unknown."""
    layer: int | str | None = None
    """The layer of a model that the heads are of."""

    @property
    def row_labels(self) -> Sequence[str] | None:
        """A label for each returned query: its index where queries are selected without labels; None for none."""
        return _chosen(self.queries, self.rows)

    @property
    def column_labels(self) -> Sequence[str] | None:
        """A label for each returned key, likewise."""
        return _chosen(self.keys, self.columns)

    def of_tokens(self, queries: Sequence[str], keys: Sequence[str]) -> "Names":
        """The names with the tokens of a layer as labels, where there are no others."""
        own = self.keys if list(queries) == list(keys) and self.keys is not None else queries
        return replace(self, keys=keys if self.keys is None else self.keys, queries=self.queries or own)

    @property
    def averaged_over(self) -> str:
        """The heads that averaged weights are the mean of, in words."""
        if self.heads is None:
            return "mean of all heads"
        if len(self.heads) > 2 and [*self.heads] == [*range(self.heads[0], self.heads[-1] + 1)]:
            return f"mean of heads {self.heads[0]} to {self.heads[-1]}"
        shown = ", ".join(map(str, self.heads[:_MOST_HEADS])) + (", …" if len(self.heads) > _MOST_HEADS else "")
        return f"mean of head{'s' if len(self.heads) > 1 else ''} {shown}"


def _chosen(labels: Sequence[str] | None, indices: Sequence[int] | None) -> Sequence[str] | None:
    return labels if indices is None else [str(at) if labels is None else labels[at] for at in indices]


def head_name(layer: int | str | None, head: int) -> str:
    """The name of a head: ``L1H3``; in a stack of several ``decoder.1 H3``; of a module ``H3``."""
    return f"L{layer}H{head}" if str(layer).isdecimal() else f"H{head}" if layer is None else f"{layer} H{head}"


def layer_name(layer: int | str) -> str:
    """The name of a layer: ``L1``; in a stack of several ``decoder.1``."""
    return f"L{layer}" if str(layer).isdecimal() else str(layer)


def token_name(tokens: int | Sequence[int], labels: Sequence[str] | None) -> str:
    """The name of a swept token by its index, or of a group of tokens.

    With labels, a group of up to three tokens has all of them, a longer one the first and the last; without labels,
    the indices.
    """
    if isinstance(tokens, int):
        return str(tokens) if labels is None else labels[tokens]
    if labels is None:
        return ", ".join(map(str, tokens))
    if len(tokens) > _MOST_NAMED_TOKENS:
        return f"{labels[tokens[0]]} … {labels[tokens[-1]]}"
    in_a_row = [*tokens] == [*range(tokens[0], tokens[0] + len(tokens))]
    return (" " if in_a_row else ", ").join(labels[token] for token in tokens)


def head_of(name: str) -> tuple[int | str, int]:
    """The layer and the head that a name such as ``L1H3`` or ``decoder.1 H3`` is of. Raises ValueError."""
    match = re.fullmatch(r"(?:L(\d+)|(.*\S) )H(\d+)", name)
    if match is None:
        raise ValueError(f"expected the name of a head, as L1H3 or 'decoder.1 H3', got {name!r}")
    layer, stack, head = match.groups()
    return stack if layer is None else int(layer), int(head)


def heading(names: Names, *parts: str) -> str:
    """The heading of a picture: the title, and what is shown of it."""
    return " · ".join(part for part in (names.title, *parts) if part)
