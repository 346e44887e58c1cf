"""``attention forward``, ``weights``, ``attribution`` and ``gradients``."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from attention_client.cli import attribution_tables, completion, result_tables, tensor_arguments
from attention_client.cli.answering import answer
from attention_client.cli.inputs import Fields, Name, Returned, for_target, takes_inputs, with_query
from attention_client.cli.invocation import AsJson, ask
from attention_client.cli.plot_options import PlotFile, takes_plot
from attention_contract.schemas.attribution import AttributionMethod

Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        callback=tensor_arguments.writable,
        help="Write the reply: .npy, .npz, .safetensors or .json; - is standard output.",
    ),
]
Heads = Annotated[list[int] | None, typer.Option("--head", min=0, help="Only this head; may be repeated.")]
Rows = Annotated[list[int] | None, typer.Option("--row", min=0, help="Only this query; may be repeated.")]
Edits = Annotated[str | None, typer.Option(metavar="JSON|FILE", help="Interventions, a list of objects.")]
Dropout = Annotated[
    str | None,
    typer.Option(metavar="P|JSON", help='Drop weights: a share, or {"p": 0.1, "seed": 0, "return_mask": true}.'),
]
ReturnState = Annotated[bool, typer.Option("--return-state", help="Method linear: the state at the end.")]
ReportError = Annotated[bool, typer.Option("--report-error", help="Compare a method with exact attention.")]
Average = Annotated[bool, typer.Option("--average-heads", help="Average the weights over the heads.")]

Labels = Annotated[
    str | None, typer.Option(metavar="WORDS|FILE", help="With --plot: a label for each key; a JSON list or words.")
]
QueryLabels = Annotated[str | None, typer.Option(metavar="WORDS|FILE", help="With --plot: a label for each query.")]
Compare = Annotated[bool, typer.Option("--differences", help="With edits: show what they change too.")]
Upstream = Annotated[str | None, typer.Option(metavar="FILE", help="∂L/∂output; default: ones.")]


def _select(heads: list[int] | None, rows: list[int] | None) -> Fields:
    """Return the request field ``select``, if there is anything to select."""
    select = {name: values for name, values in (("heads", heads), ("queries", rows)) if values}
    return {"select": select} if select else {}


def _forward_fields(returned: list[str] | None, edits: str | None, dropout: str | None) -> Fields:
    fields: Fields = {}
    if returned:
        fields["return_"] = returned
    if edits is not None:
        fields["edits"] = tensor_arguments.read_json(edits, "edits")
    if dropout is not None:
        try:
            fields["dropout"] = {"p": float(dropout)}
        except ValueError:
            fields["dropout"] = tensor_arguments.read_object(dropout, "dropout")
    return fields


@takes_inputs
@takes_plot
def forward(
    inputs: Fields,
    ctx: typer.Context,
    name: Name = None,
    returned: Returned = None,
    heads: Heads = None,
    rows: Rows = None,
    average: Average = False,
    edits: Edits = None,
    dropout: Dropout = None,
    return_state: ReturnState = False,
    report_error: ReportError = False,
    compare: Compare = False,
    plot_file: PlotFile | None = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Compute the output of a module or of raw attention, and any taps."""
    fields: dict[str, Any] = (
        with_query(for_target(name, inputs)) | _forward_fields(returned, edits, dropout) | _select(heads, rows)
    )
    fields |= {"average_heads": average, "return_state": return_state, "report_error": report_error}
    fields["compare"] = "unedited" if compare else None
    call = partial(ask, operation="forward", name=name, fields=fields)
    answer(ctx, call, result_tables.forward, as_json=as_json, plot_file=plot_file, output=output, chief="output")


def read_labels(text: str | None) -> list[str] | None:
    """Read labels: words, a JSON list, or a file with either."""
    if text is None:
        return None
    if Path(text).is_file():
        text = Path(text).read_text("utf-8")
    if not text.lstrip().startswith("["):
        return text.split()
    try:
        read = json.loads(text)
    except ValueError:  # as in [CLS] the cat
        return text.split()
    return [str(label) for label in read]


@takes_inputs
@takes_plot
def weights(
    inputs: Fields,
    ctx: typer.Context,
    name: Name = None,
    return_weights: Annotated[
        bool | None,
        typer.Option("--return-weights/--no-return-weights", help="Ask for the weights; default: with -o or --json."),
    ] = None,
    pool: Annotated[
        int | None,
        typer.Option(help="With -o or --json: the largest weight of each square of so many queries and keys."),
    ] = None,
    top_k: Annotated[int, typer.Option(help="How many of the most attended keys to name for each query.")] = 0,
    heads: Heads = None,
    rows: Rows = None,
    average: Average = False,
    edits: Edits = None,
    query_mask: Annotated[str | None, typer.Option(metavar="FILE", help="batch × queries, true where real.")] = None,
    statistics: Annotated[
        list[str] | None, typer.Option("--statistic", metavar="NAME", help="A statistic to show; may be repeated.")
    ] = None,
    statistic_options: Annotated[
        str | None, typer.Option(metavar="JSON", help='Their options: {"window": 8, "sinks": 1, "tokens": […]}.')
    ] = None,
    compare: Compare = False,
    labels: Labels = None,
    query_labels: QueryLabels = None,
    plot_file: PlotFile | None = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Show each head's weights: statistics, the most attended keys, and with -o or --json the weights themselves."""
    fields: dict[str, Any] = with_query(for_target(name, inputs)) | _select(heads, rows)
    wanted = as_json or output is not None if return_weights is None else return_weights
    fields |= {"top_k": top_k, "average_heads": average, "return_weights": wanted, "pool": pool}
    if edits is not None:
        fields["edits"] = tensor_arguments.read_json(edits, "edits")
    if query_mask is not None:
        fields["query_mask"] = tensor_arguments.read(query_mask, "query_mask")
    if statistic_options is not None:
        fields["statistic_options"] = tensor_arguments.read_json(statistic_options, "statistic-options")
    fields |= {"statistics": statistics or None, "compare": "unedited" if compare else None}
    fields |= {"labels": read_labels(labels), "query_labels": read_labels(query_labels)}
    call = partial(ask, operation="weights", name=name, fields=fields)
    show = partial(result_tables.weights, chosen=heads, rows=rows)
    answer(ctx, call, show, as_json=as_json, plot_file=plot_file, output=output, chief="weights")


@takes_inputs
@takes_plot
def attribution(
    inputs: Fields,
    ctx: typer.Context,
    name: Name = None,
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", metavar="NAME", help=f"{', '.join(get_args(AttributionMethod))}; may be repeated."),
    ] = None,
    upstream: Upstream = None,
    readout: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="L is the log-likelihood of targets; the file has weight, bias and targets."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Points of the path of integrated.")] = 32,
    heads: Heads = None,
    rows: Rows = None,
    edits: Edits = None,
    compare: Compare = False,
    labels: Labels = None,
    query_labels: QueryLabels = None,
    plot_file: PlotFile | None = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Attribute L, the sum of output times upstream, to each weight and each head."""
    fields: dict[str, Any] = with_query(for_target(name, inputs)) | _select(heads, rows) | {"steps": steps}
    if methods:
        fields["methods"] = methods
    if upstream is not None:
        fields["upstream"] = tensor_arguments.read(upstream, "upstream")
    if readout is not None:
        fields["readout"] = tensor_arguments.read_all(readout, "readout")
    if edits is not None:
        fields["edits"] = tensor_arguments.read_json(edits, "edits")
    if compare:
        fields["compare"] = "unedited"
    fields |= {"labels": read_labels(labels), "query_labels": read_labels(query_labels)}
    call = partial(ask, operation="attribution", name=name, fields=fields)
    answer(ctx, call, attribution_tables.attributions, as_json=as_json, plot_file=plot_file, output=output)


@takes_inputs
def gradients(
    inputs: Fields,
    ctx: typer.Context,
    name: Name = None,
    wrt: Annotated[
        list[str] | None,
        typer.Option(autocompletion=completion.differentiable, help="An input, a tap, a parameter, or parameters."),
    ] = None,
    upstream: Upstream = None,
    check: Annotated[bool, typer.Option("--check", help="Compare with central differences in float64.")] = False,
    tap_upstream: Annotated[
        str | None, typer.Option(metavar="FILE", help="∂L/∂tap of taps, named by them: .safetensors, .npz.")
    ] = None,
    directions: Annotated[
        str | None, typer.Option(metavar="FILE", help="Hessian-vector products along these, named as --wrt.")
    ] = None,
    returned: Returned = None,
    heads: Heads = None,
    rows: Rows = None,
    average: Average = False,
    edits: Edits = None,
    dropout: Dropout = None,
    return_state: ReturnState = False,
    report_error: ReportError = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Compute exact gradients with respect to inputs, taps and parameters."""
    fields: dict[str, Any] = with_query(for_target(name, inputs)) | _forward_fields(returned, edits, dropout)
    fields |= _select(heads, rows) | {"wrt": wrt or ["query"], "check": check}
    fields |= {"average_heads": average, "return_state": return_state, "report_error": report_error}
    if tap_upstream is not None:
        fields["tap_upstream"] = tensor_arguments.read_all(tap_upstream, "tap_upstream")
    if directions is not None:
        fields["directions"] = tensor_arguments.read_all(directions, "directions")
    if upstream is not None:
        fields["upstream"] = tensor_arguments.read(upstream, "upstream")
    call = partial(ask, operation="gradients", name=name, fields=fields)
    answer(ctx, call, result_tables.gradients, as_json=as_json, output=output)
