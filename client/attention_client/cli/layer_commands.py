"""``attention rollout`` and ``similarity``: several layers or heads whose weights are sent from files."""

from functools import partial
from typing import Annotated, Any

import typer

from attention_client.cli import recording_tables, tensor_arguments
from attention_client.cli.answering import answer
from attention_client.cli.compute_commands import Labels, Output, read_labels
from attention_client.cli.invocation import AsJson
from attention_client.cli.plot_options import PlotFile, takes_plot

Combine = Annotated[str, typer.Option(help="The heads of a layer in one: mean, max or min.")]
Residual = Annotated[float, typer.Option(help="The share of the residual connection.")]
Discard = Annotated[float, typer.Option(help="The share of the smallest weights of a row to leave out.")]
Traced = Annotated[
    list[int] | None, typer.Option("--row", min=0, help="Trace this token back; may be repeated. Default: all.")
]


@takes_plot
def rollout(
    ctx: typer.Context,
    weights: Annotated[str, typer.Argument(metavar="FILE", help="layers × heads × tokens × tokens.")],
    method: Annotated[str, typer.Option(metavar="NAME", help="rollout, flow or relevance.")] = "rollout",
    combine: Combine = "mean",
    residual: Residual = 0.5,
    discard: Discard = 0.0,
    queries: Traced = None,
    labels: Labels = None,
    plot_file: PlotFile | None = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Show which inputs the state of each token comes from, over layers whose weights a file holds."""
    fields: dict[str, Any] = {"method": method, "combine": combine, "residual": residual, "discard": discard}
    fields |= {"queries": queries or None, "labels": read_labels(labels)}
    fields["weights"] = tensor_arguments.read(weights, "weights")
    show = partial(recording_tables.rollout, queries=queries, labels=fields["labels"])
    answer(
        ctx, lambda client: client.attention.rollout(**fields), show,
        as_json=as_json, plot_file=plot_file, output=output,
    )  # fmt: skip


@takes_plot
def similarity(
    ctx: typer.Context,
    a: Annotated[str, typer.Argument(metavar="FILE", help="heads × queries × keys; features: heads × tokens × width.")],
    b: Annotated[str | None, typer.Argument(metavar="FILE", help="The others; by default the same.")] = None,
    cka: Annotated[
        bool, typer.Option("--cka", help="Of features, by linear CKA; default: of weights, by their divergence.")
    ] = False,
    plot_file: PlotFile | None = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Show the most similar heads of each, by weights or features that files hold."""
    fields: dict[str, Any] = {"measure": "cka" if cka else "jensen_shannon", "a": tensor_arguments.read(a, "a")}
    fields["b"] = None if b is None else tensor_arguments.read(b, "b")
    show = partial(recording_tables.sent_similarity, same=b is None)
    answer(
        ctx, lambda client: client.attention.similarity(**fields), show,
        as_json=as_json, plot_file=plot_file, output=output,
    )  # fmt: skip
