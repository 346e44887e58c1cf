"""``attention complexity``, ``attention hardware`` and ``attention accuracy``."""

from functools import partial
from typing import Annotated, Any, get_args

import typer

from attention_client.cli import cost_tables, result_tables, tensor_arguments
from attention_client.cli.answering import answer
from attention_client.cli.inputs import Kernel, Name, Returned, Spec
from attention_client.cli.invocation import AsJson, ask, client_of, present
from attention_client.cli.plot_options import PlotFile, takes_plot
from attention_contract.schemas.complexity import Dimension, Sweep


def _sweep(text: str) -> dict[str, Any]:
    dimension, equals, values = text.rpartition("=")
    try:
        numbers = [int(value) for value in values.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"expected dimension=number,number,… as in length=512,1024,2048; got {text!r}", param_hint="--sweep"
        ) from None
    if equals and dimension not in get_args(Dimension):
        raise typer.BadParameter(f"{dimension!r} is none of {', '.join(get_args(Dimension))}", param_hint="--sweep")
    return {"dimension": dimension if equals else "length", "values": numbers}


@takes_plot
def complexity(
    ctx: typer.Context,
    name: Name = None,
    queries: Annotated[int | None, typer.Option(help="Queries of one sequence.")] = None,
    keys: Annotated[int | None, typer.Option(help="New keys; default: as many as queries.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    past: Annotated[int, typer.Option(help="Keys of earlier tokens.")] = 0,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="DIMENSION=N,N,…", help="Vary length, batch, past, num_heads, …"),
    ] = None,
    returned: Returned = None,
    kernel: Kernel = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="JSON|FILE", help="What else to cost, as in '{\"num_kv_heads\": 2}'; may be repeated."),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(metavar="JSON|FILE", help="A session to price, as in '{\"sequences\": 4}' or '{}'."),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also run both near where one becomes faster.")] = False,
    hardware: Annotated[str | None, typer.Option(help="A device that is not here.")] = None,
    memory_bytes: Annotated[int | None, typer.Option(help="Suppose this much memory is free.")] = None,
    plot_file: PlotFile | None = None,
    version: Annotated[str | None, typer.Option(help="Answer only if the module is at this version.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Raw attention: query heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Raw attention: width of a head.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Raw attention: key/value heads.")] = None,
    value_dim: Annotated[int | None, typer.Option(help="Raw attention: width of a head's values.")] = None,
    key_dim: Annotated[int | None, typer.Option(help="Raw attention: width of a head's keys.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Raw attention: float32, bfloat16, …")] = None,
    spec: Spec = None,
    as_json: AsJson = False,
) -> None:
    """Predict the cost of an attention at a shape or over a sweep of shapes."""
    varied = _sweep(sweep) if sweep is not None else None
    if queries is None:
        if varied is None or varied["dimension"] not in {"length", "queries"}:
            raise typer.BadParameter("expected a number, or a --sweep of length or queries", param_hint="--queries")
        queries = varied["values"][0]
    shape = {"batch": batch, "queries": queries, "past": past} | ({} if keys is None else {"keys": keys})
    options: dict[str, Any] = {"kernel": kernel, "version": version, "hardware": hardware, "measure": measure}
    options |= {"return_": returned} if returned else {}
    options |= {
        "memory_bytes": memory_bytes,
        "compare": [tensor_arguments.read_json(one, "compare") for one in compare or []],
    }
    raw: dict[str, Any] = {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "num_kv_heads": num_kv_heads,
        "value_dim": value_dim,
        "key_dim": key_dim,
    }
    raw |= {"dtype": dtype, "spec": None if spec is None else tensor_arguments.read_json(spec, "spec")}
    wrong = [option for option, value in raw.items() if value is not None]
    if name is not None and wrong:
        option = wrong[0].replace("_", "-")
        raise typer.BadParameter("it belongs to raw attention; leave it or NAME out", param_hint=f"--{option}")
    if name is None and (num_heads is None or head_dim is None):
        raise typer.BadParameter("expected a module's NAME, or --num-heads and --head-dim", param_hint="NAME")
    if session is not None and (name is None or plot_file is not None):
        raise typer.BadParameter("expected a module's NAME, and no --plot", param_hint="--session")
    options |= {"shape": shape, "sweep": varied} | (raw if name is None else {})
    if session is not None:
        options["session"] = tensor_arguments.read_json(session, "session")
    call = partial(ask, operation="complexity", name=name, fields=options)
    show = partial(cost_tables.costs, sweep=None if varied is None else Sweep.model_validate(varied))
    answer(ctx, call, show, as_json=as_json, plot_file=plot_file)


def hardware(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the devices that --hardware may name, with the source of their figures."""
    with client_of(ctx) as client:
        reply = client.server.hardware()
    present(reply, as_json, cost_tables.hardware)


def accuracy(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Show how far the server's predictions of time were from what was measured."""
    with client_of(ctx) as client:
        reply = client.server.accuracy()
    present(reply, as_json, result_tables.accuracy)
