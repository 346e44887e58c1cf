"""``attention circuits``."""

from typing import Annotated, Any

import numpy as np
import typer
from rich.text import Text

from attention_client.cli import completion, result_tables
from attention_client.cli.answering import answer
from attention_client.cli.compute_commands import Heads
from attention_client.cli.display import new_table, number, print_out
from attention_client.cli.invocation import AsJson
from attention_client.cli.plot_options import PlotFile, takes_plot
from attention_contract.schemas.circuits import Circuit, CircuitsReply, Composition, Spectrum

_SHOWN = 4
"""Singular values that a row shows."""


@takes_plot
def circuits(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(autocompletion=completion.modules, help="A resident module.")],
    heads: Heads = None,
    parts: Annotated[
        list[str] | None, typer.Option("--part", help="qk, ov or spectra; may be repeated. Default: all.")
    ] = None,
    top: Annotated[int | None, typer.Option(help="At most this many singular values of each matrix.")] = None,
    vectors: Annotated[bool, typer.Option("--vectors", help="With --json: singular vectors too.")] = False,
    later: Annotated[
        str | None,
        typer.Option("--with", autocompletion=completion.modules, help="Compose with a later module."),
    ] = None,
    with_version: Annotated[str | None, typer.Option(help="The version of that module.")] = None,
    version: Annotated[
        str | None, typer.Option("--version", help="Answer only if the module is at this version.")
    ] = None,
    plot_file: PlotFile | None = None,
    as_json: AsJson = False,
) -> None:
    """Show what each head's projections compute together: QK and OV circuits, spectra, composition scores."""
    fields: dict[str, Any] = {"heads": heads or None, "parts": parts or None, "top": top, "vectors": vectors}
    fields |= {"with_": later, "with_version": with_version, "version": version}
    answer(ctx, lambda client: client.circuits(name, **fields), _tables, as_json=as_json, plot_file=plot_file)


def _tables(reply: CircuitsReply) -> None:
    """Print a table for each part of the reply."""
    if reply.qk is not None or reply.ov is not None:
        _circuits(reply)
    if reply.spectra is not None:
        _spectra(reply.spectra)
    if reply.composition is not None:
        _composition(reply, reply.composition)
    if reply.left_out:
        print_out(Text(f"in no circuit: {', '.join(reply.left_out)}", style="dim"))
    result_tables.ran(reply.ran)


def _circuits(reply: CircuitsReply) -> None:
    table = new_table(
        "head", "circuit", "norm", "effective rank", "stable rank", "copying", "largest singular values", left=2
    )
    for at, head in enumerate(reply.heads):
        for label, circuit in (("QK", reply.qk), ("OV", reply.ov)):
            if circuit is not None:
                copying = getattr(circuit, "copying", None)
                table.add_row(
                    str(head), label, *_measures(circuit, at),
                    "" if copying is None else number(copying[at]), _largest(circuit.singular_values[at]),
                )  # fmt: skip
    print_out(table)


def _measures(of: Circuit | Spectrum, at: int) -> list[str]:
    return [number(measure.flat[at]) for measure in (of.norm, of.effective_rank, of.stable_rank)]


def _largest(values: "np.typing.NDArray[np.floating]") -> str:
    more = " …" if len(values) > _SHOWN else ""
    return "  ".join(number(value) for value in values[:_SHOWN]) + more


def _spectra(spectra: list[Spectrum]) -> None:
    table = new_table("parameter", "shape", "norm", "effective rank", "stable rank", "largest singular values", left=2)
    for each in spectra:
        rows = each.singular_values.reshape(each.norm.size, -1)
        for at, values in enumerate(rows):
            label = each.name if len(rows) == 1 else f"{each.name}, head {at}"
            table.add_row(label, str(each.shape), *_measures(each, at), _largest(values))
    print_out(table)


def _composition(reply: CircuitsReply, composition: Composition) -> None:
    kinds = {name: getattr(composition, name.lower()) for name in "QKV"}
    scores = {name: score for name, score in kinds.items() if score is not None}
    table = new_table("head", f"head of {composition.module}", *(f"{name}-composition" for name in scores), left=2)
    for at, later in np.ndindex(*next(iter(scores.values())).shape):
        table.add_row(str(reply.heads[at]), str(later), *(number(score[at, later]) for score in scores.values()))
    print_out(table)
    print_out(Text(f"at random: {number(composition.baseline)}", style="dim"))
