"""``attention explain``."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from attention_client.cli.arguments import completion, example_inputs, tensor_arguments
from attention_client.cli.arguments.model_options import FieldOption, Fields, options_of, parameter, takes
from attention_client.cli.commands.model_progress import loading_shown
from attention_client.cli.commands.request_commands import INPUTS, check_target, inputs_of
from attention_client.cli.explain.explanation import TOLERANCES, ExplainedStep, Explanation, explain
from attention_client.cli.invocation import client_of
from attention_client.cli.tables.reply_output import AsJson, drawable
from attention_client.cli.tables.table_output import print_out, table
from attention_client.client import Client
from attention_contract.errors import InvalidRequest, ModelNotFound, ModuleNotFound
from attention_contract.schemas.attention import AttentionInputs, ForwardRequest, RawForwardRequest, RawInputs
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.tensors import DTYPES
from attention_contract.wire import to_json

_OPTIONS = {
    **options_of(AttentionInputs),
    **options_of(RawInputs),
    **options_of(GradientsRequest, only={"upstream", "edits"}),
}

_SHAPE = (1, 2, 4, 4)
"""Batch, heads, tokens and width of built-in raw inputs."""
_WIDTH = 8
"""Numbers of a vector that are shown."""
_TEXT = "Kate met Tamiro in the park. Then Tam"
"""The text of a whole model if none is given; in it the model that ships repeats a name."""
_NAME = parameter(
    "name",
    Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=completion.explained,
            help="A resident module, or a whole model such as tiny. Left out: raw attention.",
        ),
    ],
)


_SOURCE = parameter(
    "source",
    Annotated[
        str | None,
        typer.Argument(
            metavar="INPUTS",
            help="The query, or a file of all inputs by name; - is standard input. Of a whole model: the text.",
        ),
    ],
)


def _inputs_or_text(given: Fields, options: Mapping[str, FieldOption]) -> Fields:
    """Take the inputs out of what was given; where they are no file, leave them as the text of a whole model."""
    source, text = given["source"], given["text"]
    if source is not None and given["name"] not in {None, "-"} and not tensor_arguments.is_source(source):
        if text is not None:
            raise typer.BadParameter("it is given twice, as INPUTS and as --text", param_hint="--text")
        given["source"], given["text"] = None, source
    return inputs_of(given, options)


@takes(_OPTIONS, _inputs_or_text, (_NAME, _SOURCE, *INPUTS[2:]))
def explain_command(
    fields: Fields,
    ctx: typer.Context,
    name: str | None = None,
    head: Annotated[int, typer.Option(min=0, help="The head to follow.")] = 0,
    row: Annotated[int | None, typer.Option(min=0, help="The query to follow; default: the last.")] = None,
    sequence: Annotated[int, typer.Option(min=0, help="The sequence of the batch.")] = 0,
    layer: Annotated[
        str | None, typer.Option(metavar="LAYER", help="The layer of a whole model, as in 3 or decoder.3; default: 0.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="The text that a whole model reads.")] = None,
    keys: Annotated[int, typer.Option(min=1, help="Show this many keys: those of the largest weights.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the built-in inputs.")] = 0,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=drawable, help="Draw the steps into a .svg, .png or .pdf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain the attention of one query step by step, forward and backward, with its numbers.

    NAME is a resident module, or a whole model such as tiny, which reads a text. Without inputs, a few random tokens of
    the right shape are taken.
    """
    rng = np.random.default_rng(seed)
    with client_of(ctx) as client:
        if name is not None and not fields and _is_model(client, name, chosen=bool(layer or text)):
            explanation = _of_model(client, name, layer or "0", text or _TEXT, head, row)
            _end(explanation, figure, keys, as_json=as_json)
            return
        check_target(name, fields, ForwardRequest, RawForwardRequest)
        if layer is not None or text is not None:
            raise typer.BadParameter(
                "they apply to a whole model without other inputs; NAME is none", param_hint="--layer and --text"
            )
        if fields.get("query") is None and name is not None:
            fields |= example_inputs.for_module(
                client.modules.get(name).config, example_inputs.one_digit(rng), 1, _SHAPE[2], None
            )
        elif fields.get("query") is None:
            drawn = example_inputs.for_raw(example_inputs.one_digit(rng), _SHAPE)
            given = drawn | {name: value for name, value in fields.items() if name != "upstream"}
            fields |= example_inputs.with_learned(client, given, rng)
        length = np.asarray(fields["query"]).shape[-2]
        explanation = explain(
            client, name, fields, sequence=sequence, head=head, query=length - 1 if row is None else row
        )
    _end(explanation, figure, keys, as_json=as_json)


def _is_model(client: Client, name: str, *, chosen: bool) -> bool:
    """Return True if a name is that of a whole model, and of no module unless a layer or a text was chosen."""
    try:
        if not chosen:
            client.modules.get(name)
            return False
        client.models.get(name)
    except ModuleNotFound as fault:
        try:
            client.models.get(name)
        except ModelNotFound:
            raise fault from None
    return True


def _of_model(client: Client, model: str, layer: str, text: str, head: int, row: int | None) -> Explanation:
    """Explain one layer of a whole model: raw attention over its queries, keys and values.

    Raises InvalidRequest for a layer that the importer does not know: its spec says what is explained.
    """
    index: str | int = int(layer) if layer.isdecimal() else layer
    with loading_shown(client, model):
        reply = client.models.forward(model, text, layers=[index], return_=["q", "k", "v", "weights"], top_k=0)
    taps = reply.layers[0]
    whole = _spec(client, client.models.get(model).checkpoint, layer)
    # The taps have passed the norm of queries and keys, and the position unless it is a bias.
    biased = whole.get("position") if whole.get("position", {}).get("name") in {"alibi", "relative_bias"} else None
    spec = {name: value for name, value in whole.items() if name not in {"position", "qk_norm"}}
    fields = {"query": taps.q, "key": taps.k, "value": taps.v, "spec": spec | ({"position": biased} if biased else {})}
    query = np.shape(taps.q)[-2] - 1 if row is None else row
    explanation = explain(client, None, fields, sequence=0, head=head, query=query)
    labels = reply.labels[0] if isinstance(reply.labels, list) else reply.labels
    tokens = " ".join(f"{at} {token!r}" for at, token in enumerate(labels.tokens))
    notes = [f"layer {layer} of {model}; tokens: {tokens}", *explanation.notes]
    computed = np.asarray(taps.weights)[head, query]  # a single text has no batch
    explained = next(step.values for step in explanation.forward if step.tap == "weights")
    checks = explanation.checks | {f"w = the weights of {model}": float(np.abs(computed - explained).max())}
    tolerance = max(explanation.tolerance, TOLERANCES[DTYPES[reply.ran.dtype].itemsize])
    return replace(explanation, notes=notes, checks=checks, tolerance=tolerance)


def _spec(client: Client, checkpoint: str, layer: str) -> Mapping[str, Any]:
    """Return the spec of a layer of a whole model, by its checkpoint. Raises InvalidRequest if it is not known."""
    stack, _, number = layer.rpartition(".")
    for attention in client.checkpoints.get(checkpoint).attentions:
        part = "cross" if stack == "cross" else "self"
        if str(attention.layer) == number and attention.part == part and stack in {"", "cross", attention.stack}:
            if attention.config is not None:
                return attention.config.spec.model_dump(mode="json", exclude_none=True)
            raise InvalidRequest.at("layer", f"{layer} of {checkpoint} cannot be explained: {attention.problem}")
    raise InvalidRequest.at("layer", f"no layer {layer} of {checkpoint} has a spec; attention checkpoints lists them")


def _end(explanation: Explanation, figure: Path | None, keys: int, *, as_json: bool) -> None:
    """Write an explanation. Exits with status 1 if its steps do not fit together."""
    if figure is not None:
        _draw(explanation, figure, keys)
    if as_json:
        typer.echo(to_json(_as_data(explanation)))
    else:
        _show(explanation, keys, figure)
    if not explanation.consistent:
        typer.echo("The steps do not fit together: see the checks.", err=True)
        raise typer.Exit(1)


def _draw(explanation: Explanation, figure: Path, keys: int) -> None:
    try:
        from attention_client.cli.explain.explain_figure import draw  # noqa: PLC0415 - matplotlib is an extra
    except ModuleNotFoundError as fault:
        raise typer.BadParameter(
            f"it needs {fault.name}: pip install 'attention-service[plot]'", param_hint="--figure"
        ) from None
    draw(explanation, figure, shown_keys(explanation, keys))


def shown_keys(explanation: Explanation, count: int) -> NDArray[np.intp]:
    """Return the positions of the keys to show: those of the largest weights, in order."""
    weights = next((step.values for step in explanation.forward if step.tap == "weights"), None)
    if weights is None:
        length = next(step.values for step in explanation.forward if step.tap == "k").shape[0]
        return np.arange(min(count, length))
    return np.sort(np.argsort(-weights, kind="stable")[:count])


def _show(explanation: Explanation, count: int, figure: Path | None) -> None:
    shown = shown_keys(explanation, count)
    print_out(f"query {explanation.query} of head {explanation.head}, sequence {explanation.sequence}", "bold")
    for note in explanation.notes:
        print_out(note, "dim")
    for title, steps in (("forward", explanation.forward), ("backward", explanation.backward)):
        print_out(f"\n{title}", "bold")
        for at, step in enumerate(steps, 1):
            print_out(f"{at:>2}  {step.symbol}   {step.formula}".rstrip())
            print_out(f"    {step.sentence}", "italic")
            _show_values(step, shown)
    for identity, error in explanation.checks.items():
        verdict = "holds" if error <= explanation.tolerance else "FAILS"
        print_out(f"{identity} {verdict}: error {error:.1e} beside the largest number", "dim")
    if figure is not None:
        typer.echo(f"{figure}: {figure.stat().st_size} bytes")


def _show_values(step: ExplainedStep, shown: NDArray[np.intp]) -> None:
    values = step.values.astype(np.float64)
    if not step.per_key:
        print_out(f"      {_vector(values)}")
    elif values.ndim == 1:
        cells = {str(at): _number(values[at]) for at in shown}
        table([{"     key": " ", **cells}])
    else:
        for at in shown:
            print_out(f"      key {at}  {_vector(values[at])}")
    if step.per_key and len(values) > len(shown):
        print_out(f"      … of {len(values)} keys", "dim")


def _number(value: float) -> str:
    return "−∞" if value == -np.inf else f"{value:.4g}"


def _vector(values: NDArray[Any]) -> str:
    more = ", …" if len(values) > _WIDTH else ""
    return f"[{', '.join(_number(value) for value in values[:_WIDTH])}{more}]"


def _as_data(explanation: Explanation) -> dict[str, Any]:
    spec = explanation.spec.model_dump(mode="json", exclude_none=True)
    data = asdict(explanation) | {"spec": spec, "consistent": explanation.consistent}
    del data["tolerance"]
    return data
