"""``attention compare``."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated, Any, Final, Literal

import numpy as np
import typer
from numpy.typing import NDArray
from pydantic import Field

from attention_client.cli.arguments import completion, example_inputs, tensor_arguments
from attention_client.cli.arguments.example_inputs import RandomInputs
from attention_client.cli.arguments.model_options import Fields, OptionForm, options_of, takes
from attention_client.cli.compare.compared_sides import Side, Sides
from attention_client.cli.compare.differences import Difference, compare
from attention_client.cli.invocation import client_of
from attention_client.cli.tables.reply_output import AsJson
from attention_client.cli.tables.table_output import table
from attention_client.client import Client
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.wire import to_json

_TOLERANCES: Final = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2}
"""The largest error that passes, beside the largest number of a tensor."""
_SIDE: Final = (
    "A kernel, module, module@version, spec as JSON, checkpoint#layer, file of parameters or state dict "
    "(.safetensors), or file.py:name of a torch module."
)


class Comparison(RandomInputs):
    """The computation to compare, its inputs and the tolerance."""

    module: str | None = None
    """Kernels: compare them on this module."""
    spec: dict[str, Any] | None = None
    """For kernels: the spec; for checkpoints: fields that replace those of their spec."""
    inputs: Any = None
    """The inputs, named by field; default: random numbers."""
    batch: int = Field(default=2, ge=1)
    """Sequences."""
    heads: int | None = Field(default=None, ge=1)
    """Raw attention: default 4; or of a state dict."""
    queries: int | None = Field(default=None, ge=1)
    """Queries of one sequence; default: 200, with a module 16."""
    dtype: Literal["float64", "float32", "float16"] = "float32"
    """Dtype of the inputs."""
    gradients: bool = True
    """Compare gradients too."""
    tolerance: float | None = None
    """The largest allowed ratio of difference to largest number; default: by dtype."""

    @property
    def allowed(self) -> float:
        """The largest relative difference that passes."""
        return _TOLERANCES[self.dtype] if self.tolerance is None else self.tolerance


_FORMS: Final = {
    "spec": OptionForm(metavar="JSON|FILE", read=tensor_arguments.read_object, complete=completion.specs),
    "inputs": OptionForm(metavar="FILE", read=tensor_arguments.read_all),
}


@takes(options_of(Comparison, forms=_FORMS, checked=True))
def compare_command(
    fields: Fields,
    ctx: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", autocompletion=completion.compared, help=_SIDE)],
    b: Annotated[
        str | None,
        typer.Argument(
            metavar="B",
            autocompletion=completion.compared,
            help="The same; default: the kernel materialized, in float64.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two attentions on the same inputs: where they differ, and by how much.

    Exit status 1 if a difference is larger than the tolerance.
    """
    options = Comparison(**fields)
    with client_of(ctx) as client, ExitStack() as stack:
        sides = _sides(a, b, Sides(client, options.module, options.heads, options.spec, stack))
        inputs = _inputs(sides, options)
        tensors_of_sides, times = _run(client, sides, inputs, options)
    differences = compare(*tensors_of_sides)
    passed = all(one.relative <= options.allowed for one in differences)
    if as_json:
        data = {"a": sides[0].label, "b": sides[1].label, "differences": [one.data() for one in differences]}
        typer.echo(to_json(data | {"tolerance": options.allowed, "passed": passed, "compute_ms": times}))
    else:
        _show(differences, options.allowed, times)
    if not passed:
        raise typer.Exit(1)


def _sides(a: str, b: str | None, sides: Sides) -> tuple[Side, Side]:
    """Read both sides, and check that they take the same inputs."""
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
    return first, second


def _inputs(sides: tuple[Side, Side], options: Comparison) -> Fields:
    """Return the given inputs, or random ones that both sides take, in the dtype of the comparison."""
    raw = sides[0].raw
    sent = {name: _cast(x, options.dtype) for name, x in (options.inputs or _random(sides, options)).items()}
    return sent if options.spec is None or not raw else sent | {"spec": options.spec}


def _random(sides: tuple[Side, Side], options: Comparison) -> Fields:
    """Draw inputs for raw attention or, of the width that one of the two tells, for modules."""
    draw = np.random.default_rng(options.seed).standard_normal
    batch, queries, keys = options.batch, options.queries, options.keys
    if sides[0].raw:
        sizes = (batch, options.heads or 4, queries or 200, options.head_dim)
        return example_inputs.for_raw(draw, sizes, keys, options.kv_heads)
    config = next((side.config for side in sides if side.config is not None), None)
    if config is None:
        width = next((side.local.d_model for side in sides if side.local is not None and side.local.d_model), None)
        if width is None:
            raise typer.BadParameter("the width of the modules is unknown; give --inputs", param_hint="A, B")
        config = ModuleConfig(d_model=width, num_heads=1)
    return example_inputs.for_module(config, draw, batch, queries or 16, keys)


def _run(
    client: Client, sides: tuple[Side, Side], inputs: Fields, options: Comparison
) -> tuple[list[dict[str, NDArray[Any]]], dict[str, float]]:
    """Run both sides; return the tensors of each, and the milliseconds of those that the service computed.

    A kernel as the second side computes in float64: the first one is held against exact numbers.
    """
    tensors_of_sides: list[dict[str, NDArray[Any]]] = []
    times: dict[str, float] = {}
    exact = {name: _cast(x, "float64") for name, x in inputs.items()} if sides[1].is_kernel else inputs
    for side, given in zip(sides, (inputs, exact), strict=True):
        tensors, took = side.run(client, given, _upstream(options.seed) if options.gradients else None, options.seed)
        tensors_of_sides.append(tensors)
        times |= {} if took is None else {side.label: took}
    return tensors_of_sides, times


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
    table(
        {
            "tensor": one.tensor,
            "largest difference": f"{one.max_abs:.1e}",
            "relative": f"{one.relative:.1e}",
            "cosine": "" if one.cosine is None else f"{one.cosine:.6f}",
            "verdict": "passed" if one.relative <= allowed else "FAILED",
            "where": one.note or ", ".join(f"{name} {at}" for name, at in one.where.items()),
        }
        for one in differences
    )
    took = "".join(f"; {label} {time:.3g} ms" for label, time in times.items())
    typer.echo(f"relative: beside the largest number, up to {allowed:g}{took}")
