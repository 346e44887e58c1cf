"""``attention models fit-probe``: a linear probe, fitted to a file of labelled texts."""

from typing import Annotated, Any, Final, get_args

import typer

from attention_client.cli.arguments.model_options import Fields, OptionForm, options_of, takes
from attention_client.cli.arguments.text_files import texts_of_file
from attention_client.cli.commands.fit_prices import Price, longest_of, price_of
from attention_client.cli.commands.model_progress import loading_shown
from attention_client.cli.commands.request_commands import Model
from attention_client.cli.invocation import client_of
from attention_client.cli.tables.reply_output import AsJson, present
from attention_contract.schemas.analyses.probes import FitProbe, ProbePoint, StateFeature, StatisticFeature

_OPTIONS: Final = options_of(
    FitProbe, only={"method", "positions", "regularization", "folds", "false_positive_rate"},
    forms={
        "positions": OptionForm(
            metavar="NAME", name="--position",
            about="The tokens of each text that are samples: last, all, or mean for one sample, their mean.",
        ),
        "folds": OptionForm(int, name="--folds"),
    },
)  # fmt: skip
_STATE: Final = options_of(
    StateFeature, only={"point"},
    forms={"point": OptionForm(
        metavar="NAME", about=f"The state: {', '.join(get_args(ProbePoint))}. [dim]\\[default: hidden][/dim]"
    )},
)  # fmt: skip
_STATISTICS: Final = options_of(StatisticFeature)


@takes(_OPTIONS | _STATE | _STATISTICS)
def fit_probe(
    fields: Fields,
    ctx: typer.Context,
    model: Model,
    file: Annotated[str, typer.Argument(help="A file with one text a line, behind its label 0 or 1 and a tab.")],
    layer: Annotated[str, typer.Option(help="The layer of the state, or all.")] = "all",
    vector: Annotated[str | None, typer.Option(help="A steering vector, along which the probe scores.")] = None,
    price: Price = False,
    as_json: AsJson = False,
) -> None:
    """Fit a linear probe to labelled texts: by a state (--point, --layer), statistics of heads, or along a vector.

    The reply has the cross-validated AUC of each layer. attention generate --watch ID scores each token by it.
    """
    rows = [line.partition("\t") for line in texts_of_file(file)]
    for at, (label, _, text) in enumerate(rows, 1):
        if label not in {"0", "1"} or not text:
            where = f"line {at} of {file}: expected 0 or 1, a tab, and a text"
            raise typer.BadParameter(where, param_hint="FILE")
    of = _feature(fields, layer, vector)
    with client_of(ctx) as client, loading_shown(client, model):
        labels, texts = [int(label) for label, *_ in rows], [text for *_, text in rows]
        if price:
            length = longest_of(client, model, texts)
            samples = length if fields.get("positions") == "all" else 1
            cost = price_of(client, model, len(texts), length, probe={"of": of, "samples": samples})
            present(cost, as_json)
            return
        present(client.models.fit_probe(model, of, texts, labels, **fields), as_json)


def _feature(fields: Fields, layer: str, vector: str | None) -> dict[str, Any]:
    """Take the feature out of the fields. Raises BadParameter for parts of two features."""
    own: dict[str, Any] = {name: fields.pop(name) for name in ("point", "statistics", "heads") if name in fields}
    of_layer = int(layer) if layer.isdecimal() else layer
    if "statistics" in own:
        excluded = "--point" if "point" in own else "--vector" if vector else "--layer" if layer != "all" else None
        if excluded is not None:
            raise typer.BadParameter("statistics are of all layers; leave it out", param_hint=excluded)
        return own
    if "heads" in own:
        raise typer.BadParameter("heads are those of statistics; add --statistic, or leave it out", param_hint="--head")
    if vector is not None:
        if "point" in own:
            raise typer.BadParameter("a vector is of hidden states; leave it out", param_hint="--point")
        return {"vector": vector, "layer": of_layer}
    return {"point": "hidden", "layer": of_layer} | own
