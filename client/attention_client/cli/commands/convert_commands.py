"""``attention convert``: a checkpoint in another form as a folder that the server opens."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder with config.json, or a file in it.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, which does not exist yet.")],
    model_type: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="TYPE", help="The model type of transformers, such as bert, in place of config.json's."
        ),
    ] = None,
) -> None:
    """Write a checkpoint of pickled tensors, own classes or a list of tokens as a folder that the server opens.

    Nothing but tensors is unpickled, and no code is run. Each line says what was read, assumed, renamed or left out.
    """
    try:
        from attention_client.conversion import conversion, stored_tensors  # noqa: PLC0415 - PyTorch takes seconds
    except ModuleNotFoundError as fault:
        typer.echo(f"attention convert needs {fault.name}: pip install 'attention-service[transformers]'", err=True)
        raise typer.Exit(1) from None
    conversion.quiet()
    try:
        for line in conversion.convert(source, target, model_type):
            typer.echo(line)
    except stored_tensors.ConversionError as fault:
        typer.echo(f"not converted: {fault}", err=True)
        raise typer.Exit(1) from None
