"""``attention heads``: find heads by what they do in many texts."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from attention_client.cli.arguments.model_options import Fields, options_of, takes
from attention_client.cli.arguments.text_files import texts_of_file
from attention_client.cli.commands.command_table import LAYERS, SOUNDS
from attention_client.cli.commands.model_progress import loading_shown
from attention_client.cli.commands.request_commands import Model
from attention_client.cli.invocation import client_of
from attention_client.cli.tables.model_tables import largest_weights
from attention_client.cli.tables.reply_output import (
    AsJson,
    Ending,
    OutputRows,
    Plot,
    look_options,
    write_page,
    write_picture,
)
from attention_client.cli.tables.row_files import write_rows
from attention_client.cli.tables.table_output import number, print_out, table
from attention_client.client import Client
from attention_client.many_requests import bar
from attention_client.survey import HeadSurvey, SurveyedHead, shipped_texts
from attention_client.survey.head_survey import SURVEYED
from attention_client.survey.survey_flow import OnTexts
from attention_contract.reply_names import head_of
from attention_contract.schemas.model_requests import ModelWeightsRequest
from attention_contract.schemas.weights import BY_KEY, NEEDS_NEEDLE
from attention_contract.wire import to_json

_OPTIONS: Final = options_of(
    ModelWeightsRequest,
    only={"layers", "edits", "statistic_options", "audio"},
    forms={"layers": LAYERS, "audio": SOUNDS},
)
_CLASS: Final = "classes."
"""Begins the name of the statistic of a class of keys."""
_OF_PAIRS: Final = [f"pairs.{side}{number}" for side in ("", "swapped_", "both_") for number in ("share", "first")]
"""The statistics of pairs."""
_PAIRS_FORM: Final = "expected a list of [query, key] for each text, or an object of these pairs and of candidates"
_BINS: Final = 10
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_ROWS: Final = 16
"""Heads that the table names; --json gives all."""
_PAIRS: Final = 6
"""Pairs of tokens that a passage names."""


def _statistic(name: str | None) -> str | None:
    known = [*SURVEYED, *sorted(NEEDS_NEEDLE | BY_KEY), *_OF_PAIRS]
    if name is not None and name not in known and not name.startswith(_CLASS):
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}, or {_CLASS}NAME")
    return name


def _head(text: str | None) -> SurveyedHead | None:
    try:
        return None if text is None else SurveyedHead(*head_of(text))
    except ValueError as fault:
        raise typer.BadParameter(str(fault), param_hint="--show") from None


@takes(_OPTIONS | look_options())
def heads(
    fields: Fields,
    ctx: typer.Context,
    model: Model,
    file: Annotated[
        str | None,
        typer.Argument(
            help="A file with one text a line, or of a name that ends in .jsonl one object: text, and for retrieval "
            "needle and answer; - is standard input. Default: the 299 texts that ship."
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="STATISTIC",
            callback=_statistic,
            show_default="induction; with --pairs, pairs.first",
            help="Order the heads by this statistic.",
        ),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option("--and", metavar="STATISTIC", callback=_statistic, help="Also show this statistic."),
    ] = None,
    show: Annotated[
        str | None, typer.Option(metavar="HEAD", help="Show the passages of this head, as L1H0. Default: the first.")
    ] = None,
    count: Annotated[int, typer.Option(min=0, help="Passages to show.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Texts of one request.")] = 16,
    pairs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON: a list of [query, key] for each text, as indices of tokens, or an object of pairs and "
            "candidates. Measures how much heads look from the query to the key.",
        ),
    ] = None,
    headvis: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write the survey as the folder data of HeadVis.")
    ] = None,
    output: OutputRows = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Find heads by their statistics over many texts, and show the strongest passages of a head."""
    look = {name: fields.pop(name) for name in look_options() if name in fields}
    ending = Ending.taken({"as_json": as_json, "plot": plot} | look)
    if show is not None and plot is not None:
        raise typer.BadParameter("a picture has no passages; leave it or --plot out", param_hint="--show")
    chosen, texts, of_texts = _head(show), shipped_texts() if file is None else texts_of_file(file), Fields()
    if file is not None and file.endswith(".jsonl"):
        texts, of_texts = _parts(file, texts)
    by = by or (_OF_PAIRS[1] if pairs is not None else "induction")
    of_pairs = {} if pairs is None else _pairs_of(pairs)
    if (
        pairs is None
        and (by in _OF_PAIRS or beside in _OF_PAIRS)
        and "pairs" not in fields.get("statistic_options", {})
    ):
        raise typer.BadParameter("expected a file with pairs", param_hint="--pairs")
    fields["statistic_options"] = dict(fields.get("statistic_options") or {}) | of_pairs
    wanted = _wanted(fields, of_texts, (by, beside))
    with client_of(ctx) as client:
        with loading_shown(client, model):
            if audio := fields.get("audio"):
                client.models.survey(model, texts[:1], audio=audio[:1], statistics=SURVEYED[:1])
            else:
                client.models.forward(model, min(texts, key=len), top_k=0)
        with bar(texts, shown=sys.stderr.isatty()) as advance:
            survey = client.models.survey(
                model, texts, statistics=wanted, batch=batch, on_texts=_advancing(advance), **fields | of_texts
            )
        if output is not None:
            write_rows(output, survey)
        if headvis is not None:
            with bar(None, shown=sys.stderr.isatty()) as advance:
                client.models.export_headvis(survey, headvis, on_texts=_advancing(advance))
        if plot is not None:
            _draw(survey, [by, *([beside] if beside else [])], plot, ending.look)
            return
        if as_json:
            typer.echo(to_json(_whole(survey)))
            return
        head = chosen or survey.ranked(by)[0]
        survey.index(*head)
        _print_heads(survey, by, beside)
        _print_passages(client, survey, head, by, count)
    if headvis is not None:
        print_out(f"{headvis}: {len(survey.heads)} heads for HeadVis", "dim")


def _draw(survey: HeadSurvey, statistics: Sequence[str], path: Path, look: Fields) -> None:
    """Draw the heads of all layers by these statistics; a page has them all."""
    if path.suffix.lower() == ".html":
        write_page(path, survey)
        return
    form: Any = path.suffix[1:].lower()
    write_picture(path, survey.plot(form, statistics=statistics, **look))


def _wanted(fields: Fields, of_texts: Fields, shown: Sequence[str | None]) -> list[Any]:
    """The statistics of a survey: those of every text, and those that are shown; adds the needles to the options."""
    options = dict(fields.get("statistic_options") or {})
    if needles := of_texts.pop("needle", None):
        options["needle"] = needles
    fields.pop("statistic_options", None)
    if options:
        of_texts["statistic_options"] = options
    more = [name.partition(".")[0] for name in shown if name]
    more += ["pairs"] if options.get("pairs") else []
    return [*SURVEYED, *(NEEDS_NEEDLE if options.get("needle") else ()), *more]


def _pairs_of(file: Path) -> Fields:
    """Read pairs, and candidates, of a file. Raises BadParameter."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as fault:
        raise typer.BadParameter(f"{file} is no JSON: {fault}", param_hint="--pairs") from None
    fields = content if isinstance(content, dict) else {"pairs": content}
    if "pairs" not in fields or not fields.keys() <= {"pairs", "candidates"} or not isinstance(fields["pairs"], list):
        raise typer.BadParameter(f"{_PAIRS_FORM}; got another form in {file}", param_hint="--pairs")
    return Fields(fields)


def _parts(file: str, lines: Sequence[str]) -> tuple[list[str], Fields]:
    """The texts of lines of JSON, and what else all of them have. Raises BadParameter."""
    columns: dict[str, list[str]] = {}
    for at, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        names = entry.keys() if isinstance(entry, dict) else set()
        if not {"text"} <= names <= {"text", "needle", "answer"} or (columns and columns.keys() != names):
            raise typer.BadParameter(
                f"line {at} of {file} is no object of a text, and of needle and answer if all lines have them",
                param_hint="FILE",
            )
        for name, part in entry.items():
            columns.setdefault(name, []).append(str(part))
    return columns.pop("text"), dict(columns)


def _advancing(advance: Any) -> OnTexts:
    """Advance a bar by the texts that are done."""
    seen = 0

    def on_texts(done: int, _: int) -> None:
        nonlocal seen
        for _ in range(done - seen):
            advance()
        seen = done

    return on_texts


def _print_heads(survey: HeadSurvey, by: str, beside: str | None) -> None:
    ranked = survey.ranked(by)
    rows = []
    for head_ref in ranked[:_ROWS]:
        distribution = survey.distribution(*head_ref, by, bins=_BINS)
        row = {"head": str(head_ref), by.replace("_", " "): number(distribution.mean)}
        low, quarter, middle, three_quarters, high = map(number, distribution.quantiles)
        row |= {"least": low, "25 %": quarter, "median": middle, "75 %": three_quarters, "largest": high}
        most = max(distribution.counts) or 1
        row["texts"] = "".join(_BLOCKS[-(-count * (len(_BLOCKS) - 1) // most)] for count in distribution.counts)
        if beside is not None:
            row[beside.replace("_", " ")] = number(survey.means(beside)[survey.heads.index(head_ref)])
        rows.append(row)
    table(rows)
    more = f"; {len(ranked) - _ROWS} more heads with --json" if len(ranked) > _ROWS else ""
    print_out(f"{survey.model} over {len(survey.texts)} texts{more}", "dim")


def _print_passages(client: Client, survey: HeadSurvey, head: SurveyedHead, by: Any, count: int) -> None:
    for passage in client.models.passages(survey, *head, by=by, count=count) if count else ():
        print_out(f"\n{head}, {by.replace('_', ' ')} {number(passage.value)}", "bold")
        print_out(survey.texts[passage.text])
        print_out(largest_weights(passage.reply, _PAIRS), "dim")


def _whole(survey: HeadSurvey) -> dict[str, Any]:
    """Everything of a survey but the passages' weights."""
    return {
        "model": survey.model,
        "texts": survey.texts,
        "heads": [
            {
                "layer": head.layer,
                "head": head.head,
                "statistics": {
                    name: survey.distribution(*head, name, bins=_BINS)._asdict()
                    | {"strongest": survey.strongest(*head, name)}
                    for name in survey.values
                },
            }
            for head in survey.heads
        ],
    }
