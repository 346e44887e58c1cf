"""Recordings as HTML for notebooks: the facts, and the weights of every head as a map to choose."""

from collections import defaultdict
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from attention_contract.notebook_maps import Maps, html_of

if TYPE_CHECKING:
    from attention_client.recording.recorded import Recording

_TEXT = 200
"""Characters of the text that are shown."""
MOST_BYTES = 2**26
"""Bytes of weights that are read. Later layers are named, and shown by ``recording.figure``."""


def render(recording: "Recording") -> str:
    """The facts, and the maps of all attentions between the same tokens together."""
    facts = recording.facts
    read, named, left = defaultdict(list), [], MOST_BYTES
    for attention in facts.attentions:
        queries, keys = recording.tokens(attention.name)
        size = 4 * len(attention.heads) * len(queries) * len(keys)
        if f"{attention.name}.weights" not in recording.tensors or size > left:
            named.append(f"{attention.name}: {len(attention.heads)} heads")
            continue
        left -= size
        read[tuple(queries), tuple(keys)].append(attention)
    maps = []
    for (rows, columns), attentions in read.items():
        weights = np.concatenate([recording.weights(each.name) for each in attentions])
        names = [f"{each.name} {label}" for each in attentions for label in each.heads]
        maps.append(Maps(weights, names, rows, columns, "Attention weights"))
    left_out = f"<p>{escape('; '.join(named))}</p>" if named else ""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    text = facts.text if len(facts.text) <= _TEXT else f"{facts.text[:_TEXT]}…"
    head = f"<div><b>{escape(facts.model)}</b>: {escape(text)}<br><small>{escape(versions)}</small></div>"
    return f"{head}{html_of(maps) or ''}{left_out}"
