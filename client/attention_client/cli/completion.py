"""Completion of names in a shell: taps, and what the server holds.

A server that does not answer within a second, or refuses, completes nothing and prints nothing.
"""

from collections.abc import Callable
from typing import get_args

import typer

from attention_client.client import Client
from attention_contract.schemas.attention import Tap

_INPUTS = ("query", "key", "value", "mask", "past_key", "past_value", "gate", "beta")
_SPEC_KINDS = ("score", "position", "normalizer", "method")
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


def taps(incomplete: str) -> list[str]:
    """Complete the name of a tap."""
    return _starting([*get_args(Tap)], incomplete)


def modules(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a resident module."""
    return _starting(_asked(ctx, lambda client: [one.name for one in client.modules.list().modules]), incomplete)


def parameters(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a parameter of the module that the command names."""
    name = _argument(ctx, "name")
    if name is None:
        return []
    found = _asked(ctx, lambda client: [one.name for one in client.modules.parameters(name).parameters])
    return _starting(found, incomplete)


def differentiable(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete what a gradient is taken with respect to: an input, a tap, or a parameter of the module."""
    known = [*_INPUTS, *(tap for tap in get_args(Tap) if tap not in {"lse", "output"}), "parameters"]
    return _starting(known, incomplete) + parameters(ctx, incomplete)


def _variants(ctx: typer.Context) -> list[tuple[str, str]]:
    """Return kind and name of every variant, joined while they travel through ``_asked``."""
    found = _asked(ctx, lambda client: [f"{one.kind} {one.name}" for one in client.server.variants().variants])
    return [(kind, name) for kind, _, name in (one.partition(" ") for one in found)]


def kernels(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a kernel."""
    return _starting([name for kind, name in _variants(ctx) if kind == "kernel"], incomplete)


def specs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a spec of one variant, as in ``{"method": {"name": "linear"}}``."""
    if incomplete and not incomplete.startswith("{"):
        return []
    whole = {"mask": '{{"masks": [{{"name": "{}"}}]}}'}
    whole |= {kind: f'{{{{"{kind}": {{{{"name": "{{}}"}}}}}}}}' for kind in _SPEC_KINDS}
    return _starting([whole[kind].format(name) for kind, name in _variants(ctx) if kind in whole], incomplete)


def checkpoints(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the path of a checkpoint in the model repository."""
    return _starting(
        _asked(ctx, lambda client: [one.path for one in client.checkpoints.list().checkpoints]), incomplete
    )


def layers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the number of a layer of the checkpoint that the command names."""
    path = _argument(ctx, "checkpoint")
    if path is None:
        return []
    found = _asked(ctx, lambda client: [str(one.layer) for one in client.checkpoints.get(path).attentions])
    return _starting([*dict.fromkeys(found)], incomplete)


def compared(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete one side of a comparison: a kernel, a resident module, or a layer of a checkpoint."""
    path, hashed, _ = incomplete.partition("#")
    if not hashed:
        ends = [f"{one}#" for one in checkpoints(ctx, incomplete)]
        return kernels(ctx, incomplete) + modules(ctx, incomplete) + ends
    found = _asked(
        ctx,
        lambda client: [
            f"{path}#{one.layer}{'.cross' if one.part == 'cross' else ''}"
            for one in client.checkpoints.get(path).attentions
        ],
    )
    return _starting([*dict.fromkeys(found)], incomplete)
