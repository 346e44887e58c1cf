"""Completion of names in a shell: taps, and what the server holds.

A server that does not answer within a second, or refuses, completes nothing and prints nothing.
"""

import json
from collections.abc import Callable, Iterable
from typing import get_args

import typer

from attention_client.client import Client
from attention_contract.schemas.attention import Tap

_INPUTS = ("query", "key", "value", "mask", "past_key", "past_value", "gate", "beta")
_TIMEOUT = 1.0
"""Seconds that a completion may wait for the server."""


def _asked(ctx: typer.Context, question: Callable[[Client], list[str]]) -> list[str]:
    """Ask the server of the command line for names; there are none without an answer."""
    url = ctx.find_root().params.get("url")
    try:
        with Client(url, timeout=_TIMEOUT, retries=0) as client:
            return question(client)
    except Exception:  # a shell that completes a word shows no errors
        return []


def _starting(names: list[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _argument(ctx: typer.Context, name: str) -> str | None:
    """Return the first argument of the command.

    Before an option without its value, the parser leaves arguments where they are.
    """
    found = ctx.params.get(name) or next((word for word in ctx.args if not word.startswith("-")), None)
    return found if isinstance(found, str) else None


def _names(ctx: typer.Context, incomplete: str, question: Callable[[Client], Iterable[str]]) -> list[str]:
    """Return the names of the server that begin so."""
    return _starting(_asked(ctx, lambda client: [*dict.fromkeys(question(client))]), incomplete)


def taps(incomplete: str) -> list[str]:
    """Complete the name of a tap."""
    return _starting([*get_args(Tap)], incomplete)


def modules(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a resident module."""
    return _names(ctx, incomplete, lambda client: (each.name for each in client.modules.list().modules))


def parameters(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a parameter of the module that the command names."""
    name = _argument(ctx, "name")
    if name is None:
        return []
    return _names(ctx, incomplete, lambda client: (each.name for each in client.modules.parameters(name).parameters))


def differentiable(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete what a gradient is taken with respect to: an input, a tap, or a parameter of the module."""
    known = [*_INPUTS, *(tap for tap in get_args(Tap) if tap not in {"lse", "output"}), "parameters"]
    return _starting(known, incomplete) + parameters(ctx, incomplete)


def kernels(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a kernel."""
    return _names(
        ctx,
        incomplete,
        lambda client: (each.name for each in client.server.variants().variants if each.kind == "kernel"),
    )


def specs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a spec of one variant, as in ``{"method": {"name": "linear"}}``."""
    if incomplete and not incomplete.startswith("{"):
        return []

    def written(client: Client) -> Iterable[str]:
        for each in client.server.variants().variants:
            if each.kind == "mask":
                yield json.dumps({"masks": [{"name": each.name}]})
            elif each.kind != "kernel":
                yield json.dumps({each.kind: {"name": each.name}})

    return _names(ctx, incomplete, written)


def checkpoints(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the path of a checkpoint in the model repository."""
    return _names(ctx, incomplete, lambda client: (each.path for each in client.checkpoints.list().checkpoints))


def layers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the number of a layer of the checkpoint that the command names."""
    path = _argument(ctx, "checkpoint")
    if path is None:
        return []
    return _names(ctx, incomplete, lambda client: (str(each.layer) for each in client.checkpoints.get(path).attentions))


def compared(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete one side of a comparison: a kernel, a resident module, or a layer of a checkpoint."""
    path, hashed, _ = incomplete.partition("#")
    if not hashed:
        ends = [f"{one}#" for one in checkpoints(ctx, incomplete)]
        return kernels(ctx, incomplete) + modules(ctx, incomplete) + ends

    def named(client: Client) -> Iterable[str]:
        for each in client.checkpoints.get(path).attentions:
            yield f"{path}#{each.layer}{'.cross' if each.part == 'cross' else ''}"

    return _names(ctx, incomplete, named)
