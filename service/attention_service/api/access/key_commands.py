"""The commands ``attention keys create``, ``list`` and ``revoke``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer
from pydantic import ValidationError

from attention_contract.operations import ANY_KEY, KeyScope
from attention_contract.schemas.server import CallerLimits
from attention_service.api.access.api_keys import FILE, create_key, read_keys, revoke_key
from attention_service.settings import Settings

app = typer.Typer(
    name="attention keys",
    help="The API keys of the server with this model repository. A running server notices a change within a second.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
ModelsDir = Annotated[
    Path | None, typer.Option(help="The model repository of the server; default: ATTENTION_MODELS_DIR.")
]
Scope = Annotated[
    list[str], typer.Option(metavar="SCOPE", help=f"One of {', '.join(sorted(ANY_KEY))}; several if repeated.")
]
Limit = Annotated[
    list[str],
    typer.Option(
        metavar="NAME=VALUE",
        help=f"A limit of this key, in place of the server's: {', '.join(CallerLimits.model_fields)}; several if "
        "repeated.",
    ),
]
Name = Annotated[str, typer.Argument(help="Up to 64 letters, digits, - and _.")]


@app.command()
def create(
    name: Name,
    scope: Scope = ["infer", "inspect"],  # noqa: B006
    limit: Limit = [],  # noqa: B006
    models_dir: ModelsDir = None,
) -> None:
    """Make a key and print it, this once: the server keeps its hash alone."""
    if unknown := set(scope) - ANY_KEY:
        raise typer.BadParameter(f"{unknown.pop()!r} is not one of {', '.join(sorted(ANY_KEY))}", param_hint="--scope")
    typer.echo(create_key(_root(models_dir), name, cast("Sequence[KeyScope]", scope), _limits(limit)))
    typer.echo(f"key {name} may {', '.join(sorted(set(scope)))}; send it as ATTENTION_API_KEY", err=True)


@app.command("list")
def list_keys(models_dir: ModelsDir = None) -> None:
    """List names, scopes and ages of the keys."""
    for key in read_keys(_root(models_dir)):
        typer.echo(f"{key.name:<24} {','.join(key.scopes):<32} {key.created:%Y-%m-%d %H:%M}")


@app.command()
def revoke(name: Name, models_dir: ModelsDir = None) -> None:
    """Remove a key. Requests that already run with it end as they would."""
    revoke_key(_root(models_dir), name)
    typer.echo(f"key {name} is revoked", err=True)


def keys(arguments: Sequence[str]) -> int:
    """Run ``attention keys``. Returns the exit status."""
    try:
        app(list(arguments), prog_name=app.info.name)
    except SystemExit as end:
        return int(end.code or 0)
    except ValidationError as fault:
        problem = fault.errors()[0]
        typer.echo(f"{FILE}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}", err=True)
        return 1
    except OSError as fault:
        typer.echo(f"--models-dir (ATTENTION_MODELS_DIR): {fault.strerror}: {fault.filename}", err=True)
        return 1
    except ValueError as fault:
        typer.echo(str(fault), err=True)
        return 1
    return 0


def _limits(given: Sequence[str]) -> CallerLimits:
    """The limits of ``name=value``. Raises BadParameter for one that is not known, or no number."""
    stated: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            stated[name] = int(value) if value.isdigit() else float(value)
            CallerLimits.model_validate(stated)
        except ValueError:
            raise typer.BadParameter(
                f"{text!r}: expected NAME=VALUE, a number for one of {', '.join(CallerLimits.model_fields)}",
                param_hint="--limit",
            ) from None
    return CallerLimits.model_validate(stated)


def _root(given: Path | None) -> Path:
    """The model repository. Raises ValueError if the settings are wrong."""
    try:
        return given or Settings().models_dir
    except ValidationError as fault:
        names = ", ".join(f"ATTENTION_{str(error['loc'][0]).upper()}: {error['msg']}" for error in fault.errors())
        raise ValueError(names) from None
