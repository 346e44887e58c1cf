"""``attention bench``."""

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from attention_client.async_client import AsyncClient
from attention_client.cli import completion, display, example_inputs, tensor_arguments
from attention_client.cli.inputs import Fields, Kernel, Spec
from attention_client.cli.invocation import AsJson, Invocation, ask, client_of
from attention_client.cli.load import Summary, measure
from attention_client.connection_settings import LIMITS
from attention_contract.tensors import DTYPES
from attention_contract.wire import to_json

_MOST = LIMITS.max_connections or 100
"""The most requests in flight: those beyond it would wait for a connection in this client."""


def _levels(text: str) -> list[int]:
    """Parse numbers of requests in flight, separated by commas."""
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = [0]
    if min(levels) < 1 or max(levels) > _MOST:
        raise typer.BadParameter(
            f"expected numbers from 1 to {_MOST}, as in 1,8,32; got {text!r}", param_hint="--concurrency"
        ) from None
    return levels


def bench(
    ctx: typer.Context,
    url: Annotated[str | None, typer.Argument(metavar="URL", help="Address of the server; default: --url.")] = None,
    module: Annotated[
        str | None, typer.Option(autocompletion=completion.modules, help="A resident module; default: raw attention.")
    ] = None,
    operation: Annotated[Literal["forward", "weights", "gradients"], typer.Option(help="The operation.")] = "forward",
    request: Annotated[
        str | None, typer.Option(metavar="FILE", help="Send these fields: .json, .npz or .safetensors, - for a pipe.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    queries: Annotated[int, typer.Option(min=1, help="Queries of one sequence.")] = 128,
    keys: Annotated[int | None, typer.Option(min=1, help="By default as many as queries.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Raw attention: query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Raw attention: key/value heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Raw attention: width of a head.")] = 64,
    dtype: Annotated[str, typer.Option(help="Dtype of random inputs.")] = "float32",
    spec: Spec = None,
    kernel: Kernel = None,
    concurrency: Annotated[str, typer.Option(metavar="N,N,…", help="Requests in flight at once.")] = "1,4,16",
    requests: Annotated[int, typer.Option(min=1, help="Requests measured at each concurrency.")] = 200,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before, at each concurrency, not counted.")] = 20,
    media_type: Annotated[Literal["safetensors", "json"], typer.Option(help="Form of the tensors.")] = "safetensors",
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure a running server: latency and throughput of one request, sent many times.

    Exit status 1 if a request failed. Nothing is repeated after a failure.
    """
    invocation = ctx.ensure_object(Invocation)
    invocation.url = url or invocation.url
    levels = _levels(concurrency)
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}", param_hint="--dtype")
    rng = np.random.default_rng(seed)
    fields: Fields = {} if kernel is None else {"kernel": kernel}
    if spec is not None:
        fields["spec"] = tensor_arguments.read_object(spec, "spec")
    if request is not None:
        fields |= tensor_arguments.read_inputs(request, "request")
        if "return" in fields:
            fields["return_"] = fields.pop("return")
    elif module is not None:
        with client_of(ctx) as client:
            config = client.modules.get(module).config
        fields |= example_inputs.for_module(config, rng, batch, queries, keys)
    else:
        fields |= example_inputs.for_raw(rng, (batch, heads, queries, head_dim), keys, kv_heads)
    if request is None:
        fields = {name: x.astype(DTYPES[dtype]) if isinstance(x, np.ndarray) else x for name, x in fields.items()}
    if module is None and spec is not None:
        with client_of(ctx) as client:
            fields = example_inputs.with_learned(client, fields, rng)

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=as_json or not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=len(levels) * (requests + warm_up))
        run = _all_levels(
            invocation, media_type, partial(_sent, operation, module, fields), levels, requests, warm_up,
            lambda level: progress.update(task, description=f"{level} in flight"), lambda: progress.advance(task),
        )  # fmt: skip
        found = asyncio.run(run)
    if as_json:
        typer.echo(to_json({"operation": operation, "module": module, "levels": [one.data() for one in found]}))
    else:
        _show(found)
    if any(one.errors for one in found):
        raise typer.Exit(1)


async def _sent(operation: str, module: str | None, fields: Fields, client: AsyncClient) -> Any:
    return await ask(client, operation, module, fields)


async def _all_levels(
    invocation: Invocation, media_type: Literal["safetensors", "json"], send: Callable[[AsyncClient], Any],
    levels: list[int], requests: int, warm_up: int, begin: Callable[[int], None], done: Callable[[], None],
) -> list[Summary]:  # fmt: skip
    found = []
    async with AsyncClient(invocation.url, timeout=invocation.timeout, retries=0, media_type=media_type) as client:
        await client.server.info()  # a server that is not there is one error, not one for each request
        for level in levels:
            begin(level)
            await measure(partial(send, client), level, warm_up, done)
            found.append((await measure(partial(send, client), level, requests, done)).summary)
    return found


def _show(found: list[Summary]) -> None:
    table = display.new_table(
        "in flight", "requests/s", "p50 ms", "p90 ms", "p99 ms", "largest ms", "compute ms", "queued ms", "batch",
        "failed", left=0,
    )  # fmt: skip
    table.columns[-1].justify = "left"
    for one in found:
        times = (one.p50_ms, one.p90_ms, one.p99_ms, one.max_ms, one.compute_ms, one.queue_ms, one.batch)
        failed = ", ".join(f"{count} {code}" for code, count in one.errors.items()) or "0"
        shown = ("–" if time is None else f"{time:.3g}" for time in times)
        table.add_row(str(one.concurrency), f"{one.requests_per_second:.4g}", *shown, failed)
    display.print_out(table)
    succeeded = sum(one.succeeded for one in found)
    typer.echo(f"{succeeded} requests succeeded; latencies include encoding and decoding in this client")
