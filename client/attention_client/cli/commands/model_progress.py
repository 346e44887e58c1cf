"""A bar on the terminal while a server loads the model that a command asks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Final

from attention_client.client import Client
from attention_contract.errors import AttentionError

_SECONDS: Final = 0.2
"""Seconds between two questions about a model that is loading."""


@contextmanager
def loading_shown(client: Client, model: str) -> Iterator[None]:
    """Draw a bar on standard error as long as the model is loading, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done = Event()
    watcher = Thread(target=_watch, args=(client, model, done), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _watch(client: Client, model: str, done: Event) -> None:
    from rich.console import Console  # noqa: PLC0415 - few commands draw a bar, which takes 10 ms to import
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (TextColumn("loading {task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = None
        while not done.wait(_SECONDS):
            try:
                info = client.models.get(model, retries=0)
            except AttentionError:
                continue
            if info.state == "loading" and task is None:
                task = bar.add_task(model, total=1.0)
            if task is not None:
                bar.update(task, completed=info.progress or 0.0 if info.state == "loading" else 1.0)
