"""The steps of one query's attention as a figure. Needs matplotlib (extra ``plot``)."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from attention_client.cli.explain.explanation import ExplainedStep, Explanation
from attention_contract.schemas.picture_options import PictureOptions
from attention_pictures.colour_ranges import palette

_MAX_WRITTEN = 12
"""The most numbers of a row that are written into its cells."""
_FORMULA = 90
"""Characters of a formula that stand over a step."""


def draw(explanation: Explanation, path: Path, shown: NDArray[np.intp]) -> None:
    """Draw forward steps on the left and backward steps on the right, each as cells coloured by its numbers.

    ``shown`` are the positions of the keys to draw. The suffix of the path is the format.
    """
    columns = (explanation.forward, explanation.backward)
    rows = max(map(len, columns))
    heights = [
        max(len(shown) if at < len(steps) and steps[at].values.ndim == 2 else 1 for steps in columns)
        for at in range(rows)
    ]
    figure = Figure(figsize=(15, 0.9 * rows + 0.28 * sum(heights) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, 2, height_ratios=[height + 1.5 for height in heights])
    for column, (title, steps) in enumerate(zip(("forward", "backward"), columns, strict=True)):
        for at, step in enumerate(steps):
            axes = figure.add_subplot(grid[at, column])
            label = f"{step.symbol}   {step.formula}"
            label = label if len(label) <= _FORMULA else f"{label[:_FORMULA]}…"
            axes.set_title(f"{title} {at + 1}:  {label}", fontsize=8, loc="left", parse_math=False)
            _cells(axes, step, shown)
    figure.suptitle(
        f"query {explanation.query} of head {explanation.head}, sequence {explanation.sequence}",
        fontsize=10,
        parse_math=False,
    )
    figure.savefig(path)


def _cells(axes: Any, step: ExplainedStep, shown: NDArray[np.intp]) -> None:
    chosen = step.values[shown] if step.per_key else step.values
    cells = np.atleast_2d(chosen.astype(np.float64))
    finite = np.ma.masked_invalid(cells)
    limit = float(np.abs(finite).max()) if finite.count() else 0.0
    axes.imshow(finite, cmap=palette(PictureOptions(), signed=True), vmin=-(limit or 1), vmax=limit or 1, aspect="auto")
    rows, columns = cells.shape
    if columns <= _MAX_WRITTEN:
        for row, column in np.ndindex(rows, columns):
            value = cells[row, column]
            written = "−∞" if value == -np.inf else f"{value:.3g}"
            dark = np.isfinite(value) and abs(value) > 0.6 * (limit or 1)
            axes.text(column, row, written, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axes.set_xticks([])
    axes.set_yticks([])
    if step.per_key and step.values.ndim == 1 and columns <= 32:
        axes.set_xticks(range(columns), [f"key {at}" for at in shown], fontsize=6)
    elif step.per_key and step.values.ndim == 2:
        axes.set_yticks(range(rows), [f"key {at}" for at in shown], fontsize=6)
