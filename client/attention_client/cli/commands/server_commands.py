"""``attention open`` and ``attention stop``."""

import webbrowser
from html import escape
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import typer

from attention_client.cli.invocation import Invocation
from attention_client.environment import DEFAULT_URL
from attention_client.servers import background_server

_LEADING: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>attention</title>
<meta http-equiv="refresh" content="0; url={0}"></head><body><a href="{0}">The page</a></body></html>
"""
"""A file that leads a browser to the page with the key, which would otherwise be on a command line for all to read."""


def open_page(ctx: typer.Context) -> None:
    """Open the page of the server in a browser.

    Without a server, one is started in the background, as by any other command.
    """
    url, key = ctx.ensure_object(Invocation).reached()
    address = url or DEFAULT_URL
    opened = webbrowser.open(address if key is None else _file_for(address, key).as_uri())
    note = "" if key is None else f"; if it asks for a password: the key in {background_server.record_file()}"
    typer.echo(f"{'opened' if opened else 'no browser was found; open'} {address} in a browser{note}", err=not opened)
    if not opened:
        raise typer.Exit(1)


def _file_for(address: str, key: str) -> Path:
    """Write the file that leads to the page, which only the user can read."""
    parts = urlsplit(address)
    with_key = parts._replace(netloc=f"attention:{key}@{parts.netloc}", path=f"{parts.path.rstrip('/')}/open")
    return background_server.written("open.html", _LEADING.format(escape(urlunsplit(with_key))))


def stop() -> None:
    """End the server that a command has started in the background."""
    server = background_server.stop()
    if server is None:
        typer.echo("no server of yours runs in the background", err=True)
    else:
        typer.echo(f"stopped the server on {server.url} (process {server.pid})")
