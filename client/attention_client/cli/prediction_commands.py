"""``attention predict``."""

from typing import Annotated

import typer

from attention_client.cli.model_options import Fields, options_of, takes
from attention_client.cli.recording_commands import ModelsDir, Target, Text
from attention_client.cli.reply_output import AsJson, present
from attention_client.recording import predict as predict_text
from attention_client.recording.checkpoint_model import load_predictor
from attention_contract.schemas.text_predictions import PredictText


@takes(options_of(PredictText, only={"edits", "position", "top_k"}, checked=True))
def predict(
    fields: Fields,
    ctx: typer.Context,
    checkpoint: Annotated[str, typer.Argument(help="A folder of transformers, here or inside the model repository.")],
    text: Text,
    target: Target = None,
    models_dir: ModelsDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the tokens that a whole model predicts here, unedited and with edits of its attention."""
    try:
        model, tokenizer = load_predictor(checkpoint, models_dir)
    except ImportError as fault:
        typer.echo(f"attention predict needs {fault.name}: pip install 'attention-service[transformers]'", err=True)
        raise typer.Exit(1) from None
    present(predict_text(model, tokenizer, text, target=target, **fields), as_json)
