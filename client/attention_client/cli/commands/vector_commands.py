"""``attention vectors``: steering vectors, fitted to two files of texts, listed, exported and removed."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from attention_client.cli.arguments.model_options import Fields, options_of, takes
from attention_client.cli.arguments.text_files import texts_of_file
from attention_client.cli.commands.command_table import LAYERS, group
from attention_client.cli.commands.fit_prices import Price, longest_of, price_of
from attention_client.cli.commands.model_progress import loading_shown
from attention_client.cli.commands.request_commands import Model
from attention_client.cli.invocation import client_of
from attention_client.cli.tables.reply_output import AsJson, present
from attention_contract.schemas.analyses.vectors import FitVector

app = group("vectors", lists=False)
_OPTIONS: Final = options_of(FitVector, only={"position", "method", "layers"}, forms={"layers": LAYERS})


@app.command("fit")
@takes(_OPTIONS)
def fit(
    fields: Fields,
    ctx: typer.Context,
    model: Model,
    positive: Annotated[
        str | None, typer.Argument(help="A file with one text a line, to which the vector leads.")
    ] = None,
    negative: Annotated[
        str | None, typer.Argument(help="A file with one text a line, from which it leads away.")
    ] = None,
    gguf: Annotated[str | None, typer.Option(help="A GGUF control vector, in place of texts.", metavar="FILE")] = None,
    price: Price = False,
    as_json: AsJson = False,
) -> None:
    """Fit a steering vector to the texts of two files, or store a GGUF control vector."""
    if (positive is None) == (gguf is None):
        raise typer.BadParameter("expected either two FILEs of texts or --gguf", param_hint="POSITIVE")
    if (negative is None) != (positive is None):
        raise typer.BadParameter("expected a second FILE, with the texts to lead away from", param_hint="NEGATIVE")
    if price and positive is None:
        raise typer.BadParameter("a control vector is stored at once; leave it out", param_hint="--price")
    sides: list[Any] = [None if file is None else texts_of_file(file) for file in (positive, negative)]
    with client_of(ctx) as client, loading_shown(client, model):
        if price:
            texts = [text for side in sides for text in side]
            asked = {name: fields[name] for name in ("method", "layers") if name in fields}
            length = longest_of(client, model, texts)
            present(price_of(client, model, len(texts), length, vector=asked), as_json)
            return
        present(client.vectors.fit(model, *sides, gguf=gguf, **fields), as_json)


@app.command("export")
def export(
    ctx: typer.Context,
    vector: Annotated[str, typer.Argument(metavar="ID", help="The id of the vector.")],
    file: Annotated[Path, typer.Argument(help="The file to write, as in vector.gguf.")],
) -> None:
    """Write a steering vector as a GGUF file, which llama.cpp and repeng read. It has no direction of layer 0."""
    with client_of(ctx) as client:
        data = client.vectors.export(vector)
    file.write_bytes(data)
    typer.echo(f"{len(data)} bytes into {file}")
