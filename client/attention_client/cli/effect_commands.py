"""``attention effects``."""

from functools import partial
from typing import Annotated, Any

import typer

from attention_client.cli import result_tables, tensor_arguments
from attention_client.cli.answering import answer
from attention_client.cli.compute_commands import Edits, Output, Rows
from attention_client.cli.inputs import Fields, Name, for_target, takes_inputs, with_query
from attention_client.cli.invocation import AsJson, ask
from attention_client.cli.plot_options import PlotFile, takes_plot

_EACH_HEAD = '{"tap": "context", "over": ["heads"], "set": 0}'
Sweep = Annotated[
    str,
    typer.Option(
        "--edit", metavar="JSON|FILE", help="The edit, and the axes that it sweeps over: heads, queries, keys."
    ),
]
Direction = Annotated[str | None, typer.Option(metavar="FILE", help="Measure the change along this too.")]


@takes_inputs
@takes_plot
def effects(
    inputs: Fields,
    ctx: typer.Context,
    name: Name = None,
    sweep: Sweep = _EACH_HEAD,
    edits: Edits = None,
    rows: Rows = None,
    direction: Direction = None,
    plot_file: PlotFile | None = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Show what each edit of a sweep does to the output; by default each head is knocked out in turn.

    -o writes the changes of the output too.
    """
    fields: dict[str, Any] = with_query(for_target(name, inputs))
    fields["sweep"] = tensor_arguments.read_object(sweep, "edit")
    if edits is not None:
        fields["edits"] = tensor_arguments.read_json(edits, "edits")
    fields["return_differences"] = output is not None
    if rows:
        fields["queries"] = rows
    if direction is not None:
        fields["direction"] = tensor_arguments.read(direction, "direction")
    call = partial(ask, operation="effects", name=name, fields=fields)
    show = result_tables.effects
    answer(ctx, call, show, as_json=as_json, plot_file=plot_file, output=output, chief="effects.norm")
