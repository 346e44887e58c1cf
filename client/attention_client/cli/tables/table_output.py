"""Tables and lines for people: rows of models, of tensors by index, and cells of any value."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attention_contract.base import WireModel

MAX_ROWS: Final = 128
"""Rows of one table; --json and -o give all."""
_MAX_TEXT: Final = 120
_MAX_NUMBERS: Final = 4
"""Numbers of a list in one cell."""
_UNITS: Final = {"bytes": "B", "flops": "FLOP", "count": ""}
"""Units of counts, by the end of their name."""
_NUMBER: Final = re.compile(r"[-+]?(\d[\d.e+-]*|nan|inf)( [kMGTP]?[A-Z]*)?|")


def print_out(what: Any, style: str = "") -> None:
    """Print a text in its style, or anything else as wide as the terminal, or 240 columns into a file."""
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False, markup=False, force_jupyter=False)
    console.print(Text(what, style) if isinstance(what, str) else what, soft_wrap=isinstance(what, str))


def table(rows: Iterable[Mapping[str, str]]) -> None:
    """Print a row for each mapping of columns to cells. A column without a cell is left out; numbers stand right."""
    every = [*rows]
    shown = every[:MAX_ROWS]
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    columns = [
        name for name in dict.fromkeys(name for row in every for name in row) if any(row.get(name) for row in shown)
    ]
    for name in columns:
        numbers = all(_NUMBER.fullmatch(row.get(name, "")) for row in shown)
        drawn.add_column(name, justify="right" if numbers else "left")
    for row in shown:
        drawn.add_row(*(Text(row.get(name, "")) for name in columns))
    if shown:
        print_out(drawn)
    if len(every) > len(shown):
        print_out(f"… and {len(every) - len(shown)} more rows; --json and -o give all of them", "dim")


def by_index(
    axes: Mapping[str, Sequence[Any] | None], columns: Mapping[str, NDArray[Any] | None], largest: str | None = None
) -> None:
    """Print a row for each index of the axes; a dimension beyond them is a list of numbers in a cell.

    ``axes`` with the names of their indices, None to count from 0. A leading dimension that the tensors lack is one.
    ``largest`` is a column: its largest number of each first index comes first, and no row has none of it.
    """
    arrays = {name: np.asarray(column) for name, column in columns.items() if column is not None}
    if not arrays:
        return
    missing = len(axes) - min(array.ndim for array in arrays.values())
    arrays = {name: array[(None,) * missing] for name, array in arrays.items() if array.ndim + missing <= len(axes) + 1}
    places = [*np.ndindex(*next(iter(arrays.values())).shape[: len(axes)])]
    if largest is not None:
        places = [at for at in places if not np.isnan(arrays[largest][at])]
        places.sort(key=lambda at: (at[0], -arrays[largest][at]))
    table(
        {
            axis: cell("", at if labels is None else labels[at])
            for at, (axis, labels) in zip(place, axes.items(), strict=True)
        }
        | {name.replace("_", " "): cell(name, array[place]) for name, array in arrays.items()}
        for place in places
    )


def records(items: Sequence[Any], before: Sequence[Mapping[str, str]] = (), columns: str = "") -> None:
    """Print a row for each model, by its fields; ``before``: further cells of each.

    ``columns``: the fields to print, by their dotted names, each with another heading behind ``=`` if it needs one.
    """
    chosen = dict(pair.partition("=")[::2] for pair in columns.split())
    rows = [{name: _part(item, name) for name in chosen} if chosen else flat(item) for item in items]
    names = [*dict.fromkeys(name for row in rows for name in row)]
    last = [name.rpartition(".")[2] for name in names]
    heading = {
        name: chosen.get(name) or (end if last.count(end) == 1 else name) for name, end in zip(names, last, strict=True)
    }
    table(
        {**first, **{_spaced(heading[name]): cell(name, value) for name, value in row.items()}}
        for first, row in zip(before or [{}] * len(rows), rows, strict=True)
    )


def facts(reply: WireModel, shown: frozenset[str] = frozenset()) -> None:
    """Print every field that is set, nested ones by their dotted name; not those that were shown before."""
    values = flat(reply.model_dump(by_alias=True, exclude_none=True, exclude={*shown}))
    words = {
        name: ", ".join(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value
        for name, value in values.items()
    }
    table(
        {"field": name, "value": word if isinstance(word, str) else json.dumps(word, ensure_ascii=False, default=str)}
        for name, word in words.items()
    )


def line(values: Mapping[str, Any]) -> None:
    """Print what is set in one line."""
    cells = {_spaced(name): cell(name, value) for name, value in values.items()}
    if any(cells.values()):
        print_out("; ".join(f"{name} {shown}" for name, shown in cells.items() if shown), "dim")


# ── cells ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def scaled(value: float, unit: str = "") -> str:
    """Format a count with a decimal prefix, as in ``1.07 GFLOP``."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:g} {unit}".rstrip()


def number(value: Any) -> str:
    """Format a number to four digits."""
    return f"{float(value):.4g}"


def cell(name: str, value: Any) -> str:
    """Format a value on one line; its dotted name tells what a number counts."""
    if isinstance(value, np.ndarray | np.generic):
        return _numbers(np.asarray(value), name)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {cell(name, member)}" for key, member in value.items())
    if isinstance(value, WireModel):
        return _changed(value)
    if isinstance(value, list | tuple):
        return str([*value]) if name == "shape" else ", ".join(cell(name, member) for member in value)
    return _scalar(name, value)


def _numbers(value: NDArray[Any], name: str) -> str:
    if not value.ndim:
        return _scalar(name, value.item())
    more = " …" if value.size > _MAX_NUMBERS else ""
    return "  ".join(_scalar(name, element.item()) for element in value.flat[:_MAX_NUMBERS]) + more


def _scalar(name: str, value: Any) -> str:
    """Format bytes, FLOPs and counts with a prefix, other numbers to four digits, times to the minute, and texts."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and (unit := _unit(name)) is not None:
        return scaled(value, unit)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M")
    text = "" if value is None else str(value)[: 12 if name == "version" else None]
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _unit(name: str) -> str | None:
    """Return the unit of a count by the end of its name or of what it is a part of; None for another number."""
    return next((_UNITS[end] for part in name.split(".") for end in _UNITS if f"_{part}".endswith(f"_{end}")), None)


def _changed(model: WireModel) -> str:
    """Name the parts of a spec that differ from the default, with their options."""
    parts_shown = []
    for name, value in model:
        if value != type(model).model_fields[name].get_default(call_default_factory=True):
            parts = value if isinstance(value, list) else [value]
            parts_shown += [_named(part) if isinstance(part, WireModel) else f"{name}={part}" for part in parts]
    return " ".join(parts_shown)


def _named(part: WireModel) -> str:
    options = part.model_dump(exclude_defaults=True)
    name = options.pop("name", getattr(part, "name", type(part).__name__))
    listed = ", ".join(f"{option}={value}" for option, value in options.items())
    return f"{name}({listed})" if listed else str(name)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the parts of a model or mapping by dotted name."""
    parts: dict[str, Any] = {}
    for name, item in value.items() if isinstance(value, Mapping) else value:
        nested = isinstance(item, Mapping | WireModel)
        parts |= flat(item, f"{path}{name}.") if nested else {f"{path}{name}": item}
    return parts


def _part(value: Any, path: str) -> Any:
    """Return a part of a model, of a mapping, or of each model of a list; None if there is none."""
    for name in path.split("."):
        if isinstance(value, list):
            value = [getattr(item, name) for item in value]
        else:
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def _spaced(name: str) -> str:
    return name.replace("_", " ").replace(".", " ")
