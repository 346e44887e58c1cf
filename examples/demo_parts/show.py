"""Tables of weights, statistics and execution in a terminal: shaded grids, or plain numbers without colours."""

import math
from collections.abc import Callable, Sequence

import torch
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from demo_parts.encoder import LayerSeen

LIGHT, DARK = (239, 246, 252), (8, 64, 129)
WIDEST_LABEL = 10


def weights(console: Console, layers: Sequence[LayerSeen], layer: int, head: int, tokens: Sequence[str]) -> None:
    """Draw the weights of one head: a row per query, a column per key."""
    shown = layers[layer].weights[head]
    console.print(Text(f"\nlayer {layer}, head {head}: rows look at columns, in percent", style="bold"))
    _grid(console, tokens, tokens, shown, lambda weight: f"{100 * weight:.0f}", 1.0)


def statistics(console: Console, layers: Sequence[LayerSeen], tokens: Sequence[str]) -> None:
    """Print each statistic, with a number per head and layer."""
    heads = [str(head) for head in range(layers[0].weights.shape[0])]
    names = [f"layer {index}" for index in range(len(layers))]
    nats, far = math.log(len(tokens)), len(tokens) / 2
    for title, name, full in (
        ("entropy, in nats", "entropy", nats),
        ("largest weight", "max_weight", 1.0),
        ("mean distance, in tokens", "mean_distance", far),
        (f"share of the first key, {tokens[0]}", "first_key", 1.0),
        ("share of the own position", "own_position", 1.0),
    ):
        values = torch.stack([torch.as_tensor(getattr(layer.statistics, name)[0]) for layer in layers])
        console.print(Text(f"\n{title}, by head", style="bold"))
        _grid(console, names, heads, values, lambda value: f"{value:.2f}", full)


def ran(console: Console, layers: Sequence[LayerSeen]) -> None:
    """Print how the service computed each layer."""
    console.print(Text("\nwhat ran, one forward a layer", style="bold"))
    table = Table(box=None, pad_edge=False, header_style="")
    for column in ("module", "version", "kernel", "device", "dtype"):
        table.add_column(column)
    for column in ("batch", "MFLOP", "peak KiB", "predicted ms", "compute ms", "queue ms"):
        table.add_column(column, justify="right")
    for layer in layers:
        facts = layer.ran
        times = (f"{ms:.3f}" for ms in (facts.predicted_ms, facts.compute_ms, facts.queue_ms))
        counts = (str(facts.batch), f"{facts.flops / 1e6:.2f}", f"{facts.peak_bytes / 1024:.0f}")
        version = (facts.version or "")[:8]
        table.add_row(Text(layer.module), version, facts.kernel, facts.device, facts.dtype, *counts, *times)
    console.print(table)


def _grid(
    console: Console,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Tensor,
    write: Callable[[float], str],
    full: float,
) -> None:
    """Print values ``[rows, columns]``, darkest at ``full``; columns that do not fit go below."""
    label = max(map(cell_len, rows)) + 1
    cell = min(max(4, *map(cell_len, columns)), WIDEST_LABEL) + 1
    numbers: list[list[float]] = values.tolist()
    fitting = max(1, (console.width - label) // cell)
    for start in range(0, len(columns), fitting):
        block = range(start, min(start + fitting, len(columns)))
        line = Text(" " * label)
        for column in block:
            line.append(_right(columns[column], cell))
        console.print(line, no_wrap=True)
        for name, row in zip(rows, numbers, strict=True):
            line = Text(set_cell_size(name, label))
            for column in block:
                line.append(_right(write(row[column]), cell), style=_shade(console, row[column] / full if full else 0))
            console.print(line, no_wrap=True)


def _right(text: str, width: int) -> str:
    """Align the text right in a cell, with a blank on each side."""
    shown = set_cell_size(text, min(cell_len(text), width - 1))
    return " " * (width - cell_len(shown)) + shown


def _shade(console: Console, share: float) -> str:
    if console.color_system not in {"256", "truecolor"}:
        return ""
    share = min(max(share, 0.0), 1.0)
    red, green, blue = (round(light + share * (dark - light)) for light, dark in zip(LIGHT, DARK, strict=True))
    return f"{'white' if share > 0.5 else 'black'} on rgb({red},{green},{blue})"
