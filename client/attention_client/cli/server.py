"""``attention info`` and ``attention variants``."""

import typer

from attention_client.cli import show
from attention_client.cli.session import AsJson, client_of, print_json


def info(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Show the server: version, device, limits and memory."""
    with client_of(ctx) as client:
        reply = client.server_info()
    if as_json:
        print_json(reply)
    else:
        show.facts(reply)


def variants(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List every score, mask, position, normalizer, method and kernel that a spec can name."""
    with client_of(ctx) as client:
        reply = client.list_variants()
    if as_json:
        print_json(reply)
    else:
        show.variants(reply)
