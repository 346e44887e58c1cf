"""``attention models graph``: the paths of a prediction as an attribution graph."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from attention_client.attribution_graph import attribution_graph
from attention_client.cli.arguments.tensor_arguments import ending_in
from attention_client.cli.commands.model_progress import loading_shown
from attention_client.cli.commands.request_commands import Model
from attention_client.cli.invocation import client_of

Graph = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE", callback=ending_in(".json"), help="Write the graph: a .json file."),
]


def graph(
    ctx: typer.Context,
    model: Model,
    text: Annotated[str, typer.Argument(help="The text whose next token is predicted.")],
    output: Graph,
    other: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="A text of as many tokens that gives the changed outputs. Default: their means."
        ),
    ] = None,
    smallest: Annotated[float, typer.Option(min=0, help="Leave out links of a smaller magnitude.")] = 0.01,
) -> None:
    """Write how heads, MLPs and embeddings make a prediction, as a graph for circuit-tracer or Neuronpedia.

    Every pair of components is a path that is tried; attention models effects tries some of them.
    """
    change: dict[str, Any] = {"set": "mean"} if other is None else {"text": other}
    senders = {"parts": ["heads", "mlps", "embeddings"], **change}
    receivers = {"parts": ["q", "k", "v", "mlps", "logits"]}
    with client_of(ctx) as client, loading_shown(client, model):
        reply = client.models.effects(model, text, from_=senders, to=receivers)
    content = attribution_graph(reply, output.stem, smallest=smallest)
    output.write_text(json.dumps(content), "utf-8")
    typer.echo(f"{output}: {len(content['nodes'])} nodes, {len(content['links'])} links")
