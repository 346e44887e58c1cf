"""Completion of names in a shell: taps, and what the server holds.

A server that does not answer within a second, or refuses, completes nothing and prints nothing.
"""

import json
from collections.abc import Callable, Iterable
from typing import get_args

import typer

from attention_client.client import Client
from attention_contract.schemas.attention import Tap
from attention_contract.schemas.server import Variant

_INPUTS = ("query", "key", "value", "mask", "past_key", "past_value", "gate", "beta")
_TIMEOUT = 1.0
"""Seconds that a completion may wait for the server."""


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _held(
    question: Callable[..., Iterable[str]], about: str | None = None
) -> Callable[[typer.Context, str], list[str]]:
    """Return a completion by names that the server holds.

    ``question`` asks a client for them; ``about``: the argument of the command that it asks about.
    """

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        arguments = []
        if about is not None:
            # Before an option without its value, the parser leaves arguments where they are.
            words = [ctx.params.get(about), *(word for word in ctx.args if not word.startswith("-"))]
            arguments = [word for word in words if word][:1]
            if not arguments:
                return []
        try:
            with Client(ctx.find_root().params.get("url"), timeout=_TIMEOUT, retries=0) as client:
                return _starting(dict.fromkeys(question(client, *arguments)), incomplete)
        except Exception:  # a shell that completes a word shows no errors
            return []

    return complete


def taps(incomplete: str) -> list[str]:
    """Complete the name of a tap."""
    return _starting(get_args(Tap), incomplete)


modules = _held(lambda client: (module.name for module in client.modules.list().modules))
models = _held(lambda client: (module.id for module in client.models.list().data))
explained = _held(
    lambda client: [
        *(module.name for module in client.modules.list().modules),
        *(model.id for model in client.models.list().data),
    ]
)
checkpoints = _held(lambda client: (checkpoint.path for checkpoint in client.checkpoints.list().checkpoints))
kernels = _held(
    lambda client: (variant.name for variant in client.server.variants().variants if variant.kind == "kernel")
)
parameters = _held(
    lambda client, name: (parameter.name for parameter in client.modules.parameters(name).parameters), "name"
)
"""Parameters of the module that the command names."""
layers = _held(
    lambda client, path: (str(attention.layer) for attention in client.checkpoints.get(path).attentions), "checkpoint"
)
"""Layers of the checkpoint that the command names."""
specs = _held(
    lambda client: (_spec(variant) for variant in client.server.variants().variants if variant.kind != "kernel")
)
"""Specs of one variant, as in ``{"method": {"name": "linear"}}``."""


def _spec(variant: Variant) -> str:
    named = {"name": variant.name}
    return json.dumps({"masks": [named]} if variant.kind == "mask" else {variant.kind: named})


def differentiable(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete what a gradient is taken with respect to: an input, a tap, or a parameter of the module."""
    known = [*_INPUTS, *(tap for tap in get_args(Tap) if tap not in {"lse", "output"}), "parameters"]
    return _starting(known, incomplete) + parameters(ctx, incomplete)


def compared(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete one side of a comparison: a kernel, a resident module, or a layer of a checkpoint."""
    path, hashed, _ = incomplete.partition("#")
    if not hashed:
        ends = [f"{one}#" for one in checkpoints(ctx, incomplete)]
        return kernels(ctx, incomplete) + modules(ctx, incomplete) + ends

    def sides(client: Client) -> Iterable[str]:
        for attention in client.checkpoints.get(path).attentions:
            yield f"{path}#{attention.layer}{'.cross' if attention.part == 'cross' else ''}"

    return _held(sides)(ctx, incomplete)
