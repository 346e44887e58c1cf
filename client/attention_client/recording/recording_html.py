"""Recordings as HTML for notebooks: one heat map a head, as a table whose cells are coloured."""

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from attention_contract.tensors import Array

if TYPE_CHECKING:
    from attention_client.recording.recorded import Recording

MOST_CELLS = 20_000
"""Cells of all heat maps together. Later layers are named, and shown by ``recording.figure``."""
_CELL = "padding:0;width:10px;min-width:10px;height:10px;border:0"
_LABEL = "padding:0 4px;font:11px monospace;text-align:right;border:0"


def render(recording: "Recording") -> str:
    """The facts, and each attention's heat maps as long as the cells suffice."""
    facts, left, parts = recording.facts, MOST_CELLS, []
    for attention in facts.attentions:
        name = f"{attention.name}.weights"
        queries, keys = recording.tokens(attention.name)
        cells = len(attention.heads) * len(queries) * len(keys)
        if name not in recording.tensors or cells > left:
            parts.append(f"<li>{escape(attention.name)}: {len(attention.heads)} heads</li>")
            continue
        left -= cells
        weights = recording.weights(attention.name)
        maps = "".join(
            _heat_map(label, rows, queries, keys) for label, rows in zip(attention.heads, weights, strict=True)
        )
        opened = " open" if attention is facts.attentions[0] else ""
        parts.append(
            f"<li><details{opened}><summary>{escape(attention.name)}</summary>"
            f'<div style="display:flex;flex-wrap:wrap;gap:12px">{maps}</div></details></li>'
        )
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    text = facts.text if len(facts.text) <= 200 else f"{facts.text[:200]}…"
    return (
        f"<div><b>{escape(facts.model)}</b>: {escape(text)}<br><small>{escape(versions)}</small>"
        f'<ul style="list-style:none;padding:0">{"".join(parts)}</ul></div>'
    )


def _heat_map(label: str, weights: Array, queries: list[str], keys: list[str]) -> str:
    most = float(np.max(weights, initial=0.0)) or 1.0
    rows = []
    for query, row in zip(queries, weights, strict=True):
        cells = "".join(
            f'<td style="{_CELL};background:rgba(37,64,160,{float(weight) / most:.2f})" '
            f'title="{escape(query)} → {escape(key)}: {float(weight):.3f}"></td>'
            for key, weight in zip(keys, row, strict=True)
        )
        rows.append(f'<tr><th style="{_LABEL}">{escape(query)}</th>{cells}</tr>')
    return (
        f'<table style="border-collapse:collapse"><caption style="font:11px sans-serif">{escape(label)}</caption>'
        f"{''.join(rows)}</table>"
    )
