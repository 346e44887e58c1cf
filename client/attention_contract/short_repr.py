"""The text of a value of the wire as a notebook or a terminal prints it: a few lines, whatever the value holds."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from pydantic import BaseModel

MAX_LINES: Final = 12
"""Lines of the text of one value."""
MAX_COLUMNS: Final = 110
"""Characters of a line."""
_WHOLE_ARRAY: Final = 6
"""Numbers of an array that is written out; a larger one is told by its dtype and shape."""


def short_repr(value: "BaseModel") -> str:
    """Write a value in one line if it fits, else with one field a line, clipped to ``MAX_LINES`` and ``MAX_COLUMNS``.

    Fields without a value are left out.
    """
    line = short_text(value, 10 * MAX_COLUMNS)
    if len(line) <= MAX_COLUMNS:
        return line
    fields = _stated(value)
    shown = fields if len(fields) <= MAX_LINES - 2 else fields[: MAX_LINES - 3]
    lines = [f"  {name}={short_text(field_value, MAX_COLUMNS - len(name) - 4)}," for name, field_value in shown]
    rest = [name for name, _ in fields[len(shown) :]]
    more = [f"  {_clipped('… and ' + ', '.join(rest), MAX_COLUMNS - 2)}"] if rest else []
    return "\n".join([f"{type(value).__name__}(", *lines, *more, ")"])


def _stated(value: "BaseModel") -> list[tuple[str, Any]]:
    hidden = {name for name, field in type(value).model_fields.items() if not field.repr}
    return [
        (name, field_value)
        for name, field_value in value.__dict__.items()
        if field_value is not None and name not in hidden
    ]


def short_text(value: Any, room: int) -> str:
    """Write any value in at most so many characters, but for a few of its brackets."""
    if isinstance(value, np.ndarray):
        return str(value.tolist()) if value.size <= _WHOLE_ARRAY else f"{value.dtype} {list(value.shape)}"
    if isinstance(value, str | bytes):
        return _clipped(repr(value[: room + 1]), room)
    if hasattr(type(value), "model_fields"):
        named = ((f"{name}=", field) for name, field in _stated(value))
        return _joined(f"{type(value).__name__}(", named, ")", room)
    if isinstance(value, Mapping):
        pairs = ((f"{key!r}: ", item) for key, item in value.items())
        return _joined("{", pairs, "}", room, len(value))
    if isinstance(value, Sequence):
        begin, end = "()" if isinstance(value, tuple) else "[]"
        return _joined(begin, (("", item) for item in value), end, room, len(value))
    return _clipped(repr(value), room)


def _joined(begin: str, items: Iterable[tuple[str, Any]], end: str, room: int, count: int | None = None) -> str:
    """Write the items that fit, and ``…`` for the others with their ``count``."""
    ending = "…" if count is None else f"… {count} in all"
    left = room - len(begin) - len(end)
    texts: list[str] = []
    for name, item in items:
        if left <= len(name) + len(ending):
            return f"{begin}{', '.join([*texts, ending])}{end}"
        texts.append(name + short_text(item, left - len(name) - len(ending)))
        left -= len(texts[-1]) + 2
    return f"{begin}{', '.join(texts)}{end}"


def _clipped(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(room - 1, 0)]}…"
