"""``attention explain``."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from attention_client.cli import example_inputs
from attention_client.cli.explanation import Explanation, Step, explain
from attention_client.cli.invocation import client_of
from attention_client.cli.model_options import Fields, options_of, takes
from attention_client.cli.reply_output import AsJson, drawable
from attention_client.cli.request_commands import INPUTS, check_target, inputs_of
from attention_client.cli.table_output import print_out, table
from attention_contract.schemas.attention import AttentionInputs, ForwardRequest, RawForwardRequest, RawInputs
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.wire import to_json

_OPTIONS = {
    **options_of(AttentionInputs),
    **options_of(RawInputs),
    **options_of(GradientsRequest, only={"upstream", "edits"}),
}

_SHAPE = (1, 2, 4, 4)
"""Batch, heads, tokens and width of built-in raw inputs."""
_WIDTH = 8
"""Numbers of a vector that are shown."""


@takes(_OPTIONS, inputs_of, INPUTS)
def explain_command(
    fields: Fields,
    ctx: typer.Context,
    name: str | None = None,
    head: Annotated[int, typer.Option(min=0, help="The head to follow.")] = 0,
    row: Annotated[int | None, typer.Option(min=0, help="The query to follow; default: the last.")] = None,
    sequence: Annotated[int, typer.Option(min=0, help="The sequence of the batch.")] = 0,
    keys: Annotated[int, typer.Option(min=1, help="Show this many keys: those of the largest weights.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the built-in inputs.")] = 0,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=drawable, help="Draw the steps into a .svg, .png or .pdf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain the attention of one query step by step, forward and backward, with its numbers.

    Without inputs, a few random tokens of the right shape are taken.
    """
    check_target(name, fields, ForwardRequest, RawForwardRequest)
    rng = np.random.default_rng(seed)
    with client_of(ctx) as client:
        if fields.get("query") is None and name is not None:
            fields |= example_inputs.for_module(
                client.modules.get(name).config, example_inputs.one_digit(rng), 1, _SHAPE[2], None
            )
        elif fields.get("query") is None:
            drawn = example_inputs.for_raw(example_inputs.one_digit(rng), _SHAPE)
            given = drawn | {name: value for name, value in fields.items() if name != "upstream"}
            fields |= example_inputs.with_learned(client, given, rng)
        length = np.asarray(fields["query"]).shape[-2]
        found = explain(client, name, fields, sequence=sequence, head=head, query=length - 1 if row is None else row)
    if figure is not None:
        _draw(found, figure, keys)
    if as_json:
        typer.echo(to_json(_as_data(found)))
    else:
        _show(found, keys, figure)
    if not found.consistent:
        typer.echo("The steps do not fit together: see the checks.", err=True)
        raise typer.Exit(1)


def _draw(found: Explanation, figure: Path, keys: int) -> None:
    try:
        from attention_client.cli.explain_figure import draw  # noqa: PLC0415 - matplotlib is an extra
    except ModuleNotFoundError as fault:
        raise typer.BadParameter(
            f"it needs {fault.name}: pip install 'attention-service[plot]'", param_hint="--figure"
        ) from None
    draw(found, figure, shown_keys(found, keys))


def shown_keys(found: Explanation, count: int) -> NDArray[np.intp]:
    """Return the positions of the keys to show: those of the largest weights, in order."""
    weights = next((step.values for step in found.forward if step.tap == "weights"), None)
    if weights is None:
        length = next(step.values for step in found.forward if step.tap == "k").shape[0]
        return np.arange(min(count, length))
    return np.sort(np.argsort(-weights, kind="stable")[:count])


def _show(found: Explanation, count: int, figure: Path | None) -> None:
    shown = shown_keys(found, count)
    print_out(f"query {found.query} of head {found.head}, sequence {found.sequence}", "bold")
    for note in found.notes:
        print_out(note, "dim")
    for title, steps in (("forward", found.forward), ("backward", found.backward)):
        print_out(f"\n{title}", "bold")
        for at, step in enumerate(steps, 1):
            print_out(f"{at:>2}  {step.symbol}   {step.formula}".rstrip())
            print_out(f"    {step.sentence}", "italic")
            _show_values(step, shown)
    for identity, error in found.checks.items():
        verdict = "holds" if error <= found.tolerance else "FAILS"
        print_out(f"{identity} {verdict}: error {error:.1e} beside the largest number", "dim")
    if figure is not None:
        typer.echo(f"{figure}: {figure.stat().st_size} bytes")


def _show_values(step: Step, shown: NDArray[np.intp]) -> None:
    values = step.values.astype(np.float64)
    if not step.per_key:
        print_out(f"      {_vector(values)}")
    elif values.ndim == 1:
        cells = {str(at): _number(values[at]) for at in shown}
        table([{"     key": " ", **cells}])
    else:
        for at in shown:
            print_out(f"      key {at}  {_vector(values[at])}")
    if step.per_key and len(values) > len(shown):
        print_out(f"      … of {len(values)} keys", "dim")


def _number(value: float) -> str:
    return "−∞" if value == -np.inf else f"{value:.4g}"


def _vector(values: NDArray[Any]) -> str:
    more = ", …" if len(values) > _WIDTH else ""
    return f"[{', '.join(_number(value) for value in values[:_WIDTH])}{more}]"


def _as_data(found: Explanation) -> dict[str, Any]:
    spec = found.spec.model_dump(mode="json", exclude_none=True)
    data = asdict(found) | {"spec": spec, "consistent": found.consistent}
    del data["tolerance"]
    return data
