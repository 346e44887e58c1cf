"""``attention bench``."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import numpy as np
import typer
from pydantic import Field
from rich.console import Console
from rich.progress import Progress

from attention_client.async_client import AsyncClient
from attention_client.cli.arguments import example_inputs, tensor_arguments
from attention_client.cli.arguments.example_inputs import RandomInputs
from attention_client.cli.arguments.model_options import Fields, OptionForm, options_of, takes
from attention_client.cli.compare.load import measure
from attention_client.cli.invocation import Invocation, client_of, send
from attention_client.cli.tables.reply_output import AsJson
from attention_client.cli.tables.table_output import records
from attention_client.connection_settings import LIMITS
from attention_contract.tensors import DTYPES, DtypeName
from attention_contract.wire import to_json

_MAX_IN_FLIGHT: Final = LIMITS.max_connections or 100
"""The most requests in flight: those beyond it would wait for a connection in this client."""


class Load(RandomInputs):
    """The request to send, and how often."""

    module: str | None = None
    """A resident module; default: raw attention."""
    operation: Literal["forward", "weights", "gradients"] = "forward"
    """The operation."""
    request: dict[str, Any] | None = None
    """Send these fields: .json, .npz or .safetensors, - for a pipe."""
    batch: int = Field(default=1, ge=1)
    """Sequences."""
    queries: int = Field(default=128, ge=1)
    """Queries of one sequence."""
    heads: int = Field(default=8, ge=1)
    """Raw attention: query heads."""
    dtype: DtypeName = "float32"
    """Dtype of random inputs."""
    spec: dict[str, Any] | None = None
    """Raw attention: the attention spec."""
    kernel: str | None = None
    """Force this kernel; default: the planner's choice."""
    concurrency: Sequence[int] = (1, 4, 16)
    """Requests in flight at once."""
    requests: int = Field(default=200, ge=1)
    """Requests measured at each concurrency."""
    warm_up: int = Field(default=20, ge=0)
    """Requests before the measured ones, at each concurrency."""
    media_type: Literal["safetensors", "json"] = "safetensors"
    """Form of the tensors."""


def _levels(text: str, _: str) -> list[int]:
    """Parse numbers of requests in flight, separated by commas."""
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = [0]
    if min(levels) < 1 or max(levels) > _MAX_IN_FLIGHT:
        expected = f"expected numbers from 1 to {_MAX_IN_FLIGHT}, as in 1,8,32; got {text!r}"
        raise typer.BadParameter(expected, param_hint="--concurrency") from None
    return levels


def _request(text: str, field: str) -> Fields:
    fields = tensor_arguments.read_inputs(text, field)
    return {("return_" if name == "return" else name): value for name, value in fields.items()}


_FORMS: Final = {
    "request": OptionForm(metavar="FILE", read=_request),
    "spec": OptionForm(metavar="JSON|FILE", read=tensor_arguments.read_object),
    "concurrency": OptionForm(metavar="N,N,…", read=_levels),
}


@takes(options_of(Load, forms=_FORMS, checked=True))
def bench(
    fields: Fields,
    ctx: typer.Context,
    url: Annotated[str | None, typer.Argument(metavar="URL", help="Address of the server; default: --url.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a running server: latency and throughput of one request, sent many times.

    Exit status 1 if a request failed. Nothing is repeated after a failure.
    """
    invocation, load = ctx.ensure_object(Invocation), Load(**fields)
    invocation.url = url or invocation.url
    given = _fields(ctx, load)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=as_json or not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=len(load.concurrency) * (load.requests + load.warm_up))

        def begin(level: int) -> None:
            progress.update(task, description=f"{level} in flight")

        levels_measured = asyncio.run(_all_levels(invocation, load, given, begin, lambda: progress.advance(task)))
    if as_json:
        typer.echo(to_json({"operation": load.operation, "module": load.module, "levels": levels_measured}))
    else:
        records(levels_measured)
        succeeded = sum(level["succeeded"] for level in levels_measured)
        typer.echo(f"{succeeded} requests succeeded; latencies include encoding and decoding in this client")
    if any(level["errors"] for level in levels_measured):
        raise typer.Exit(1)


def _fields(ctx: typer.Context, load: Load) -> Fields:
    """Return the fields of the request to send: those of a file, or random inputs of the sizes."""
    rng = np.random.default_rng(load.seed)
    draw = example_inputs.one_digit(rng)
    fields: Fields = {
        name: value for name, value in (("kernel", load.kernel), ("spec", load.spec)) if value is not None
    }
    with client_of(ctx) as client:
        if load.request is not None:
            fields |= load.request
        elif load.module is not None:
            config = client.modules.get(load.module).config
            fields |= example_inputs.for_module(config, draw, load.batch, load.queries, load.keys)
        else:
            sizes = (load.batch, load.heads, load.queries, load.head_dim)
            fields |= example_inputs.for_raw(draw, sizes, load.keys, load.kv_heads)
        if load.request is None:
            dtype = DTYPES[load.dtype]
            fields = {name: x.astype(dtype) if isinstance(x, np.ndarray) else x for name, x in fields.items()}
        if load.module is None and load.spec is not None:
            fields = example_inputs.with_learned(client, fields, rng)
    return fields


async def _all_levels(
    invocation: Invocation, load: Load, fields: Fields, begin: Callable[[int], None], done: Callable[[], None]
) -> list[dict[str, Any]]:
    summaries = []
    url, key = invocation.reached()
    patience = invocation.timeout
    async with AsyncClient(url, timeout=patience, retries=0, media_type=load.media_type, api_key=key) as client:
        await client.server.info()  # a server that is not there is one error, not one for each request
        once = partial(send, client, load.operation, load.module, fields)
        for level in load.concurrency:
            begin(level)
            await measure(once, level, load.warm_up, done)
            summaries.append((await measure(once, level, load.requests, done)).summary)
    return summaries
