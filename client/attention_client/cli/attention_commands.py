"""The commands about one attention: each sends one request, of a module or of raw attention."""

from collections.abc import Callable
from typing import Any, Final, get_args

import typer

from attention_client.cli import completion
from attention_client.cli.model_options import Fields, Form
from attention_client.cli.reply_output import Ending
from attention_client.cli.request_commands import RequestCommand
from attention_client.cli.tensor_arguments import read_json, read_object
from attention_contract import operations
from attention_contract.schemas.complexity import Dimension

EACH_HEAD: Final = {"tap": "context", "over": ["heads"], "set": 0}
"""The sweep of ``effects`` that is taken without one."""


def _for_programs(field: str) -> Callable[[str | None, Fields, Ending], None]:
    """Return a function that asks for a large part of the reply if a program reads it."""
    return lambda _, fields, ending: fields.setdefault(field, ending.whole)


def _sweep_and_differences(_: str | None, fields: Fields, ending: Ending) -> None:
    fields.setdefault("sweep", EACH_HEAD)
    fields["return_differences"] = ending.output is not None


def _beta(text: str, _: str) -> Any:
    """Parse one number, or several separated by commas."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        expected = f"expected a number, or one for each head as in 0.5,2; got {text!r}"
        raise typer.BadParameter(expected, param_hint="--beta") from None
    return numbers if "," in text else numbers[0]


def _sweep(text: str, _: str) -> dict[str, Any]:
    """Parse a dimension and its sizes."""
    dimension, equals, values = text.rpartition("=")
    try:
        numbers = [int(value) for value in values.split(",")]
    except ValueError:
        expected = f"expected dimension=number,number,… as in length=512,1024,2048; got {text!r}"
        raise typer.BadParameter(expected, param_hint="--sweep") from None
    if equals and dimension not in get_args(Dimension):
        raise typer.BadParameter(f"{dimension!r} is none of {', '.join(get_args(Dimension))}", param_hint="--sweep")
    return {"dimension": dimension if equals else "length", "values": numbers}


def _shape_of_sweep(name: str | None, fields: Fields, ending: Ending) -> None:
    """Take the number of queries from the sweep if none is given."""
    shape, sweep = fields.setdefault("shape", {}), fields.get("sweep")
    if "queries" not in shape:
        if sweep is None or sweep["dimension"] not in {"length", "queries"}:
            raise typer.BadParameter("expected a number, or a --sweep of length or queries", param_hint="--queries")
        shape["queries"] = sweep["values"][0]
    if "session" in fields and (name is None or ending.plot is not None):
        raise typer.BadParameter("expected a module's NAME, and no --plot", param_hint="--session")


COMMANDS: Final = {
    "forward": RequestCommand(
        "forward", operations.forward, "Compute the output of a module or of raw attention, and any taps.",
        operations.raw_forward, chief="output",
    ),
    "weights": RequestCommand(
        "weights", operations.weights,
        "Show each head's weights: statistics, the most attended keys, and with -o or --json the weights themselves.",
        operations.raw_weights, chief="weights", prepare=_for_programs("return_weights"),
    ),
    "attribution": RequestCommand(
        "attribution", operations.attribution,
        "Attribute L, the sum of output times upstream, to each weight and each head.",
        operations.raw_attribution, chief="",
    ),
    "gradients": RequestCommand(
        "gradients", operations.gradients, "Compute exact gradients with respect to inputs, taps and parameters.",
        operations.raw_gradients, chief="",
    ),
    "effects": RequestCommand(
        "effects", operations.effects,
        "Show what each edit of a sweep does to the output; by default each head is knocked out in turn.\n\n"
        "-o writes the changes of the output too.",
        operations.raw_effects, chief="effects.norm", prepare=_sweep_and_differences,
        forms={"sweep": Form(metavar="JSON|FILE", name="--edit", read=lambda text, _: read_object(text, "edit"))},
    ),
    "complexity": RequestCommand(
        "complexity", operations.complexity, "Predict the cost of an attention at a shape or over a sweep of shapes.",
        operations.raw_complexity, prepare=_shape_of_sweep,
        forms={
            "sweep": Form(metavar="DIMENSION=N,N,…", read=_sweep),
            "compare": Form(
                list[str], "JSON|FILE", name="--compare",
                read=lambda texts, field: [read_json(text, field) for text in texts],
            ),
        },
    ),
    "circuits": RequestCommand(
        "circuits", operations.circuits,
        "Show what each head's projections compute together: QK and OV circuits, spectra, composition scores.",
        forms={"with_": Form(name="--with", complete=completion.modules)},
    ),
    "rollout": RequestCommand(
        "attention.rollout", operations.rollout,
        "Show which inputs the state of each token comes from, over layers whose weights a file holds.",
        positional=("weights",), chief="values",
    ),
    "similarity": RequestCommand(
        "attention.similarity", operations.similarity,
        "Show the most similar heads of each, by weights or features that files hold.",
        positional=("a", "b"), chief="values",
        forms={"measure": Form(bool, name="--cka", read=lambda _, __: "cka")},
    ),
    "hopfield": RequestCommand(
        "hopfield.retrieve", operations.hopfield_retrieve,
        "Let states fall to stored patterns: modern Hopfield retrieval.",
        chief="states", prepare=_for_programs("return_association"),
        forms={
            "beta": Form(metavar="NUMBER[,…]", read=_beta),
            "return_association": Form(bool, name="--return-association/--no-return-association"),
        },
    ),
}  # fmt: skip
