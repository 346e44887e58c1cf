"""``attention compare``."""

from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from attention_client.cli import completion, display, example_inputs, tensor_arguments
from attention_client.cli.compared_sides import Side, Sides
from attention_client.cli.differences import Difference, compare
from attention_client.cli.inputs import Fields
from attention_client.cli.invocation import AsJson, client_of
from attention_client.client import Client
from attention_contract.wire import to_json

_TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2}
"""The largest error that passes, beside the largest number of a tensor."""


class Dtype(StrEnum):
    """A dtype of the inputs."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"


def compare_command(
    ctx: typer.Context,
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            autocompletion=completion.compared,
            help="A kernel, module, module@version, spec as JSON, checkpoint#layer, file of parameters or state dict "
            "(.safetensors), or file.py:name of a torch module.",
        ),
    ],
    b: Annotated[
        str | None,
        typer.Argument(
            metavar="B",
            autocompletion=completion.compared,
            help="The same; default: the kernel materialized, in float64.",
        ),
    ] = None,
    module: Annotated[
        str | None, typer.Option(autocompletion=completion.modules, help="Kernels: compare them on this module.")
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(metavar="JSON|FILE", help="Kernels: what is computed; checkpoints: laid over their spec."),
    ] = None,
    inputs: Annotated[
        str | None, typer.Option(metavar="FILE", help="The inputs, named by field; default: random numbers.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1)] = 2,
    heads: Annotated[int | None, typer.Option(min=1, help="Raw attention: default 4; or of a state dict.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="By default as many as heads.")] = None,
    queries: Annotated[int | None, typer.Option(min=1, help="By default 200; with a module 16.")] = None,
    keys: Annotated[int | None, typer.Option(min=1, help="By default as many as queries.")] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the inputs.")] = Dtype.FLOAT32,
    gradients: Annotated[bool, typer.Option("--gradients/--no-gradients", help="Compare gradients too.")] = True,
    tolerance: Annotated[
        float | None, typer.Option(help="The largest difference beside the largest number; default: by dtype.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare two attentions on the same inputs: where they differ, and by how much.

    Exit status 1 if a difference is larger than the tolerance.
    """
    with client_of(ctx) as client, ExitStack() as stack:
        read_spec = None if spec is None else tensor_arguments.read_object(spec, "spec")
        sides = Sides(client, module, heads, read_spec, stack)
        first = sides.read(a)
        second = sides.read(b or "kernel:materialized", first)
        if b is None and not first.is_kernel:
            raise typer.BadParameter("expected another side: only a kernel has a default", param_hint="B")
        if first.raw != second.raw:
            raise typer.BadParameter(
                f"{first.label} and {second.label} take different inputs: one is a module, and the other is raw; "
                "--module NAME compares kernels on a module",
                param_hint="A, B",
            )
        rng = np.random.default_rng(seed)
        sent = {} if inputs is None else tensor_arguments.read_all(inputs, "inputs")
        if not sent and first.raw:
            sizes = (batch, heads or 4, queries or 200, head_dim)
            sent = _random(rng, _raw_shapes(sizes, keys, kv_heads))
        elif not sent:
            sent = _random(rng, _module_shapes(client, (first, second), batch, queries or 16, keys))
        sent = {name: _cast(x, dtype.value) for name, x in sent.items()}
        if read_spec is not None and first.raw:
            sent["spec"] = read_spec
        found, times = {}, {}
        for role, side in (("a", first), ("b", second)):
            # A kernel is held against exact numbers.
            wide = role == "b" and side.is_kernel
            given = {name: _cast(x, "float64") for name, x in sent.items()} if wide else sent
            found[role], took = side.run(client, given, _upstream(seed) if gradients else None, seed)
            if took is not None:
                times[side.label] = took
    differences = compare(found["a"], found["b"])
    allowed = _TOLERANCES[dtype.value] if tolerance is None else tolerance
    passed = all(one.relative <= allowed for one in differences)
    if as_json:
        data = {"a": first.label, "b": second.label, "differences": [one.data() for one in differences]}
        typer.echo(to_json(data | {"tolerance": allowed, "passed": passed, "compute_ms": times}))
    else:
        _show(differences, allowed, times)
    if not passed:
        raise typer.Exit(1)


def _raw_shapes(sizes: tuple[int, int, int, int], keys: int | None, kv_heads: int | None) -> dict[str, tuple[int, ...]]:
    batch, heads, queries, width = sizes
    others = (batch, kv_heads or heads, keys or queries, width)
    return {"query": sizes, "key": others, "value": others}


def _module_shapes(
    client: Client, sides: tuple[Side, Side], batch: int, queries: int, keys: int | None
) -> dict[str, tuple[int, ...]]:
    """Return shapes of the inputs that both sides take."""
    config = next((side.config for side in sides if side.config is not None), None)
    if config is not None:
        drawn = example_inputs.for_module(config, np.random.default_rng(0), batch, queries, keys)
        return {name: x.shape for name, x in drawn.items()}
    width = next((side.local.d_model for side in sides if side.local is not None and side.local.d_model), None)
    if width is None:
        raise typer.BadParameter("the modules do not tell their width; give --inputs", param_hint="A, B")
    shapes: dict[str, tuple[int, ...]] = {"query": (batch, queries, width)}
    return shapes if keys is None else shapes | dict.fromkeys(("key", "value"), (batch, keys, width))


def _random(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> Fields:
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def _cast(value: Any, dtype: str) -> Any:
    """Cast floating-point tensors; masks, lengths and specs stay as they are."""
    floats = isinstance(value, np.ndarray) and value.dtype.kind not in "biu"
    return value.astype(dtype) if floats else value


def _upstream(seed: int) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return a function that draws the same ∂L/∂output for outputs of the same shape."""

    def draw(output: NDArray[Any]) -> NDArray[Any]:
        return np.random.default_rng(seed + 1).standard_normal(output.shape).astype(np.float32).astype(output.dtype)

    return draw


def _show(differences: list[Difference], allowed: float, times: dict[str, float]) -> None:
    table = display.new_table("tensor", "largest difference", "relative", "cosine", "verdict", "where", left=1)
    table.columns[-1].justify = "left"
    for one in differences:
        verdict = "passed" if one.relative <= allowed else "FAILED"
        where = one.note or ", ".join(f"{name} {at}" for name, at in one.where.items())
        cosine = "" if one.cosine is None else f"{one.cosine:.6f}"
        table.add_row(one.tensor, f"{one.max_abs:.1e}", f"{one.relative:.1e}", cosine, verdict, where)
    display.print_out(table)
    took = "".join(f"; {label} {time:.3g} ms" for label, time in times.items())
    typer.echo(f"relative: beside the largest number, up to {allowed:g}{took}")
