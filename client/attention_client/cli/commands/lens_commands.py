"""``attention models fit-lens``: the price of a Jacobian lens, then its fit with a bar."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from attention_client.cli.arguments.model_options import Fields, OptionForm, options_of, takes
from attention_client.cli.arguments.tensor_arguments import read_all
from attention_client.cli.arguments.text_files import texts_of_file
from attention_client.cli.commands.fit_prices import Price, longest_of, price_of
from attention_client.cli.commands.model_progress import loading_shown
from attention_client.cli.commands.request_commands import Model
from attention_client.cli.invocation import client_of
from attention_client.cli.tables.reply_output import AsJson, present
from attention_client.cli.tables.table_output import print_out, scaled
from attention_client.client import Client
from attention_contract.errors import AttentionError
from attention_contract.schemas.analyses.lenses import FitLens, LensInfo
from attention_contract.schemas.costs.model_complexity import PassCost


def _jacobians(file: str, field: str) -> dict[str, Any]:
    """Read matrices by the number of their layer, of a published lens too."""
    if file.endswith(".pt"):
        try:
            from attention_client.torch.published_lenses import read_published_lens  # noqa: PLC0415 - an extra
        except ImportError:
            raise typer.BadParameter(
                "a .pt needs torch: pip install 'attention-service[torch]'", param_hint="--jacobians"
            ) from None
        if not Path(file).is_file():
            raise typer.BadParameter(f"there is no file {file}", param_hint="--jacobians")
        return dict(read_published_lens(file))
    return {name.removeprefix(f"{field}."): matrix for name, matrix in read_all(file, field).items()}


_OPTIONS: Final = options_of(
    FitLens,
    without={"texts", "wait_s"},
    forms={
        "jacobians": OptionForm(
            metavar="FILE",
            read=_jacobians,
            about="In place of texts: the matrix of each layer but the last, by the layer's number, as lens-matrices "
            "writes them; or a published lens that ends in .pt, which needs torch.",
        )
    },
)
_SECONDS: Final = 0.5
"""Seconds between two reports of a fit."""


@takes(_OPTIONS)
def fit_lens(
    fields: Fields,
    ctx: typer.Context,
    model: Model,
    file: Annotated[
        str | None, typer.Argument(help="A file with one text a line to average over; - is standard input.")
    ] = None,
    price: Price = False,
    as_json: AsJson = False,
) -> None:
    """Fit a Jacobian lens over the texts of a file, with its price first. Ctrl-C stops the fit.

    --jacobians stores matrices that were fitted elsewhere, in place of texts.
    """
    if (file is None) == ("jacobians" not in fields):
        raise typer.BadParameter("expected either a FILE of texts or --jacobians", param_hint="FILE")
    if price and file is None:
        raise typer.BadParameter("matrices are stored at once; give a FILE of texts", param_hint="--price")
    texts = None if file is None else texts_of_file(file)
    with client_of(ctx) as client:
        if texts is not None:
            with loading_shown(client, model):
                cost = _price(client, model, texts, fields)
            if price:
                present(cost, as_json)
                return
            if not as_json:
                seconds = f"{cost.predicted_ms / 1000:.2g} s"
                print_out(f"{len(texts)} texts: about {scaled(cost.flops, 'FLOP')}, {seconds}", "dim")
        present(_fitted(client, model, texts, fields), as_json)


def _price(client: Client, model: str, texts: list[str], fields: Fields) -> PassCost:
    """The price of a fit over texts as long as the longest one."""
    most = fields.get("max_tokens", FitLens.model_fields["max_tokens"].default)
    return price_of(client, model, len(texts), min(longest_of(client, model, texts), most), fit=True)


def _fitted(client: Client, model: str, texts: list[str] | None, fields: Fields) -> LensInfo:
    """Fit a lens, with a bar on a terminal. An interrupt from the keyboard stops the fit."""
    from rich.console import Console  # noqa: PLC0415 - other commands draw no bar, which takes 10 ms to import
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns: Any = (TextColumn("fitting {task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(model, total=1.0)
        info = client.models.fit_lens(model, texts, wait_s=0, **fields)
        try:
            while info.state == "fitting":
                bar.update(task, completed=info.progress)
                info = client.models.fit_lens(model, texts, wait_s=_SECONDS, **fields)
        except KeyboardInterrupt:
            with suppress(AttentionError):  # it is there already
                client.models.delete_lens(info.id)
            raise
    return info
