"""``attention info`` and ``attention variants``."""

import typer

from attention_client.cli import display
from attention_client.cli.invocation import AsJson, client_of, present


def info(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Show the server: version, device, limits and memory."""
    with client_of(ctx) as client:
        reply = client.server.info()
    present(reply, as_json, display.facts)


def variants(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List every score, mask, position, normalizer, method and kernel that a spec can name."""
    with client_of(ctx) as client:
        reply = client.server.variants()
    present(reply, as_json, display.variants)
