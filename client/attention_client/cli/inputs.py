"""The inputs of an attention at the shell: of a resident module, or of raw attention."""

from collections.abc import Mapping
from typing import Annotated, Final

import typer
from pydantic import BaseModel

from attention_client.cli import completion, tensor_arguments
from attention_client.cli.model_options import FieldOption, Fields, fields_of, parameter

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", autocompletion=completion.modules, help="A resident module. Left out: raw attention."
    ),
]
_Source = Annotated[
    str | None,
    typer.Argument(metavar="INPUTS", help="The query, or a file of all inputs by name; - is standard input."),
]
_Inputs = Annotated[
    str | None, typer.Option(metavar="FILE", help="One file for all inputs, its tensors named by field.")
]
_Raw = Annotated[bool, typer.Option("--raw", help="Raw attention, as without a NAME.")]
INPUTS: Final = (
    parameter("name", Name),
    parameter("source", _Source),
    parameter("inputs", _Inputs),
    parameter("raw", _Raw, False),
)
"""The parameters of a command that takes inputs, beside their own options."""


def inputs_of(given: Fields, options: Mapping[str, FieldOption]) -> Fields:
    """Take the inputs and the options out of what was given, and return the request fields that they stand for.

    An option wins over a file of all inputs. What is left has the NAME.
    """
    source, inputs = given.pop("source"), given.pop("inputs")
    if given["name"] == "-":  # no module has this name
        given["name"], source = None, "-"
    fields: Fields = {}
    if source is not None:
        fields |= tensor_arguments.read_inputs(source, "inputs")
    if inputs is not None:
        fields |= tensor_arguments.read_all(inputs, "inputs")
    fields |= fields_of(given, options)
    if given.pop("raw") and given["name"] is not None:
        raise typer.BadParameter("a module's NAME and --raw exclude each other")
    return fields


def check_target(name: str | None, fields: Fields, module: type[BaseModel], raw: type[BaseModel]) -> None:
    """Check that the fields are those of a module with a NAME, and of raw attention without."""
    of_raw = {field: info for field, info in raw.model_fields.items() if field not in module.model_fields}
    option = {field: f"--{field.replace('_', '-')}" for field in of_raw}
    wrong = [option[field] for field in of_raw if field in fields]
    if name is not None and wrong:
        raise typer.BadParameter("it belongs to raw attention; leave it or NAME out", param_hint=wrong[0])
    missing = [option[field] for field, info in of_raw.items() if info.is_required() and field not in fields]
    if name is None and missing:
        raise typer.BadParameter(f"expected a module's NAME, or {' and '.join(missing)}", param_hint="NAME")
