"""``attention context``: the prompt with the parts highlighted that made each sentence of an answer."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.text import Text

from attention_client.calls.model_calls import MEASURES
from attention_client.cli.arguments.model_options import Fields, OptionForm, options_of, takes
from attention_client.cli.arguments.tensor_arguments import ending_in, read_json, read_object
from attention_client.cli.commands.model_progress import loading_shown
from attention_client.cli.commands.request_commands import Model
from attention_client.cli.invocation import client_of
from attention_client.cli.tables.reply_output import AsJson
from attention_client.cli.tables.table_output import print_out, table
from attention_contract.reply_names import head_name
from attention_contract.schemas.analyses.context import ContextReply, ContextRequest
from attention_contract.wire import to_json

if TYPE_CHECKING:
    from attention_pictures.context.highlights import PromptPiece

_LEGIBLE: Final = 0.3
"""The strength from which on a source has a colour behind it; a weaker one is as the rest."""
_MARKED: Final = 0.5
"""The strength from which on a source has brackets, where there are no colours."""
_HEADS: Final = 4
"""Heads that a line names."""


def _source(text: str) -> dict[str, Any]:
    return read_object(text, "sources") if text.startswith("{") else {"text": text}


_OPTIONS: Final = options_of(
    ContextRequest, without={"text"},
    forms={
        "messages": OptionForm(metavar="JSON|FILE", read=read_json),
        "sources": OptionForm(
            list[str], "TEXT|JSON", name="--source", read=lambda texts, _: [_source(text) for text in texts],
            about='A part of the prompt; as JSON with a name: {"name": "report", "text": "…"}. Default: each sentence.',
        ),
        "return_": OptionForm(list[str], "MEASURE", name="--return"),
    },
)  # fmt: skip
Shown = Annotated[
    Literal["hidden", "removed", "attention", "gradient"] | None,
    typer.Option(help="The measure to highlight; default: the first of these that is returned."),
]
AsHtml = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", callback=ending_in(".html"), help="Write a page to keep.")
]
AsSvg = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", callback=ending_in(".svg"), help="Write a picture to keep.")
]


@takes(_OPTIONS)
def context(
    fields: Fields,
    ctx: typer.Context,
    model: Model,
    text: Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message of the user, which the model answers.")
    ] = False,
    show: Shown = None,
    html: AsHtml = None,
    svg: AsSvg = None,
    as_json: AsJson = False,
) -> None:
    """Show which parts of a prompt made each sentence of an answer, given or generated.

    Orange parts are those that a sentence needs; blue ones speak against it.
    """
    from attention_pictures.context import context_files, highlights  # noqa: PLC0415 - another command draws nothing

    prompt = typer.get_text_stream("stdin").read() if text == "-" else text
    if chat:
        fields["messages"], prompt = [{"role": "user", "content": prompt or ""}], None
    if show is not None and show not in (wanted := fields.get("return_", MEASURES)):
        fields["return_"] = [*wanted, show]
    with client_of(ctx) as client, loading_shown(client, model):
        reply = client.models.context(model, prompt, **fields)
    if as_json:
        typer.echo(to_json(reply))
    measure = highlights.chosen_measure(reply, show) if highlights.values_of(reply) else None
    for path, write in ((html, context_files.context_html), (svg, context_files.context_svg)):
        if path is not None:
            if measure is None:
                raise typer.BadParameter(
                    "expected a measure of sources: attention, gradient, hidden or removed", param_hint="--return"
                )
            path.write_text(write(reply, measure), "utf-8")
    if as_json:
        return
    if measure is not None:
        for view in highlights.views(reply, measure):
            print_out(view.heading, "bold")
            print_out(_highlighted(view.pieces))
            print_out("")
    _print_numbers(reply, {name: highlights.whole(name, x) for name, x in highlights.values_of(reply).items()})


def _highlighted(pieces: Sequence["PromptPiece"]) -> Text:
    """The prompt with colours behind its sources; without a terminal, with brackets around the strongest."""
    drawn = Text()
    for piece in pieces:
        strong = piece.strength is not None and abs(piece.strength) >= _MARKED and not sys.stdout.isatty()
        drawn.append(f"[[{piece.text}]]" if strong else piece.text, _style(piece.strength))
    return drawn


def _style(strength: float | None) -> str:
    """The colour behind a source, from faint to full."""
    if strength is None or abs(strength) < _LEGIBLE:
        return ""
    from attention_pictures.sign_colours import NEGATIVE, POSITIVE  # noqa: PLC0415 - another command draws nothing

    red, green, blue = (int(abs(strength) * channel) for channel in (POSITIVE if strength > 0 else NEGATIVE))
    return f"white on rgb({red},{green},{blue})"


def _print_numbers(reply: ContextReply, values: dict[str, Any]) -> None:
    table([
        {"source": source.name, **{name: f"{x[at]:+.4g}" for name, x in values.items()}, "text": _short(source.text)}
        for at, source in enumerate(reply.sources)
    ])  # fmt: skip
    if reply.heads:
        heads = ", ".join(f"{head_name(head.layer, head.head)} {head.effect:+.3g}" for head in reply.heads[:_HEADS])
        print_out(f"heads that matter most: {heads}", "dim")
    if reply.lookback:
        ratios = [float(x) for layer in reply.lookback for x in layer.heads.mean(1)]
        print_out(f"lookback ratio: {sum(ratios) / len(ratios):.3f} on average over {len(ratios)} heads", "dim")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 48 else f"{line[:47]}…"
