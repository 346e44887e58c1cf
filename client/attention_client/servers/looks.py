"""``look``: the heads of a whole model over a text, in one line of a notebook or a program."""

import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final

from attention_client.client import Client
from attention_client.environment import URL_VARIABLE
from attention_client.servers.local_clients import LocalClient, local
from attention_client.servers.narrowed_looks import asks_too_much, narrow_to_channel
from attention_contract.errors import CheckpointNotFound, InvalidRequest
from attention_contract.schemas.checkpoints import FetchProgress
from attention_contract.schemas.model_requests import ModelWeightsReply
from attention_contract.schemas.models import default_model_name

_TOP_K: Final = 3
"""Keys that the text names for each token."""
_LOAD_S: Final = 600.0
"""Seconds that one call may take; the first loads the model."""
_FILES: Final = "config.json", "*.safetensors", "*.gguf"
"""Files by which the folder of a checkpoint is known."""


@dataclass(frozen=True, repr=False)
class Look:
    """The heads of a model over a text: a map in a notebook; printed, the tables of ``attention look``."""

    reply: ModelWeightsReply
    """Statistics, largest weights and weights of every head, with the tokens."""
    client: Client
    """The client of the server that answered, for further questions."""
    note: str = ""
    """The part of the model that is shown, where all of it is too much."""

    def __repr__(self) -> str:
        return repr(self.reply)

    def __str__(self) -> str:
        from attention_client.cli.tables.model_tables import looked  # noqa: PLC0415 - a notebook shows the map

        with redirect_stdout(io.StringIO()) as printed:
            looked(self.reply)
        return (f"{self.note}\n" if self.note else "") + printed.getvalue().rstrip("\n")

    def _repr_html_(self) -> str | None:
        return (f"<p>{escape(self.note)}</p>" if self.note else "") + (self.reply._repr_html_() or "")


def look(
    model: str | os.PathLike[str],
    text: str,
    *,
    layer: int | str | Sequence[int | str] | None = None,
    head: int | Sequence[int] | None = None,
) -> Look:
    """Show what the heads of a whole model look at in a text.

        attention_client.look("tiny", "the cat sat on the mat", layer=1, head=0)

    ``model`` is the name of a model such as ``tiny``, a folder of a checkpoint, or a repository of the Hugging Face
    hub, which is fetched at its first use. ``layer`` and ``head`` choose one or several; by default all, or one channel
    of a model whose channels have weights of their own, such as Mamba, which ``note`` says. The server of
    ``ATTENTION_URL`` answers; without that, one that this program starts at the first use and that ends with it. A
    folder is read where it is, by a further server. Raises what ``local`` and ``client.models.weights`` do.
    """
    client, name = _asked(model)
    fields: dict[str, Any] = {} if layer is None else {"layers": _listed(layer)}
    if head is not None:
        fields["select"] = {"heads": _listed(head)}
    note = ""
    while True:
        try:
            return Look(client.models.weights(name, text, top_k=_TOP_K, timeout=_LOAD_S, **fields), client, note)
        except InvalidRequest as refused:
            if not asks_too_much(refused, fields):
                raise
            note = narrow_to_channel(client, name, fields)


def _listed(chosen: Any) -> list[Any]:
    return [chosen] if isinstance(chosen, int | str) else [*chosen]


def _asked(model: str | os.PathLike[str]) -> tuple[Client, str]:
    """Return a client of the server that answers, and the name of the model there."""
    url, place = os.environ.get(URL_VARIABLE), Path(os.path.abspath(model))
    if url or not _is_checkpoint(place):
        client, path = _named(url) if url else _started(None), os.fspath(model)
        if "/" in path:
            _have(client, path)
        return client, default_model_name(path)
    root = _root_of(place)
    client = _started(root)
    client.models.load(place.relative_to(root).as_posix(), name=place.name, timeout=_LOAD_S)
    return client, place.name


def _is_checkpoint(place: Path) -> bool:
    return place.is_file() or any(any(place.glob(pattern)) for pattern in _FILES)


def _have(client: Client, path: str) -> None:
    """Let the server fetch a repository of the hub unless it has it."""
    try:
        client.checkpoints.get(path)
    except CheckpointNotFound:
        client.checkpoints.fetch(path, on_progress=_told, timeout=_LOAD_S)
        sys.stderr.write("\n")


def _root_of(place: Path) -> Path:
    """Return the smallest folder that holds a checkpoint, and the files that its links lead to."""
    links = [link.resolve().parent for link in place.rglob("*") if link.is_symlink()] if place.is_dir() else []
    return Path(os.path.commonpath([place if place.is_dir() else place.parent, *links]))


def _started(root: Path | None) -> Client:
    """Return a client of a server of this process; ``root``: its model repository, if not the user's."""
    client = _kept(root, os.getpid())
    if client.has_ended:
        _kept.cache_clear()
        client = _kept(root, os.getpid())
    return client


@cache
def _kept(root: Path | None, _process: int) -> LocalClient:
    """Start a server at the first call of a process, which has none of the servers of the one that it is a fork of."""
    return local() if root is None else local(root, calibrate=False)


@cache
def _named(url: str) -> Client:
    return Client(url)


def _told(progress: FetchProgress) -> None:
    total = f" of {progress.total_bytes / 1e6:.0f}" if progress.total_bytes else ""
    sys.stderr.write(f"\rfetching: {progress.bytes / 1e6:.0f}{total} MB")
    sys.stderr.flush()
