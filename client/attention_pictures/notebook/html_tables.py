"""Tables and coloured tokens as HTML for notebooks and pages."""

from collections.abc import Sequence
from html import escape
from typing import Any, Final

import numpy as np
from pydantic import BaseModel

from attention_contract.short_repr import short_text
from attention_contract.validation import clip
from attention_pictures.sign_colours import background

MAX_ROWS: Final = 200
"""Rows of a table."""
_MAX_TOKENS: Final = 1_000
_MAX_LETTERS: Final = 160


def table_html(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of texts and numbers."""
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:MAX_ROWS])
    rest = f"<p>{len(rows) - MAX_ROWS} more rows are left out.</p>" if len(rows) > MAX_ROWS else ""
    return (
        f"<div style='overflow-x:auto'><table><caption>{escape(caption)}</caption>"
        f"<tr>{head}</tr>{body}</table></div>{rest}"
    )


def facts_html(value: BaseModel) -> str:
    """The fields of a value that has no numbers to map."""
    rows = [
        (name, short_text(field_value, _MAX_LETTERS))
        for name, field_value in value.__dict__.items()
        if field_value is not None and not (isinstance(field_value, list) and not field_value)
    ]
    return table_html(type(value).__name__, ("field", "value"), rows)


def tokens_html(caption: str, tokens: Sequence[str], values: Sequence[float], colours: str = "") -> str:
    """The tokens of a text, each on the colour of its number: its share of the largest magnitude.

    ``colours``: what they mean, if not the sign and size of the numbers.
    """
    numbers = np.asarray(values, np.float64)[: len(tokens)]
    most = float(np.nanmax(np.abs(numbers), initial=0.0)) or 1.0
    shown = "".join(
        f"<span style='background:{background(0.0 if np.isnan(number) else number / most)}' title='{number:.4g}'>"
        f"{escape(clip(token, 40))}</span>"
        for token, number in zip(tokens[:_MAX_TOKENS], numbers[:_MAX_TOKENS], strict=False)
    )
    meaning = colours or f"orange is positive, blue negative, at most {most:.3g}"
    rest = f" {len(tokens) - _MAX_TOKENS} more tokens are left out." if len(tokens) > _MAX_TOKENS else ""
    return f"<p>{escape(caption)}: {meaning}.{rest}</p><p style='white-space:pre-wrap'>{shown}</p>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"<td style='text-align:right'>{value:.4g}</td>"
    aligned = "right" if isinstance(value, int) else "left"
    return f"<td style='text-align:{aligned}'>{escape(clip(str(value), _MAX_LETTERS))}</td>"
