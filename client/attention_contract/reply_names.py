"""The names of what a reply has numbers of, for its pictures and for the maps of a notebook."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Names:
    """The names of what a reply has numbers of."""

    title: str = ""
    """The module, recording or model."""
    keys: Sequence[str] | None = None
    """A label for each key."""
    queries: Sequence[str] | None = None
    """A label for each returned query."""
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
    layer: int | str | None = None
    """The layer of a model that the heads are of."""


def head_name(layer: int | str | None, head: int) -> str:
    """The name of a head: ``L1H3``; in a stack of several ``decoder.1 H3``; of a module ``H3``."""
    return f"L{layer}H{head}" if str(layer).isdecimal() else f"H{head}" if layer is None else f"{layer} H{head}"


def head_of(name: str) -> tuple[int | str, int]:
    """The layer and the head that a name such as ``L1H3`` or ``decoder.1 H3`` is of. Raises ValueError."""
    found = re.fullmatch(r"(?:L(\d+)|(.*\S) )H(\d+)", name)
    if found is None:
        raise ValueError(f"expected the name of a head, as L1H3 or 'decoder.1 H3', got {name!r}")
    layer, stack, head = found.groups()
    return stack if layer is None else int(layer), int(head)


def heading(names: Names, *parts: str) -> str:
    """The heading of a picture: the title, and what is shown of it."""
    return " · ".join(part for part in (names.title, *parts) if part)
