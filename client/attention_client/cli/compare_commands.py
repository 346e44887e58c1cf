"""``attention compare``."""

import json
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from attention_client.cli import display, tensor_arguments
from attention_client.cli.session import client_of

_TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2}
"""The largest error that passes, beside the largest number of a tensor."""


class Dtype(StrEnum):
    """A dtype of the compared kernel."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"


def compare(
    ctx: typer.Context,
    kernel: Annotated[str, typer.Argument(metavar="KERNEL", help="The kernel to judge.")],
    against: Annotated[
        str, typer.Option(help="The kernel that computes the exact numbers, in float64.")
    ] = "materialized",
    spec: Annotated[str | None, typer.Option(metavar="JSON|FILE", help="What is computed.")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 2,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="By default as many as heads.")] = None,
    queries: Annotated[int, typer.Option(min=1)] = 200,
    keys: Annotated[int | None, typer.Option(min=1, help="By default as many as queries.")] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[Dtype, typer.Option(help="What the kernel computes in.")] = Dtype.FLOAT32,
    gradients: Annotated[bool, typer.Option("--gradients/--no-gradients", help="Compare gradients too.")] = True,
    tolerance: Annotated[
        float | None, typer.Option(help="The largest error beside the largest number; default: by dtype.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the errors as JSON, and nothing else.")] = False,
) -> None:
    """Hold a kernel against the exact numbers: its output and its gradients, on random inputs.

    Exit status 1 if an error is larger than the tolerance.
    """
    rng = np.random.default_rng(seed)
    lengths = {"query": (heads, queries), "key": (kv_heads or heads, keys or queries)}
    lengths["value"] = lengths["key"]
    inputs = {
        name: rng.standard_normal((batch, *shape, head_dim)).astype(dtype.value) for name, shape in lengths.items()
    }
    upstream = rng.standard_normal((batch, heads, queries, head_dim)).astype(dtype.value)
    fields: dict[str, Any] = {} if spec is None else {"spec": tensor_arguments.read_json(spec, "spec")}
    found: dict[str, dict[str, NDArray[Any]]] = {}
    times: dict[str, float] = {}
    with client_of(ctx) as client:
        for name in (kernel, against):
            wide = np.float64 if name == against else dtype.value
            sent = {role: x.astype(wide) for role, x in inputs.items()} | fields | {"kernel": name}
            if gradients:
                reply: Any = client.attention.gradients(
                    **sent, upstream=upstream.astype(wide), wrt=[*inputs], return_=["output"]
                )
                found[name] = {"output": reply.output, **reply.gradients}
            else:
                reply = client.attention.forward(**sent)
                found[name] = {"output": reply.output}
            times[name] = reply.ran.compute_ms
    errors = {name: _error(found[kernel][name], exact) for name, exact in found[against].items()}
    allowed = _TOLERANCES[dtype.value] if tolerance is None else tolerance
    passed = all(error <= allowed for error in errors.values())  # NaN does not pass
    if as_json:
        typer.echo(json.dumps({"errors": errors, "tolerance": allowed, "passed": passed, "compute_ms": times}))
    else:
        table = display.new_table("tensor", "largest error", "verdict", left=1)
        for name, error in errors.items():
            table.add_row(name if name == "output" else f"∂L/∂{name}", f"{error:.1e}", _verdict(error, allowed))
        display.print_out(table)
        told = ", ".join(f"{name} {time:.3g} ms" for name, time in times.items())
        typer.echo(f"errors beside the largest number, up to {allowed:g}; {told}")
    if not passed:
        raise typer.Exit(1)


def _error(found: NDArray[Any], exact: NDArray[Any]) -> float:
    """The largest error beside the largest number."""
    return float(np.abs(found.astype(np.float64) - exact).max() / max(np.abs(exact).max(), np.finfo(np.float64).tiny))


def _verdict(error: float, allowed: float) -> str:
    return "passed" if error <= allowed else "FAILED"
