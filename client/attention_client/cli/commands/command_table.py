"""The commands that send one request, each in a row of ``COMMANDS``."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, get_args

import typer

from attention_client.cli.arguments import completion
from attention_client.cli.arguments.model_options import Fields, OptionForm
from attention_client.cli.arguments.tensor_arguments import read_json, read_object
from attention_client.cli.command_index import PANELS
from attention_client.cli.commands.request_commands import RequestCommand
from attention_client.cli.lazy_commands import Listed, command_of, listing
from attention_client.cli.tables.reply_output import AsJson, Ending
from attention_contract import operations
from attention_contract.schemas.costs.sweeps import Dimension

EACH_HEAD_OF_ALL_LAYERS: Final = {"tap": "context", "over": ["layers", "heads"], "set": 0}
"""The sweep of ``models effects`` that is taken without one."""
EACH_HEAD: Final = {"tap": "context", "over": ["heads"], "set": 0}
"""The sweep of ``effects`` that is taken without one."""


def _for_programs(field: str) -> Callable[[str | None, Fields, Ending], None]:
    """Return a function that asks for a large part of the reply if a program reads it."""
    return lambda _, fields, ending: fields.setdefault(field, ending.whole)


def _layers(names: list[str], _: str) -> list[int | str]:
    """Parse numbers of layers, or names as in decoder.3."""
    return [int(name) if name.isdecimal() else name for name in names]


LAYERS: Final = OptionForm(list[str], "LAYER", name="--layer", read=_layers)
"""Layers by number or name, as in decoder.3."""
SOUNDS: Final = OptionForm(list[str], "FILE", name="--audio")
"""Files of sounds."""
_OF_TEXTS: Final = {
    "text": OptionForm(metavar="TEXT"),
    "tokens": OptionForm(metavar="JSON|FILE", name="--tokens", read=read_json),
    "layers": LAYERS,
    "images": OptionForm(list[str], "FILE", name="--image"),
    "audio": SOUNDS,
}
"""Forms of the input of a whole model."""
_ENDS_OF_PATHS: Final = {
    "from_": OptionForm(metavar="JSON|FILE", name="--from", read=lambda text, _: read_object(text, "from")),
    "to": OptionForm(metavar="JSON|FILE", name="--to", read=lambda text, _: read_object(text, "to")),
}
"""Forms of the components that paths go between."""


def _labelled(_: str | None, fields: Fields, ending: Ending) -> None:
    """Leave the weights themselves to programs and pictures; name the keys of the largest weights of what is chosen."""
    returned = ending.whole or ending.plot is not None or bool(fields.get("average_heads"))
    fields.setdefault("return_weights", returned)
    if (fields.get("labels") or fields.get("select")) and not ending.whole and ending.plot is None:
        fields.setdefault("top_k", min(3, len(fields.get("labels") or range(3))))


def _looking(_: str | None, fields: Fields, ending: Ending) -> None:
    fields.setdefault("top_k", 3)
    one_by_one = bool((fields.get("select") or {}).get("heads")) or bool(fields.get("average_heads"))
    fields.setdefault("return_weights", ending.whole or ending.plot is not None or one_by_one)


def _swept_unless_paths(_: str | None, fields: Fields, __: Ending) -> None:
    """Knock out each head of each layer, unless paths are named."""
    if not {"from_", "to"} & fields.keys():
        fields.setdefault("sweep", EACH_HEAD_OF_ALL_LAYERS)


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
        raise typer.BadParameter(f"{dimension!r} is not one of {', '.join(get_args(Dimension))}", param_hint="--sweep")
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
    "info": RequestCommand("server.info", operations.server_info),
    "variants": RequestCommand("server.variants", operations.list_variants),
    "hardware": RequestCommand("server.hardware", operations.list_hardware),
    "accuracy": RequestCommand("server.accuracy", operations.accuracy),
    "forward": RequestCommand("forward", operations.forward, operations.raw_forward, chief="output"),
    "weights": RequestCommand(
        "weights", operations.weights, operations.raw_weights, chief="weights",
        prepare=_labelled,
        help="Show statistics of each head's weights; with -o or --json also the weights.\n\n"
        "With --labels or --top-k, the most attended keys of each query.",
    ),
    "attribution": RequestCommand("attribution", operations.attribution, operations.raw_attribution, chief=""),
    "gradients": RequestCommand("gradients", operations.gradients, operations.raw_gradients, chief=""),
    "effects": RequestCommand(
        "effects", operations.effects, operations.raw_effects, chief="effects.norm", prepare=_sweep_and_differences,
        forms={"sweep": OptionForm(metavar="JSON|FILE", name="--edit", read=lambda text, _: read_object(text, "edit"))},
        help="Show the change of the output by each edit of a sweep; by default each head is knocked out in turn.\n\n"
        "-o writes the changes of the output too.",
    ),
    "complexity": RequestCommand(
        "complexity", operations.complexity, operations.raw_complexity, prepare=_shape_of_sweep,
        forms={
            "sweep": OptionForm(metavar="DIMENSION=N,N,…", read=_sweep),
            "compare": OptionForm(
                list[str], "JSON|FILE", name="--compare",
                read=lambda texts, field: [read_json(text, field) for text in texts],
            ),
        },
    ),
    "circuits": RequestCommand(
        "circuits", operations.circuits, forms={"with_": OptionForm(name="--with", complete=completion.modules)}
    ),
    "rollout": RequestCommand(
        "attention.rollout", operations.rollout, positional=("weights",), chief="values",
        help="Trace each token back to the inputs, over the layers of weights in a file.",
    ),
    "similarity": RequestCommand(
        "attention.similarity", operations.similarity, positional=("a", "b"), chief="values",
        forms={"measure": OptionForm(bool, name="--cka", read=lambda _, __: "cka")},
        help="Find the most similar heads, by weights or features in files.",
    ),
    "hopfield": RequestCommand(
        "hopfield.retrieve", operations.hopfield_retrieve, chief="states", prepare=_for_programs("return_association"),
        forms={
            "beta": OptionForm(metavar="NUMBER[,…]", read=_beta),
            "return_association": OptionForm(bool, name="--return-association/--no-return-association"),
        },
    ),
    "look": RequestCommand(
        "models.weights", operations.model_weights, positional=("text",), chief="", prepare=_looking,
        forms=_OF_TEXTS, narrows=True,
        help="Show what each head of a whole model looks at in a text: statistics and largest weights.\n\n"
        "With --layer and --head, the keys of every token. -o and --json give the weights too, --plot draws them.",
    ),
    "lens": RequestCommand(
        "models.lens", operations.model_lens, positional=("text",), chief="",
        forms=_OF_TEXTS | {
            "of": OptionForm(list[str], "STATE", name="--state"),
            "targets": OptionForm(list[str], "TOKEN", name="--logit"),
        },
        help="Show what the states inside a whole model would predict: the likeliest token of each layer and token.\n\n"
        "--state heads and --logit TOKEN show what each head adds to the logit of a token. --kind jacobian --lens ID "
        "reads by a fitted lens: attention models fit-lens makes one.",
    ),
    "models list": RequestCommand("models.list", operations.list_models),
    "models show": RequestCommand("models.get", operations.get_model),
    "models load": RequestCommand("models.load", operations.load_model, positional=("checkpoint",)),
    "models unload": RequestCommand("models.unload", operations.unload_model),
    "models forward": RequestCommand(
        "models.forward", operations.model_forward, positional=("text",), chief="logits",
        forms=_OF_TEXTS | {"return_": OptionForm(list[str], "TAP", name="--return")},
        help="Show what a whole model predicts after a text, and any taps of its layers.",
    ),
    "models gradients": RequestCommand(
        "models.gradients", operations.model_gradients, positional=("text",), chief="", forms=_OF_TEXTS,
        help="Show what a prediction depends on: the gradient of its log-probability by tokens, heads and states.\n\n"
        '--of \'{"token": " mat", "against": " bed"}\' names two tokens whose margin is differentiated.',
    ),
    "models effects": RequestCommand(
        "models.effects", operations.model_effects, positional=("text",), chief="effects.value",
        prepare=_swept_unless_paths,
        forms=_OF_TEXTS
        | {"sweep": OptionForm(metavar="JSON|FILE", name="--edit", read=lambda text, _: read_object(text, "edit"))}
        | _ENDS_OF_PATHS,
        help="Show the change of a prediction by each edit of a sweep; by default each head of each layer is knocked "
        "out in turn.\n\n--layer names the swept layers; --of the number that is measured, as in models gradients.\n\n"
        '--from \'{"layer": 0, "text": "..."}\' changes what heads send along paths to the components of --to, by '
        "default the logits.",
    ),
    "models similarity": RequestCommand(
        "models.similarity", operations.model_similarity, chief="",
        help='Compare texts by a model\'s vectors: --pairs \'[["the cat sat", "a dog sat"]]\'.',
    ),
    "models lenses": RequestCommand("models.lenses", operations.list_lenses),
    "models lens-matrices": RequestCommand(
        "models.lens_matrices", operations.get_lens, chief="",
        help="Write the matrices of a fitted lens: -o lens.safetensors is what fit-lens --jacobians takes.",
    ),
    "models delete-lens": RequestCommand(
        "models.delete_lens", operations.delete_lens, help="Remove a fitted lens, or stop its fit."
    ),
    "models probes": RequestCommand("models.probes", operations.list_probes),
    "models show-probe": RequestCommand("models.probe", operations.get_probe),
    "models delete-probe": RequestCommand(
        "models.delete_probe", operations.delete_probe, help="Remove a linear probe, or stop its fit."
    ),
    "vectors list": RequestCommand("vectors.list", operations.list_vectors),
    "vectors show": RequestCommand("vectors.get", operations.get_vector),
    "vectors delete": RequestCommand(
        "vectors.delete", operations.delete_vector, help="Remove a steering vector, or stop its fit."
    ),
    "models complexity": RequestCommand("models.complexity", operations.model_complexity, forms=_ENDS_OF_PATHS),
    "modules list": RequestCommand("modules.list", operations.list_modules),
    "modules show": RequestCommand("modules.get", operations.get_module),
    "modules replace": RequestCommand("modules.replace_parameters", operations.replace_parameters),
    "sessions list": RequestCommand("sessions.list", operations.list_sessions),
    "sessions show": RequestCommand("sessions.get", operations.get_session),
    "sessions open": RequestCommand(
        "sessions.create", operations.open_session,
        forms={"from_": OptionForm(metavar="ID", name="--from", read=lambda session, _: {"session": session})},
    ),
    "sessions delete": RequestCommand(
        "sessions.delete", operations.delete_session, help="End a session and free its memory."
    ),
    "recordings list": RequestCommand("recordings.list", operations.list_recordings),
    "recordings statistics": RequestCommand("recordings.statistics", operations.recording_statistics),
    "recordings similarity": RequestCommand("recordings.similarity", operations.recording_similarity),
    "recordings rollout": RequestCommand("recordings.rollout", operations.recording_rollout),
    "recordings delete": RequestCommand(
        "recordings.delete", operations.delete_recording, help="Remove a stored recording."
    ),
}  # fmt: skip
"""The commands by their words. The help of most is the summary of the operation."""


def group(words: str, *, lists: bool = True) -> typer.Typer:
    """Return a group of commands. ``lists``: it lists by itself, without a command."""
    rows = {name.removeprefix(f"{words} "): row for name, row in COMMANDS.items() if name.startswith(f"{words} ")}
    text = next(entries[words].summary for entries in PANELS.values() if words in entries)
    listed = [Listed(name, row.summary, None, partial(_made, name, row)) for name, row in rows.items()]
    settings: dict[str, Any] = {"help": text, "cls": listing(listed), "rich_markup_mode": "rich"}
    app = typer.Typer(**settings, add_completion=False, no_args_is_help=not lists)
    if not lists:
        return app

    @app.callback(invoke_without_command=True, help=text)
    def list_all(ctx: typer.Context, as_json: AsJson = False) -> None:
        if ctx.invoked_subcommand is None:
            rows["list"].command()(ctx=ctx, as_json=as_json)
        elif as_json:
            where = f"it belongs behind the command, as in attention {words} list --json"
            raise typer.BadParameter(where, param_hint="--json")

    return app


def _made(name: str, row: RequestCommand) -> Any:
    return command_of(name, row.command())
