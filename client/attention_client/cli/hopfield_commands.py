"""``attention hopfield``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from attention_client.cli import result_tables, tensor_arguments
from attention_client.cli.answering import answer
from attention_client.cli.invocation import AsJson


def _beta(text: str) -> Any:
    """Parse one number, or several separated by commas."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"expected a number, or one for each head as in 0.5,2; got {text!r}", param_hint="--beta"
        ) from None
    return numbers if "," in text else numbers[0]


def hopfield(
    ctx: typer.Context,
    stored: Annotated[str, typer.Option(metavar="FILE", help="batch × heads × patterns × width.")],
    states: Annotated[str, typer.Option(metavar="FILE", help="batch × heads × states × width.")],
    beta: Annotated[
        str | None, typer.Option(metavar="NUMBER[,…]", help="Inverse temperature, or one a head; default: 1/√width.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Exactly this many updates; default: 1, unless --eps.")] = None,
    eps: Annotated[float | None, typer.Option(help="Update until the norm of an update is below this.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="With --eps: at most this many; default: 100.")] = None,
    stored_mask: Annotated[
        str | None, typer.Option(metavar="FILE", help="batch × patterns, true for a real one.")
    ] = None,
    projections: Annotated[
        str | None, typer.Option(metavar="FILE", help="A Hopfield layer's matrices: state, stored, output.")
    ] = None,
    num_heads: Annotated[int | None, typer.Option(help="Tensors are batch × length × heads·width.")] = None,
    return_association: Annotated[
        bool | None,
        typer.Option(
            "--return-association/--no-return-association",
            help="Ask for the association weights; default: with -o or --json.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", callback=tensor_arguments.writable, help="Write the reply, its association included."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let states fall to stored patterns: modern Hopfield retrieval."""
    wanted = as_json or output is not None if return_association is None else return_association
    fields: dict[str, Any] = {"steps": steps, "eps": eps, "max_steps": max_steps, "num_heads": num_heads}
    fields |= {"beta": None if beta is None else _beta(beta), "return_association": wanted}
    if stored_mask is not None:
        fields["stored_mask"] = tensor_arguments.read(stored_mask, "stored_mask")
    if projections is not None:
        fields["projections"] = tensor_arguments.read_all(projections, "projections")
    tensors = tensor_arguments.read(stored, "stored"), tensor_arguments.read(states, "states")
    answer(
        ctx, lambda client: client.hopfield.retrieve(*tensors, **fields), result_tables.retrieved,
        as_json=as_json, output=output, chief="states",
    )  # fmt: skip
