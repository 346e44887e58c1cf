"""``attention predict``."""

from pathlib import Path
from typing import Annotated

import typer

from attention_client.cli import tensor_arguments
from attention_client.cli.display import new_table, number, print_out
from attention_client.cli.invocation import AsJson, Target, Text, present
from attention_client.recording import predict as predict_text
from attention_client.recording.checkpoint_model import load_predictor
from attention_contract.schemas.text_predictions import TextPredictions


def predict(
    checkpoint: Annotated[str, typer.Argument(help="A folder of transformers, here or inside the model repository.")],
    text: Text,
    target: Target = None,
    edits: Annotated[
        str | None, typer.Option(metavar="JSON|FILE", help="Lists of edits by attention, such as layers.0.")
    ] = None,
    position: Annotated[
        int | None, typer.Option(min=0, help="The token whose prediction to show. Default: the last.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, max=100, help="Tokens to name of each prediction.")] = 5,
    models_dir: Annotated[
        Path | None, typer.Option(envvar="ATTENTION_MODELS_DIR", help="The model repository, if it is on this machine.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the tokens that a whole model predicts here, unedited and with edits of its attention."""
    try:
        model, tokenizer = load_predictor(checkpoint, models_dir)
    except ImportError as fault:
        typer.echo(f"attention predict needs {fault.name}: pip install 'attention-service[transformers]'", err=True)
        raise typer.Exit(1) from None
    changes = tensor_arguments.read_json(edits, "edits") if edits is not None else None
    reply = predict_text(model, tokenizer, text, edits=changes, target=target, position=position, top_k=top_k)
    present(reply, as_json, _show)


def _show(reply: TextPredictions) -> None:
    place = "after" if reply.predicts == "next" else "in the place of"
    print_out(f"the prediction {place} {reply.tokens[reply.position]!r}, token {reply.position}")
    table = new_table("token", "unedited", "edited", "logit", "edited logit")
    for each in reply.top:
        table.add_row(
            each.token,
            number(each.probability),
            number(each.edited_probability),
            number(each.logit),
            number(each.edited_logit),
        )
    print_out(table)
    changes = ", ".join(f"{token} {number(each)}" for token, each in zip(reply.tokens, reply.divergence, strict=True))
    print_out(f"divergence in nats: {changes}")
