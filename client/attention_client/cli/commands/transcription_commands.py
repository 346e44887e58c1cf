"""``attention transcribe``: the text of a sound, with the time of each word, or as captions."""

from typing import Annotated, Final, Literal

import typer

from attention_client.cli.arguments.model_options import Fields, options_of, takes
from attention_client.cli.commands.model_progress import loading_shown
from attention_client.cli.commands.request_commands import Model
from attention_client.cli.invocation import client_of
from attention_client.cli.tables.reply_output import AsJson
from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_contract.wire import to_json

_OPTIONS: Final = options_of(TranscriptionRequest, only={"language", "prompt", "temperature", "overlap"})
_Captions = Literal["srt", "vtt"]


@takes(_OPTIONS)
def transcribe(
    fields: Fields,
    ctx: typer.Context,
    model: Model,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The sound: a WAV, FLAC, OGG or MP3 file.")],
    form: Annotated[
        _Captions | None, typer.Option("--format", help="Write captions: SubRip or WebVTT.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write down what is said in a sound, with the seconds at which each word begins and ends."""
    with client_of(ctx) as client, loading_shown(client, model):
        reply = client.models.transcribe(model, file, response_format="verbose_json", **fields)
    if as_json:
        typer.echo(to_json(reply))
        return
    if form is not None:
        typer.echo(reply.captions(form), nl=False)
        return
    for word in reply.words or ():
        typer.echo(f"{word.start:8.2f} {word.end:8.2f}  {word.word}")
    typer.echo(reply.text)
