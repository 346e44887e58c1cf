"""The end of a command: its reply as a picture, in a file, as JSON, or as tables for people."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attention_client.cli.arguments import tensor_arguments
from attention_client.cli.arguments.model_options import FieldOption, Fields, fields_of, options_of
from attention_client.cli.invocation import client_of
from attention_client.cli.tables.reply_tables import show
from attention_client.cli.tables.row_files import ROW_SUFFIXES, rows_writable, write_rows
from attention_client.client import Client
from attention_contract.base import WireModel
from attention_contract.schemas.answers import Picture
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.validation import validate
from attention_contract.wire import PICTURES, to_json

if TYPE_CHECKING:
    from attention_client.survey import HeadSurvey

AsJson = Annotated[bool, typer.Option("--json", help="Print the reply as JSON, and nothing else.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        callback=tensor_arguments.writable,
        help="Write the reply: .npy, .npz, .safetensors or .json; - is standard output.",
    ),
]
OutputOrRows = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        callback=tensor_arguments.ending_in(*tensor_arguments.SUFFIXES, *ROW_SUFFIXES, pipe=True),
        help="Write the reply: .npy, .npz, .safetensors or .json; - is standard output. Or write its statistics: "
        ".parquet or .arrow, a row for each head.",
    ),
]
OutputRows = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", callback=rows_writable, help="Also write the rows: .parquet or .arrow."
    ),
]
_PAGE, _EXPECTED = ".html", "expected .svg, .png or .pdf"
drawable = tensor_arguments.ending_in(*(f".{ending}" for ending in PICTURES.values()))
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        "--picture",
        metavar="FILE",
        callback=tensor_arguments.ending_in(*(f".{ending}" for ending in PICTURES.values()), _PAGE),
        help="Draw into a .svg, .png or .pdf instead; or into a .html, which shows what a notebook shows.",
    ),
]

PlotPage = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        callback=tensor_arguments.ending_in(_PAGE),
        help="Write a .html instead, which shows what a notebook shows.",
    ),
]


@cache
def look_options() -> dict[str, FieldOption]:
    """Return the options of the look of a picture. It shows the heads that are selected."""
    return options_of(PictureOptions, without={"head", "sequence"}, panel="Look of the picture")


@dataclass(frozen=True)
class Ending:
    """The end that a command line asks for."""

    as_json: bool = False
    output: Path | None = None
    plot: Path | None = None
    look: Fields = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """True if a program reads the reply, which gets all of it."""
        return self.as_json or self.output is not None or self._page

    @property
    def _page(self) -> bool:
        return self.plot is not None and self.plot.suffix.lower() == _PAGE

    @classmethod
    def taken(cls, given: Fields) -> "Ending":
        """Take the options of the end out of what was given, and check them."""
        taken = {name: given.pop(name) for name in ("as_json", "output", "plot") if name in given}
        look = fields_of(given, look_options()) if "plot" in taken else {}
        ending = cls(**taken, look=look)
        if ending.plot is not None and (ending.as_json or ending.output is not None):
            other = "--json" if ending.as_json else "--output"
            raise typer.BadParameter(f"it draws instead; leave it or {other} out", param_hint="--plot")
        if ending.as_json and tensor_arguments.to_pipe(ending.output):
            raise typer.BadParameter("it and -o - would both write to standard output", param_hint="--json")
        if look and ending.plot is None:
            option = f"--{next(iter(look))}"
            raise typer.BadParameter("it is an option of pictures; add --plot FILE", param_hint=option)
        if look and ending._page:
            raise typer.BadParameter(f"a page has no options of pictures; {_EXPECTED}", param_hint="--plot")
        if look:
            validate(PictureOptions, look)
        return ending

    def answer(self, ctx: typer.Context, call: Callable[[Client], Any], chief: str | None = None) -> None:
        """Make the call, and draw its reply; or write it to a file and print it, unless that is standard output.

        ``chief``: the tensor of the reply that a file of one tensor holds.
        """
        with client_of(ctx) as client:
            if self.plot is not None and not self._page:
                ending: Any = self.plot.suffix[1:].lower()
                write_picture(self.plot, client.plot(ending, **self.look).of(call, client))
                return
            reply = call(client)
        if self.plot is not None:
            write_page(self.plot, reply)
            return
        if self.output is not None:
            if self.output.suffix.lower() in ROW_SUFFIXES:
                write_rows(self.output, reply)
            else:
                tensor_arguments.write(self.output, reply, chief)
        if self.as_json or not tensor_arguments.to_pipe(self.output):
            present(reply, self.as_json)


def present(reply: WireModel, as_json: bool) -> None:
    """Print a reply as one line of JSON, or as tables for people."""
    typer.echo(to_json(reply)) if as_json else show(reply)


def write_picture(path: Path, picture: Picture) -> None:
    """Write a picture into its file."""
    path.write_bytes(picture.data)
    typer.echo(f"{path}: {len(picture.data)} bytes")


def write_page(path: Path, reply: "WireModel | HeadSurvey") -> None:
    """Write what a notebook shows of a reply as a page that needs nothing else."""
    head = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>attention</title></head>'
    path.write_text(f"{head}\n<body>{reply._repr_html_()}</body></html>\n", "utf-8")
    typer.echo(f"{path}: {path.stat().st_size} bytes")
