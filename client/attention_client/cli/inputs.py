"""The options that forward, weights and gradients share: the inputs of the attention."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any, get_args, get_type_hints

import typer

from attention_client.cli import completion, tensor_arguments
from attention_contract.schemas.attention import Tap

Fields = dict[str, Any]
"""Request fields by name."""

_RAW_ONLY = ("spec", "num_heads", "num_kv_heads")


def _taps(names: list[str] | None) -> list[str] | None:
    """Check the names of taps; answer a misspelt one with the nearest. An option's callback."""
    known = get_args(Tap)
    for name in names or ():
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}{hint}")
    return names


Returned = Annotated[
    list[str] | None,
    typer.Option(
        "--return",
        metavar="TAP",
        callback=_taps,
        autocompletion=completion.taps,
        help="A tap to return; may be repeated.",
    ),
]
Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", autocompletion=completion.modules, help="A resident module. Left out: raw attention."
    ),
]
Kernel = Annotated[
    str | None,
    typer.Option(
        autocompletion=completion.kernels, help="fused, materialized, blocked, …; default: the planner's choice."
    ),
]
Spec = Annotated[
    str | None,
    typer.Option(metavar="JSON|FILE", autocompletion=completion.specs, help="Raw attention: the attention spec."),
]


def _file(text: str) -> Any:
    return typer.Option(metavar="FILE", help=text, rich_help_panel="Inputs")


def gather(
    source: Annotated[
        str | None,
        typer.Argument(metavar="INPUTS", help="The query, or a file of all inputs by name; - is standard input."),
    ] = None,
    query: Annotated[str | None, _file("batch × queries × d_model; raw: batch × heads × queries × width.")] = None,
    key: Annotated[str | None, _file("By default the query.")] = None,
    value: Annotated[str | None, _file("By default the key.")] = None,
    mask: Annotated[str | None, _file("true: may look; or floats, added to the scores.")] = None,
    key_mask: Annotated[str | None, _file("batch × keys, true for a real key.")] = None,
    key_lengths: Annotated[str | None, _file("For each sequence: how many keys are real.")] = None,
    global_mask: Annotated[str | None, _file("batch × keys, true for a global token of its sequence.")] = None,
    past_key: Annotated[str | None, _file("Projected keys of earlier tokens.")] = None,
    past_value: Annotated[str | None, _file("Projected values of earlier tokens.")] = None,
    offsets: Annotated[str | None, _file("For each sequence: added to a query's index.")] = None,
    positions: Annotated[str | None, _file("batch × queries: the position of each token.")] = None,
    gate: Annotated[str | None, _file("Method linear: batch × kv heads × keys, in (0, 1].")] = None,
    beta: Annotated[str | None, _file("Method linear, delta rules: batch × kv heads × keys.")] = None,
    initial_state: Annotated[str | None, _file("Method linear: the state before the first key.")] = None,
    initial_normalizer: Annotated[str | None, _file("Method linear: the sum of features that belongs to it.")] = None,
    inputs: Annotated[str | None, _file("One file for all of these, its tensors named by field.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Raw attention, as without a NAME.")] = False,
    spec: Spec = None,
    parameters: Annotated[
        str | None, typer.Option(metavar="FILE", help="Instead of the module's own; raw: those that the spec learns.")
    ] = None,
    num_heads: Annotated[int | None, typer.Option(help="Raw: tensors are batch × length × heads·width.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Raw: heads of key and value in that layout.")] = None,
    version: Annotated[str | None, typer.Option(help="Answer only if the module is at this version.")] = None,
    kernel: Kernel = None,
) -> Fields:
    """Return the request fields that these options stand for."""
    fields: Fields = {"version": version, "kernel": kernel, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    if source is not None:
        fields |= tensor_arguments.read_inputs(source, "inputs")
    if inputs is not None:
        fields |= tensor_arguments.read_all(inputs, "inputs")
    given = {"query": query, "key": key, "value": value, "mask": mask, "key_mask": key_mask, "key_lengths": key_lengths}
    given |= {"past_key": past_key, "past_value": past_value, "offsets": offsets, "positions": positions}
    given |= {
        "global_mask": global_mask,
        "gate": gate,
        "beta": beta,
        "initial_state": initial_state,
        "initial_normalizer": initial_normalizer,
    }
    fields |= {name: tensor_arguments.read(source, name) for name, source in given.items() if source is not None}
    fields["spec"] = None if spec is None else tensor_arguments.read_json(spec, "spec")
    fields["parameters"] = None if parameters is None else tensor_arguments.read_all(parameters, "parameters")
    return {name: value for name, value in fields.items() if value is not None} | {"raw": raw}


def takes_inputs(command: Callable[..., None]) -> Callable[..., None]:
    """Add the shared options to a command; its first argument is the result of ``gather``."""
    shared = inspect.signature(gather).parameters
    _, *own = inspect.signature(command).parameters.values()

    def merged(**given: Any) -> None:
        if given.get("name") == "-":  # no module has this name
            given |= {"name": None, "source": "-"}
        if given.get("as_json") and tensor_arguments.to_pipe(given.get("output")):
            raise typer.BadParameter("it and -o - would both write to standard output", param_hint="--json")
        fields = gather(**{name: given.pop(name) for name in shared})
        command(fields, **given)

    # The context and NAME stand before INPUTS.
    first = [parameter for parameter in own if parameter.name in {"ctx", "name"}]
    rest = [parameter for parameter in own if parameter.name not in {"ctx", "name"}]
    ordered = (*first, *shared.values(), *rest)
    every = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in ordered]
    hints = get_type_hints(command, include_extras=True) | get_type_hints(gather, include_extras=True)
    merged.__name__, merged.__doc__ = command.__name__, command.__doc__
    merged.__annotations__ = {parameter.name: hints[parameter.name] for parameter in every}
    merged.__dict__["__signature__"] = inspect.Signature(every)
    return merged


def with_query(fields: Fields) -> Fields:
    """Return the fields if there is a query among them."""
    if fields.get("query") is None:
        raise typer.BadParameter("expected a file; or INPUTS or --inputs that holds a query", param_hint="--query")
    return fields


def for_target(name: str | None, fields: Fields) -> Fields:
    """Return the fields for a module, or for raw attention if there is no name."""
    raw = fields.pop("raw")
    if name is not None and raw:
        raise typer.BadParameter("a module's NAME and --raw exclude each other")
    if name is not None and (wrong := [option for option in _RAW_ONLY if option in fields]):
        option = wrong[0].replace("_", "-")
        raise typer.BadParameter("it belongs to raw attention; leave it or NAME out", param_hint=f"--{option}")
    return fields
