"""Tables for people of what states inside a model would predict: layers down, tokens across, and contributions."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attention_client.cli.tables.model_tables import model_ran, number_of, readable
from attention_client.cli.tables.table_output import print_out, table
from attention_contract.reply_names import head_name
from attention_contract.schemas.analyses.lenses import LayerLens, LensPart, LensReading, ModelLensReply

_ACROSS: Final = 8
"""Tokens of one block of columns."""
_MAX_HEADS: Final = 20
"""Heads that a table has, those that contribute most."""
_NOTHING: Final = 1e-4
"""A contribution that is only rounding."""
_TOKENS_IN_ROW: Final = 3
"""Tokens that the row of a head names."""


def read_out(reply: ModelLensReply) -> None:
    """Print the likeliest token of each layer and position, and the contributions at the last position."""
    several = isinstance(reply.labels, list)
    for text in range(len(reply.labels) if isinstance(reply.labels, list) else 1):
        if several:
            print_out(f"text {text}", "bold")
        at = text if several else None
        _grid(reply, at, "hidden")
        _grid(reply, at, "output")
        _parts(reply, at)
    model_ran(reply.ran)


def _grid(reply: ModelLensReply, text: int | None, part: LensPart) -> None:
    """Print a row for each layer and a column for each token, with the token of the largest logit in each cell."""
    read = [(layer.layer, reading) for layer, reading in _readings(reply, part) if reading.top is not None]
    if not read:
        return
    positions, labels = _positions(reply, text), reply.request_names.keys or reply.labels_of(text or 0).tokens
    for start in range(0, len(positions), _ACROSS):
        columns = range(start, min(start + _ACROSS, len(positions)))
        table(
            {"adds" if part == "output" else "layer": str(layer)}
            | {
                f"{positions[at]} {readable(labels[positions[at]])}": _best(reply, _of(reading.top.ids, text)[at], 1)
                for at in columns
            }
            for layer, reading in read
        )
        print_out("")


def _parts(reply: ModelLensReply, text: int | None) -> None:
    """Print what each head, attention, MLP and the rest add to the targets at the last position that is read."""
    names = [readable(reply.name(target)) for target in reply.targets]
    rows: list[tuple[float, dict[str, str]]] = []
    for layer, reading in _readings(reply, "heads"):
        targets, top = _of(reading.targets, text), None if reading.top is None else _of(reading.top.ids, text)
        for head in range(len(top if targets is None else targets)):
            row = {"head": head_name(layer.layer, head)}
            if top is not None:
                row["adds most to"] = _best(reply, top[head, -1], _TOKENS_IN_ROW)
            size = float(_of(reading.top.logits, text)[head, -1, 0]) if reading.top is not None else 0.0
            if targets is not None:
                row |= _numbers(names, targets[head, -1])
                size = float(np.abs(targets[head, -1]).max())
            rows.append((size, row))
    rows.sort(key=lambda pair: -pair[0])
    table(row for _, row in rows[:_MAX_HEADS])
    if len(rows) > _MAX_HEADS:
        print_out(f"… and {len(rows) - _MAX_HEADS} heads that add less; --json gives all of them", "dim")
    if (rest := reply.rest) is None or reply.logits is None:
        return
    print_out("")
    others = _of(rest.others, text)[-1]
    parts = {
        "embeddings": _of(rest.embeddings, text)[-1],
        **{
            f"attention of layer {layer.layer}": _of(reading.targets, text)[-1]
            for layer, reading in _readings(reply, "output")
        },
        **{
            f"MLP of layer {layer.layer}": added[-1]
            for layer, added in zip(reply.layers, _of(rest.mlps, text), strict=True)
        },
        "biases": None if rest.biases is None else _of(rest.biases, text)[:, -1].sum(0),
        "other layers": others if np.abs(others).max() > _NOTHING else None,
        "unembedding": rest.unembedding,
        "logit": _of(reply.logits, text)[-1],
    }
    table({"part": name} | _numbers(names, part) for name, part in parts.items() if part is not None)


def _readings(reply: ModelLensReply, part: LensPart) -> Iterator[tuple[LayerLens, LensReading]]:
    for layer in reply.layers:
        if (reading := getattr(layer, part)) is not None:
            yield layer, reading


def _positions(reply: ModelLensReply, text: int | None) -> list[int]:
    positions: Any = reply.positions
    return list(positions if text is None else positions[text])


def _of(array: NDArray[Any] | None, text: int | None) -> Any:
    """The part of a tensor that belongs to one text."""
    return array if array is None or text is None else array[text]


def _best(reply: ModelLensReply, ids: NDArray[Any], count: int) -> str:
    return "  ".join(readable(reply.name(int(token_id))) for token_id in ids[:count])


def _numbers(names: list[str], values: NDArray[Any]) -> dict[str, str]:
    return {name: number_of(value) for name, value in zip(names, values, strict=True)}
