"""The figure of a lens: a map whose cells have the token of the largest logit written in."""

from typing import Final

from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from attention_contract.reply_names import Names, heading
from attention_contract.schemas.analyses.lenses import ModelLensReply
from attention_contract.schemas.picture_options import PictureOptions
from attention_pictures import token_labels
from attention_pictures.cells import draw_cells
from attention_pictures.colour_ranges import colour_range, palette
from attention_pictures.figure_style import EDGE_IN, Sheet
from attention_pictures.heat_maps import BAR_IN, bar, bar_height, write_cell
from attention_pictures.lens.lens_grid import LensGrid, grid_of
from attention_pictures.statistic_maps import MOST_ROWS, left_out
from attention_pictures.text_sizes import fitted, widest
from attention_pictures.weight_figures import sequence_of

_ROW_IN, _TOP_IN, _AXIS_IN = 0.2, 0.06, 0.2
_LEAST_IN, _NARROW_IN, _MOST_IN = 0.3, 0.45, 0.9
"""The widths of a column: of short tokens at least, of long ones at least, and the largest."""
_SIZE: Final = 6.0
"""The font size of a token in a cell, in points."""
_ABOUT: Final = {
    "hidden": "the likeliest next token behind each layer",
    "output": "the tokens that each attention adds most to",
    "heads": "the tokens that each head adds most to",
}


def lens_figure(reply: ModelLensReply, options: PictureOptions, names: Names) -> Figure:
    """Draw a lens: layers or heads down, tokens across. Of more tokens than fit, the last ones are drawn."""
    text = sequence_of(options, len(reply.labels) if isinstance(reply.labels, list) else None)
    grid = grid_of(reply, text, names.keys)
    rows = grid.rows[:MOST_ROWS]
    width, height = options.inches, len(rows) * _ROW_IN
    row_ticks = token_labels.ticks(rows, len(rows), 1, height, across=False, most_width=0.2 * width)
    left = row_ticks.depth + _AXIS_IN + EDGE_IN
    most_in = width - left - BAR_IN - EDGE_IN
    wanted = widest([word for line in grid.words for word in line], _SIZE) + 0.06
    many = max(1, min(len(grid.columns), int(most_in / min(max(wanted, _LEAST_IN), _NARROW_IN))))
    first = len(grid.columns) - many
    side = min(most_in, many * _MOST_IN)
    column_ticks = token_labels.ticks(grid.columns[first:], many, 1, side, across=True, size=_SIZE)
    notes = [f"the last {many} of {len(grid.columns)} tokens; a wider picture has more"] if first else []
    notes += left_out(len(grid.rows), f"{grid.rows_name}s")
    notes += token_labels.skipping_note(row_ticks, column_ticks, (grid.rows_name, "token"))
    norm = Normalize(0, 1) if grid.quantity == "probability" else None
    values = grid.values[: len(rows), first:]
    norm = norm or colour_range(values, options.scale, signed=grid.signed)
    colours = palette(options, signed=grid.signed)
    tall = max(height, bar_height(grid.quantity))
    sheet = Sheet(options, _heading(reply, grid, names), notes, _TOP_IN + tall + column_ticks.depth + _AXIS_IN)
    axes = sheet.axes(left, _TOP_IN, side, height)
    draw_cells(axes, values, norm, colours, total=values.size)
    token_labels.put(axes, row_ticks, column_ticks)
    for row, line in enumerate(grid.words[: len(rows)]):
        for column, word in enumerate(line[first:]):
            if word:
                text_in = fitted(token_labels.readable(word), _SIZE, side / many - 0.03)
                write_cell(axes, (column, row), text_in, colours(norm(values[row, column])))
    sheet.name_axes((grid.rows_name, "token"), (left, _TOP_IN, side, height), column_ticks.depth)
    bar(sheet, norm, colours, grid.quantity, (_TOP_IN, tall))
    return sheet.figure


def _heading(reply: ModelLensReply, grid: LensGrid, names: Names) -> str:
    kind = "logit lens" if reply.kind == "logit" else "Jacobian lens"
    about = _ABOUT[grid.part] if any(map(any, grid.words)) else grid.quantity
    return heading(names, f"{kind}: {about}", f"{len(grid.rows)} {grid.rows_name}s × {len(grid.columns)} tokens")
