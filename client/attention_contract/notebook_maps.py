"""Maps of numbers as HTML for notebooks: one at a time, with exact values below the pointer; they work offline.

Everything is inside the text: numbers in float16, and a script that draws them. Where no script runs, a table of the
first map stands in its place.
"""

import base64
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from math import ceil, sqrt
from string import Template
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MOST_NUMBERS: Final = 96_000
"""Numbers of all maps together: about 260 kB of text."""
_MOST_CELLS, _LEAST_CELLS = 140, 16
"""Rows, and columns, of a map. Of many maps some are left out before a map gets fewer."""
_MOST_LETTERS: Final = 40
"""Letters of a label."""
_MOST_SHOWN: Final = 16
"""Rows, and columns, of the table that stands where no script runs."""


@dataclass(frozen=True)
class Maps:
    """Maps ``[N, rows, columns]`` with the names of the maps and the labels of their sides."""

    values: NDArray[Any]
    names: Sequence[str]
    rows: Sequence[str]
    columns: Sequence[str]
    title: str
    kind: str = "Head"
    """The noun of a map."""

    def html(self) -> str:
        """The maps as HTML, pooled by maximum to what a notebook holds, which is stated."""
        values, by, left_out = self._fitted()
        rows, columns = (_spans(labels, by) for labels in (self.rows, self.columns))
        notes = []
        if by > 1:
            notes.append(f"Pooled by maximum: a cell is {by} × {by}.")
        if left_out:
            notes.append(f"{left_out} more of them are left out.")
        data = {
            "values": base64.b64encode(values.astype("<f2").tobytes()).decode(),
            "shape": values.shape,
            "names": [_clipped(name) for name in self.names[: len(values)]],
            "rows": rows,
            "columns": columns,
            "title": self.title,
            "kind": self.kind,
            "note": " ".join(notes),
            "hint": "Point at a cell, or choose one with the arrow keys.",
        }
        text = json.dumps(data).replace("<", "\\u003c")  # no label ends the element
        return _template().substitute(
            id=f"attention-{secrets.token_hex(6)}",
            title=escape(self.title),
            static=_table(values, self.names, rows, columns),
            data=text,
        )

    def _fitted(self) -> tuple[NDArray[Any], int, int]:
        """The maps that fit, how many cells were pooled into one along each side, and how many maps are left out."""
        values = np.asarray(self.values, np.float32)
        longest = max(values.shape[1:], default=1)
        by = max(1, -(-longest // _MOST_CELLS), min(ceil(sqrt(values.size / MOST_NUMBERS)), longest // _LEAST_CELLS))
        for axis in (1, 2):
            if by > 1 and values.shape[axis]:
                values = np.fmax.reduceat(values, np.arange(0, values.shape[axis], by), axis=axis)
        kept = max(1, MOST_NUMBERS // max(values[0].size, 1)) if len(values) else 0
        return values[:kept], by, len(values) - len(values[:kept])


@cache
def _template() -> Template:
    return Template(files("attention_contract").joinpath("notebook_maps.html").read_text("utf-8"))


def _spans(labels: Sequence[str], by: int) -> list[str]:
    """The labels of pooled rows or columns: the first and the last of each."""
    if by == 1:
        return [_clipped(label) for label in labels]
    ends = ((at, min(at + by, len(labels)) - 1) for at in range(0, len(labels), by))
    return [f"{_clipped(labels[first])} … {_clipped(labels[last])}" for first, last in ends]


def _clipped(label: object) -> str:
    text = str(label)
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"


def _table(values: NDArray[Any], names: Sequence[str], rows: Sequence[str], columns: Sequence[str]) -> str:
    """The first map as a table, or its corner."""
    if not values.size:
        return "<p>There are no numbers.</p>"
    head = "".join(f"<th>{escape(label)}</th>" for label in columns[:_MOST_SHOWN])
    body = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td>{number:.3g}</td>' for number in line[:_MOST_SHOWN])}</tr>"
        for label, line in zip(rows[:_MOST_SHOWN], values[0], strict=False)
    )
    cut = ", its first rows and columns" if max(len(rows), len(columns)) > _MOST_SHOWN else ""
    return f"<table><caption>{escape(_clipped(names[0]))}{cut}</caption><tr><th></th>{head}</tr>{body}</table>"


def maps_of(weights: NDArray[Any], title: str, *, averaged: bool | None = False) -> Maps:
    """Maps of weights ``[B, H, Lq, Lk]``, where B, or H too, may be missing.

    ``averaged`` weights have no H. None leaves open which dimension is missing, and the maps are numbered.
    """
    weights = np.asarray(weights)
    if averaged:
        weights = weights[..., None, :, :]
    batch, heads, queries, count = (1,) * (4 - weights.ndim) + weights.shape
    names = [
        f"sequence {sequence}, head {head}" if batch > 1 else f"head {head}"
        for sequence in range(batch)
        for head in range(heads)
    ]
    if averaged:
        names = [name.replace("head 0", "mean of the heads") for name in names]
    if averaged is None:
        names = [f"map {at}" for at in range(batch * heads)]
    rows, columns = ([str(index) for index in range(size)] for size in (queries, count))
    return Maps(weights.reshape(batch * heads, queries, count), names, rows, columns, title)
