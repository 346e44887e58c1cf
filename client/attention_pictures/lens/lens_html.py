"""A lens as a notebook shows it: a table with the token of the largest logit in each cell."""

from html import escape

import numpy as np

from attention_contract.schemas.analyses.lenses import ModelLensReply
from attention_pictures.lens.lens_grid import LensGrid, grid_of
from attention_pictures.sign_colours import background


def lens_html(reply: ModelLensReply) -> str | None:
    """A table for each text; None for a reply without readings."""
    texts = range(len(reply.labels)) if isinstance(reply.labels, list) else [None]
    if not any(layer.hidden or layer.output or layer.heads for layer in reply.layers):
        return None
    return "".join(_table(reply, grid_of(reply, text, reply.request_names.keys)) for text in texts)


def _table(reply: ModelLensReply, grid: LensGrid) -> str:
    most = float(np.nanmax(np.abs(grid.values), initial=0.0)) or 1.0
    scale = 1.0 if grid.quantity == "probability" else most
    head = "".join(f"<th scope='col'>{escape(column)}</th>" for column in grid.columns)
    body = "".join(
        f"<tr><th scope='row'>{escape(row)}</th>{''.join(map(_cell, words, values, [scale] * len(values)))}</tr>"
        for row, words, values in zip(grid.rows, grid.words, grid.values, strict=True)
    )
    kind = "Logit lens" if reply.kind == "logit" else "Jacobian lens"
    about = f"{kind} of {escape(reply.ran.model)}: colours are {escape(grid.quantity)}, up to {scale:.3g}"
    return (
        f"<div style='overflow-x:auto'><table><caption>{about}</caption>"
        f"<tr><th scope='col'>{grid.rows_name}</th>{head}</tr>{body}</table></div>"
    )


def _cell(word: str, value: float, scale: float) -> str:
    text = escape(word) or f"{value:.3g}"
    return f"<td style='background:{background(float(value) / scale)}' title='{value:.4g}'>{text}</td>"
