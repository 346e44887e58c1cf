"""Recordings as HTML for notebooks: the facts, and the weights of every head as a map to choose."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from attention_contract.schemas.recordings import RecordingFacts
from attention_contract.tensors import Array
from attention_pictures.notebook.notebook_maps import Maps, html_of

_TEXT = 200
"""Characters of the text that are shown."""
MOST_BYTES = 2**26
"""Bytes of weights that are read. Later layers are named, and shown by ``recording.figure``."""


def render(
    facts: RecordingFacts,
    tokens: Callable[[str], tuple[Sequence[str], Sequence[str]]],
    weights_of: Callable[[str], Array | None],
) -> str:
    """The facts, and the maps of all attentions between the same tokens together.

    ``tokens`` gives the labels of the queries and keys of an attention; ``weights_of`` its weights ``[H, Lq, Lk]``, if
    they are recorded.
    """
    read, named, left = defaultdict(list), [], MOST_BYTES
    for attention in facts.attentions:
        queries, keys = tokens(attention.name)
        size = 4 * len(attention.heads) * len(queries) * len(keys)
        head_weights = weights_of(attention.name) if size <= left else None
        if head_weights is None:
            named.append(f"{attention.name}: {len(attention.heads)} heads")
            continue
        left -= size
        read[tuple(queries), tuple(keys)].append((attention, head_weights))
    maps = []
    for (rows, columns), attentions in read.items():
        weights = np.concatenate([head_weights for _, head_weights in attentions])
        names = [f"{attention.name} {label}" for attention, _ in attentions for label in attention.heads]
        maps.append(Maps(weights, names, rows, columns, "Attention weights"))
    left_out = f"<p>{escape('; '.join(named))}</p>" if named else ""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    text = facts.text if len(facts.text) <= _TEXT else f"{facts.text[:_TEXT]}…"
    head = f"<div><b>{escape(facts.model)}</b>: {escape(text)}<br><small>{escape(versions)}</small></div>"
    return f"{head}{html_of(maps) or ''}{left_out}"
