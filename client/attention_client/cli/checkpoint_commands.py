"""``attention checkpoints``."""

from typing import Annotated

import typer

from attention_client.cli import completion, display
from attention_client.cli.invocation import AsJson, client_of, present
from attention_contract.base import WireModel
from attention_contract.schemas.checkpoints import CheckpointList, CheckpointReply
from attention_contract.spec import AttentionSpec


def checkpoints(
    ctx: typer.Context,
    path: Annotated[
        str | None,
        typer.Argument(autocompletion=completion.checkpoints, help="One of them: each of its attention layers."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the checkpoints of the server's model repository, or the attention layers of one; nothing is loaded."""
    with client_of(ctx) as client:
        if path is None:
            present(client.checkpoints.list(), as_json, _listed)
        else:
            present(client.checkpoints.get(path), as_json, _described)


def _listed(reply: CheckpointList) -> None:
    table = display.new_table("checkpoint", "family", "layers", "heads", "d_model", "bytes", "problem", left=2)
    for each in reply.checkpoints:
        numbers = (each.layers or None, each.heads, each.d_model)
        cells = ["" if number is None else str(number) for number in numbers]
        table.add_row(each.path, each.family or "", *cells, display.scaled(each.bytes, "B"), each.problem or "")
    display.print_out(table)


def _described(reply: CheckpointReply) -> None:
    if reply.problem is not None:
        display.print_out(reply.problem)
        return
    table = display.new_table("module", "heads", "kv", "head_dim", "d_model", "spec", "note", left=1)
    for each in reply.attentions:
        note = each.problem or (f"needs {', '.join(each.missing)}" if each.missing else "")
        if each.config is None:
            table.add_row(each.name, "", "", "", "", "", note)
            continue
        config = each.config
        sizes = (config.num_heads, config.num_kv_heads, config.head_dim, config.d_model)
        table.add_row(each.name, *map(str, sizes), _short(config.spec), note)
    display.print_out(table)


def _short(spec: AttentionSpec) -> str:
    """Name the parts of a spec that differ from the default, and their options."""
    told = []
    for field in type(spec).model_fields:
        value = getattr(spec, field)
        if value != getattr(AttentionSpec(), field):
            parts = value if isinstance(value, list) else [value]
            told += [_named(part) if isinstance(part, WireModel) else f"{field}={part}" for part in parts]
    return " ".join(told)


def _named(part: WireModel) -> str:
    options = part.model_dump(exclude_defaults=True)
    name = getattr(part, "name", "qk_norm")
    listed = ", ".join(f"{option}={value}" for option, value in options.items() if option != "name")
    return f"{name}({listed})" if listed else name
