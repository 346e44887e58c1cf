"""Maps of numbers as HTML for notebooks: one at a time, with exact values below the pointer; they work offline.

Everything is inside the text: numbers in float32, and a script that draws them. Where no script runs, a table of the
first map stands in its place.
"""

import base64
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from importlib.resources import files
from math import ceil, sqrt
from string import Template
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from attention_contract.reply_names import Names, head_name
from attention_contract.validation import clip
from attention_pictures.pooled_cells import Numbers, pool, pooling_note
from attention_pictures.sign_colours import DIVERGING_SCALES
from attention_pictures.statistic_tables import tables

MOST_NUMBERS: Final = 50_000
"""Numbers of all maps together: 267 kB of text. More are pooled."""
_MOST_MAPS: Final = 1_000
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
    signed: bool = False
    """The numbers are differences: their colours diverge from 0."""

    def html(self, most_numbers: int = MOST_NUMBERS) -> str:
        """The maps as HTML, pooled to so many numbers, which is stated."""
        values, factors, left_out = self._fitted(most_numbers)
        rows, columns = (_spans(labels, by) for labels, by in zip((self.rows, self.columns), factors, strict=True))
        notes = [f"{note.capitalize()}." for note in pooling_note(factors, ("row", "column"), signed=self.signed)]
        if left_out:
            notes.append(f"{left_out} more of them are left out.")
        data = {
            "values": base64.b64encode(values.astype("<f4").tobytes()).decode(),
            "shape": values.shape,
            "names": [_clipped(name) for name in self.names[: len(values)]],
            "rows": rows,
            "columns": columns,
            "title": self.title,
            "kind": self.kind,
            "signed": self.signed,
            "note": " ".join(notes),
            "hint": "Point at a cell, or choose one with the arrow keys.",
        }
        text = json.dumps(data).replace("<", "\\u003c")  # no label ends the element
        return _template().substitute(
            id=f"attention-{secrets.token_hex(6)}",
            title=escape(self.title),
            diverging=json.dumps(DIVERGING_SCALES),
            static=_table(values, self.names, rows, columns),
            data=text,
        )

    def _fitted(self, most_numbers: int) -> tuple[Numbers, tuple[int, int], int]:
        """The maps that fit, how many rows and columns were pooled into one, and how many maps are left out."""
        values: Numbers = np.asarray(self.values, np.float32)
        longest = max(values.shape[1:], default=1)
        by = max(1, -(-longest // _MOST_CELLS), min(ceil(sqrt(values.size / most_numbers)), longest // _LEAST_CELLS))
        rows, columns = (-(-side // by) for side in values.shape[1:])
        values, factors = pool(values, (rows, columns), signed=self.signed)
        kept = min(_MOST_MAPS, max(1, most_numbers // max(rows * columns, 1)))
        return values[:kept], factors, max(0, len(values) - kept)


def html_of(several: Sequence[Maps], most_numbers: int = MOST_NUMBERS) -> str | None:
    """Maps one below the other, which share the room of a notebook by their sizes; None if there are none."""
    total = sum(maps.values.size for maps in several)
    shares = (min(maps.values.size, most_numbers * maps.values.size // max(total, 1)) for maps in several)
    return "".join(maps.html(max(share, 1)) for maps, share in zip(several, shares, strict=True)) or None


@cache
def _template() -> Template:
    return Template(files("attention_pictures.notebook").joinpath("notebook_maps.html").read_text("utf-8"))


def _spans(labels: Sequence[str], by: int) -> list[str]:
    """The labels of pooled rows or columns: the first and the last of each."""
    if by == 1:
        return [_clipped(label) for label in labels]
    ends = ((at, min(at + by, len(labels)) - 1) for at in range(0, len(labels), by))
    return [f"{_clipped(labels[first])} … {_clipped(labels[last])}" for first, last in ends]


def _clipped(label: object) -> str:
    return clip(str(label), _MOST_LETTERS)


def _table(values: NDArray[Any], names: Sequence[str], rows: Sequence[str], columns: Sequence[str]) -> str:
    """The first map as a table, or its corner."""
    if not values.size:
        return "<p>There are no numbers.</p>"
    head = "".join(f"<th>{escape(label)}</th>" for label in columns[:_MOST_SHOWN])
    body = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td>{_written(number)}</td>' for number in line[:_MOST_SHOWN])}</tr>"
        for label, line in zip(rows[:_MOST_SHOWN], values[0], strict=False)
    )
    cut = ", its first rows and columns" if max(len(rows), len(columns)) > _MOST_SHOWN else ""
    return f"<table><caption>{escape(_clipped(names[0]))}{cut}</caption><tr><th></th>{head}</tr>{body}</table>"


def _written(number: np.float32) -> str:
    """The shortest decimal number that reads as this one in float32."""
    return "none" if np.isnan(number) else str(number).removesuffix(".0")


def maps_of(
    weights: NDArray[Any], title: str, names: Names | None = None, *, averaged: bool | None = False,
    merged: str = "mean of the heads", signed: bool = False,
) -> Maps:  # fmt: skip
    """Maps of weights ``[B, H, Lq, Lk]``, where B, or H too, may be missing. ``names``: of heads, queries and keys.

    ``averaged`` weights have no H and are called ``merged``. None leaves open which dimension is missing, and the maps
    are numbered.
    """
    weights, named = np.asarray(weights), names or Names()
    if averaged:
        weights = weights[..., None, :, :]
    batch, heads, queries, keys = (1,) * (4 - weights.ndim) + weights.shape
    head_labels = [merged] if averaged else [head_name(named.layer, head) for head in named.heads or range(heads)]
    maps = [f"sequence {at}, {head}" if batch > 1 else head for at in range(batch) for head in head_labels]
    if averaged is None:
        maps = [f"map {at}" for at in range(batch * heads)]
    rows, columns = _labels(named.row_labels, queries), _labels(named.column_labels, keys)
    return Maps(weights.reshape(batch * heads, queries, keys), maps, rows, columns, title, signed=signed)


def weight_maps(
    weights: NDArray[Any] | None, differences: NDArray[Any] | None, names: Names | None = None, *,
    averaged: bool | None, implicit: bool = False,
) -> list[Maps]:  # fmt: skip
    """Maps of the weights that were returned, and of what the edits change about them. See ``maps_of``."""
    title = "Implicit weights" if implicit else "Attention weights"
    panels = (weights, title, implicit), (differences, "Differences from the unedited weights", True)
    return [maps_of(x, title, names, averaged=averaged, signed=signed) for x, title, signed in panels if x is not None]


def maps_of_tensors(value: BaseModel) -> list[Maps]:
    """Maps of every tensor of a value, by its field: its last two dimensions are rows and columns."""
    maps = []
    for name, field in value.__dict__.items():
        named = field.items() if isinstance(field, Mapping) else [("", field)]
        for key, tensor in named:
            if isinstance(tensor, np.ndarray) and tensor.ndim and tensor.dtype.kind in "fiub" and tensor.size > 1:
                values = tensor[(None,) * max(0, 3 - tensor.ndim)].astype(np.float64)
                maps.append(_numbered(values, f"{name} {key}".strip().replace("_", " ")))
        if isinstance(field, BaseModel):
            maps += [replace(inner, title=f"{name}: {inner.title}") for inner in maps_of_tensors(field)]
    return maps


def _numbered(values: Numbers, title: str) -> Maps:
    """Maps ``[…, rows, columns]`` whose sides are numbered."""
    *before, rows, columns = values.shape
    names = [", ".join(map(str, at)) for at in np.ndindex(*before)]
    sides = [str(row) for row in range(rows)], [str(column) for column in range(columns)]
    signed = bool((values < 0).any())
    return Maps(values.reshape(-1, rows, columns), names, *sides, title, "Index", signed=signed)


def statistic_maps(
    rows: Sequence[tuple[str, Mapping[str, NDArray[Any]]]], title: str = "Statistics by layer and head", *,
    heads: Sequence[str] | None = None, signed: bool = False,
) -> list[Maps]:  # fmt: skip
    """A map of rows × heads for each statistic ``[H]`` of the rows; none without a statistic.

    ``heads``: their names, by default their numbers.
    """
    made = tables([statistics for _, statistics in rows], None if heads is None else len(heads))
    if not made:
        return []
    values = np.stack([*made.values()])
    columns = heads or [head_name(None, head) for head in range(values.shape[2])]
    return [Maps(values, [*made], [name for name, _ in rows], columns, title, "Statistic", signed=signed)]


def _labels(labels: Sequence[str] | None, count: int) -> list[str]:
    """A label for each row or column; numbers for those that have none, as keys that a module adds."""
    given = list(labels or ())[:count]
    return given + [str(index) for index in range(len(given), count)]
