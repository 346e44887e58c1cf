"""``attention complexity`` and ``attention accuracy``."""

from typing import Annotated, Any

import typer

from attention_client import calls
from attention_client.cli import files, results
from attention_client.cli.inputs import Name, Spec
from attention_client.cli.session import AsJson, client_of, print_json


def _sweep(text: str) -> dict[str, Any]:
    dimension, equals, values = text.rpartition("=")
    try:
        numbers = [int(value) for value in values.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"expected dimension=number,number,… as in length=512,1024,2048; got {text!r}", param_hint="--sweep"
        ) from None
    return {"dimension": dimension if equals else "length", "values": numbers}


def complexity(
    ctx: typer.Context,
    name: Name = None,
    queries: Annotated[int | None, typer.Option(help="Queries of one sequence.")] = None,
    keys: Annotated[int | None, typer.Option(help="New keys; default: as many as queries.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    past: Annotated[int, typer.Option(help="Keys of earlier tokens.")] = 0,
    sweep: Annotated[
        str | None, typer.Option(metavar="DIMENSION=N,N,…", help="Vary length, batch, queries, keys or past.")
    ] = None,
    returned: Annotated[list[str] | None, typer.Option("--return", help="A tap that would be returned.")] = None,
    kernel: Annotated[str | None, typer.Option(help="fused or materialized; default: the planner's choice.")] = None,
    version: Annotated[str | None, typer.Option(help="Answer only if the module is at this version.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Raw attention: query heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Raw attention: width of a head.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Raw attention: key/value heads.")] = None,
    value_dim: Annotated[int | None, typer.Option(help="Raw attention: width of a head's values.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Raw attention: float32, bfloat16, …")] = None,
    spec: Spec = None,
    as_json: AsJson = False,
) -> None:
    """What an attention costs at a shape or over a sweep of shapes."""
    varied = _sweep(sweep) if sweep is not None else None
    if queries is None:
        if varied is None or varied["dimension"] not in {"length", "queries"}:
            raise typer.BadParameter("expected a number, or a --sweep of length or queries", param_hint="--queries")
        queries = varied["values"][0]
    shape = {"batch": batch, "queries": queries, "past": past} | ({} if keys is None else {"keys": keys})
    options: dict[str, Any] = {"return_": returned, "kernel": kernel, "version": version}
    raw: dict[str, Any] = {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "num_kv_heads": num_kv_heads,
        "value_dim": value_dim,
    }
    raw |= {"dtype": dtype, "spec": None if spec is None else files.read_json(spec, "spec")}
    wrong = [option for option, value in raw.items() if value is not None]
    if name is not None and wrong:
        option = wrong[0].replace("_", "-")
        raise typer.BadParameter("it belongs to raw attention; leave it or NAME out", param_hint=f"--{option}")
    if name is None and (num_heads is None or head_dim is None):
        raise typer.BadParameter("expected a module's NAME, or --num-heads and --head-dim", param_hint="NAME")
    call = (
        calls.raw_complexity(shape, varied, **raw, **options)
        if name is None
        else calls.complexity(name, shape, varied, **options)
    )
    with client_of(ctx) as client:
        reply = client.send(call)
    if as_json:
        print_json(reply)
    else:
        results.costs(reply)


def accuracy(ctx: typer.Context, as_json: AsJson = False) -> None:
    """How far the server's predictions of time were from what was measured."""
    with client_of(ctx) as client:
        reply = client.accuracy()
    if as_json:
        print_json(reply)
    else:
        results.accuracy(reply)
