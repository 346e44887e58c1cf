"""``attention generate`` and ``attention chat``: tokens as they come, with the tokens that the heads looked at."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

import typer

from attention_client.cli.arguments.model_options import Fields, OptionForm, options_of, takes
from attention_client.cli.commands.command_table import LAYERS
from attention_client.cli.commands.model_progress import loading_shown
from attention_client.cli.commands.request_commands import Model
from attention_client.cli.invocation import client_of
from attention_client.cli.tables.model_tables import readable
from attention_client.cli.tables.reply_output import AsJson, OutputRows, PlotPage, write_page
from attention_client.cli.tables.row_files import write_rows
from attention_client.client import Client
from attention_client.media_files import data_url
from attention_contract.reply_names import head_name
from attention_contract.schemas.openai import (
    AttentionOfTokens,
    ChatCompletion,
    ChatCompletionRequest,
    ChatPiece,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    GeneratedToken,
)
from attention_contract.schemas.prompts import TokenLabelsReply
from attention_contract.wire import to_json

_SAMPLING: Final = options_of(
    CompletionRequest,
    only={
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
        "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "forced_bos_token_id",
        "adapter",
    },
    forms={
        "forced_bos_token_id": OptionForm(metavar="TOKEN", read=lambda text, _: int(text) if text.isdigit() else text)
    },
)  # fmt: skip


def _named_tokens(given: list[str], _: str) -> list[int | str]:
    """Parse tokens: ids, and texts that are one token."""
    return [int(token) if token.isdecimal() else token for token in given]


_OF_TEXTS: Final = options_of(
    CompletionRequest, only={"add_special_tokens", "logprob_tokens"},
    forms={"logprob_tokens": OptionForm(
        list[str], "TOKEN", name="--logprob-token", read=_named_tokens,
        about="Show the log-probability of this token, an id or its text, at each position. May be repeated.",
    )},
)  # fmt: skip


def _steered(given: list[str], _: str) -> list[dict[str, Any]]:
    """Parse vectors with their scales, as in ID=4; without one it is 1."""
    parts = [option.partition("=") for option in given]
    try:
        return [{"vector": vector, "scale": float(scale) if sign else 1.0} for vector, sign, scale in parts]
    except ValueError as fault:
        raise typer.BadParameter(f"expected ID=SCALE; {fault}", param_hint="--steer") from None


def _watched(given: list[str], _: str) -> list[dict[str, Any]]:
    """Parse probes, each with the score that ends the text, as in ID=0.9; without one it ends none."""
    parts = [option.partition("=") for option in given]
    try:
        return [{"probe": probe} | ({"stop": {"above": float(above)}} if sign else {}) for probe, sign, above in parts]
    except ValueError as fault:
        raise typer.BadParameter(f"expected ID or ID=SCORE; {fault}", param_hint="--watch") from None


_ATTENTION: Final = options_of(
    AttentionOfTokens, only={"layers", "heads", "edits", "statistics", "steer", "from_", "watch"},
    within=("attention",),
    forms={
        "layers": LAYERS,
        "steer": OptionForm(list[str], "ID=SCALE", name="--steer", read=_steered),
        "watch": OptionForm(
            list[str], "ID[=SCORE]", name="--watch", read=_watched,
            about="Show the score of each token by this linear probe; with a score, the first larger one ends the text."
            " May be repeated.",
        ),
    },
)  # fmt: skip
_OPTIONS: Final = _SAMPLING | _ATTENTION
_CHAT_OPTIONS: Final = _OPTIONS | options_of(ChatCompletionRequest, only={"chat_template_kwargs"})
_TOP_K: Final = 8
"""Keys of each head that are asked for: their mean names the tokens that many heads share."""
_KEYS_IN_LINE: Final = 3
"""Keys that one line names."""
_ID: Final = 6
"""Characters that name a probe in a line."""
_MAX_HEADS_APART: Final = 4
"""The most heads that have their own part of a line."""
Images = Annotated[
    list[str] | None, typer.Option("--image", metavar="FILE", help="An image that goes with the first message.")
]
Content = str | list[dict[str, Any]]
"""A text, or parts: images and a text."""
Look = Annotated[bool, typer.Option("--look/--no-look", help="Show what each token's heads looked at.")]


@takes(_OPTIONS | _OF_TEXTS)
def generate(
    fields: Fields,
    ctx: typer.Context,
    model: Model,
    text: Annotated[str, typer.Argument(help="The text to continue.")],
    image: Images = None,
    look: Look = True,
    as_json: AsJson = False,
    plot: PlotPage = None,
    output: OutputRows = None,
) -> None:
    """Continue a text, and show what the heads looked at for each new token.

    With at most four heads (--layer, --head), each has its own keys; otherwise the mean over the heads is shown. With
    images, the text is a message that the model answers.
    """
    program = as_json or plot is not None or output is not None
    if "statistics" in fields.get("attention", {}) and not program:
        raise typer.BadParameter("the lines name keys alone; add --json, --output or --plot", param_hint="--statistic")
    if output is not None and not look:
        raise typer.BadParameter("without it there are no rows; leave it out", param_hint="--no-look")
    _name_tokens(fields, shown=look or as_json, chats=bool(image))
    _ask(fields, look)
    if output is not None:
        fields["attention"] = {"statistics": None} | {
            name: value for name, value in fields["attention"].items() if value != []
        }
    if plot is not None and look:
        fields["attention"] |= {"weights": True}
    messages = [{"role": "user", "content": _content(text, image)}]
    with client_of(ctx) as client:
        if program:
            with loading_shown(client, model):
                if image:
                    reply: ChatCompletion | Completion = client.models.chat(model, messages, **fields)
                else:
                    reply = client.models.generate(model, text, **fields)
            if output is not None:
                write_rows(output, reply)
            if plot is not None:
                write_page(plot, reply)
            if as_json:
                typer.echo(to_json(reply))
            return
        if image:
            _answer(client, model, messages, fields)
            return
        with loading_shown(client, model):
            read = client.models.forward(model, text, top_k=0)
        pieces = client.models.stream(model, text, **fields)
        _follow((choice for piece in pieces for choice in piece.choices), read.labels, fields)


@takes(_CHAT_OPTIONS)
def chat(
    fields: Fields,
    ctx: typer.Context,
    model: Model,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    image: Images = None,
    look: Look = True,
) -> None:
    """Chat with a model, and show what the heads looked at for each token. One line is one message."""
    _ask(fields, look)
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    _content("", image)  # a file that cannot be read is named before anything is typed
    with client_of(ctx) as client:
        while (line := _line()) is not None:
            messages.append({"role": "user", "content": _content(line, image)})
            image = None
            messages.append({"role": "assistant", "content": _answer(client, model, messages, fields)})


def _name_tokens(fields: Fields, *, shown: bool, chats: bool) -> None:
    """Ask for the log-probabilities of named tokens. Raises BadParameter where nothing would show them."""
    if chats and "add_special_tokens" in fields:
        where = "--add-special-tokens"
        raise typer.BadParameter("the chat template writes those of messages; leave it out", param_hint=where)
    if "logprob_tokens" in fields:
        if not shown:
            raise typer.BadParameter("without lines of tokens nothing shows them; leave it out", param_hint="--no-look")
        fields["logprobs"] = True if chats else 0


def _ask(fields: Fields, look: bool) -> None:
    """Complete the request: greedy by default, with the keys of every head if they are to be shown."""
    fields.setdefault("temperature", 0.0)
    if look:
        fields["attention"] = {"top_k": _TOP_K, "statistics": []} | fields.get("attention", {})


def _content(text: str, images: Sequence[str] | None) -> Content:
    """The content of a message: a text, behind its images if it has any."""
    urls = [data_url(image, "image") for image in images or ()]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}] if parts else text


def _line() -> str | None:
    """Read a message; None at the end of input. An empty one is asked for again."""
    try:
        while not (line := input("> " if sys.stdin.isatty() else "").strip()):
            pass
    except EOFError:
        return None
    return line


def _answer(client: Client, model: str, messages: Sequence[dict[str, Any]], fields: Fields) -> str:
    with loading_shown(client, model):
        read = client.models.forward(model, messages=messages, top_k=0)
    pieces = client.models.stream_chat(model, messages, **fields)
    return _follow((choice for piece in pieces for choice in piece.choices), read.labels, fields)


def _follow(
    choices: Iterable[CompletionChoice | ChatPiece],
    labels: TokenLabelsReply | Sequence[TokenLabelsReply],
    fields: Fields,
) -> str:
    """Print the tokens as they come: a line for each with its keys, or as running text. Return the text."""
    tokens = [readable(token) for token in labels.tokens] if isinstance(labels, TokenLabelsReply) else []
    heads, text = fields.get("attention", {}).get("heads"), ""
    for choice in choices:
        text += choice.text
        if choice.attention is None and "attention" not in fields:
            typer.echo(choice.text, nl=False)
        logprobs = _logprobs(choice)
        for at, entry in enumerate(choice.attention or ()):
            told = [_looked(entry, tokens, heads), *_scored(entry), *logprobs[at : at + 1]]
            typer.echo(f"{readable(entry.token):<14} ← {'   '.join(filter(None, told))}")
            tokens.append(readable(entry.token))
        if choice.stop_reason:
            reason = choice.stop_reason
            text_of = f"{reason.score:.3g} at token {reason.token}"
            typer.echo(f"The text ends by the score of probe {reason.probe[:_ID]}: {text_of}.")
    typer.echo(text if "attention" in fields else "")
    return text


def _scored(token: GeneratedToken) -> list[str]:
    """The scores of a token by the probes that watch."""
    return [f"{probe[:_ID]} {score:.3g}" for probe, score in (token.scores or {}).items()]


def _logprobs(choice: CompletionChoice | ChatPiece) -> list[str]:
    """The log-probabilities that a piece has of the tokens that were named, and of the chosen one, token by token."""
    logprobs = choice.logprobs
    if isinstance(logprobs, CompletionLogprobs):
        rows = [[*(tops or {}).items()] for tops in logprobs.top_logprobs or ()]
    else:
        rows = [
            [(top.token, top.logprob) for top in token.top_logprobs] for token in (logprobs and logprobs.content) or ()
        ]
    return ["log p " + "  ".join(f"{readable(token)} {logprob:.3g}" for token, logprob in row) for row in rows]


def _looked(token: GeneratedToken, tokens: Sequence[str], heads: Sequence[int] | None) -> str:
    """Name the tokens that the heads looked at when they chose a token."""
    by_head: list[tuple[str, dict[int, float]]] = []
    for layer in token.layers:
        if (top := layer.top_keys) is None:
            continue
        for at, (keys, weights) in enumerate(zip(top.keys, top.weights, strict=True)):
            head = at if heads is None else heads[at]
            weight_by_key = {int(key): float(weight) for key, weight in zip(keys, weights, strict=True) if key >= 0}
            by_head.append((head_name(layer.layer, head), weight_by_key))
    if len(by_head) <= _MAX_HEADS_APART:
        return "   ".join(f"{name}: {_named(weight_by_key, tokens)}" for name, weight_by_key in by_head)
    mean: dict[int, float] = defaultdict(float)
    for _, weight_by_key in by_head:
        for key, weight in weight_by_key.items():
            mean[key] += weight / len(by_head)
    return _named(mean, tokens)


def _named(weights: dict[int, float], tokens: Sequence[str]) -> str:
    largest: Any = sorted(weights, key=lambda key: -weights[key])[:_KEYS_IN_LINE]
    return "  ".join(f"{tokens[key] if key < len(tokens) else key} ({weights[key]:.2f})" for key in largest)
