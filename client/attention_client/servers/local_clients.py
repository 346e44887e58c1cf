"""``local`` and ``async_local``: a server of this program's own, and a client of it.

The server listens on a free loopback port, takes only the client's key, and ends with the program, however that ends.
"""

import os
import tempfile
from collections.abc import Generator, Mapping
from functools import partial
from typing import Any
from urllib.request import getproxies

import anyio.to_thread
import httpx

from attention_client.async_client import AsyncClient
from attention_client.client import Client
from attention_client.connection_settings import LIMITS
from attention_client.servers.server_command import check_installed, check_names
from attention_client.servers.started_server import StartedServer

Folder = str | os.PathLike[str]


def local(models_dir: Folder | None = None, **settings: Any) -> "LocalClient":
    """Start a server for this program, wait until it answers, and return a client of it.

        with attention_client.local() as client:
            client.models.weights("tiny", "the cat sat on the mat")

    In a notebook, ``client = attention_client.local()``: the server ends with ``client.close()``, or with the program,
    also if that is killed. ``models_dir`` is the model repository; by default that of ``attention serve``.
    ``settings`` are those of docs/settings.md by name, as in ``memory_budget="2GB"``; without ``log_level``, only
    warnings are logged. A line on standard error tells of the start. Raises TypeError for a name that is no setting,
    and ServerNotStarted if the extra ``server`` is not installed, or with the last lines of a server that ends.
    """
    return LocalClient(_started(models_dir, settings))


def async_local(models_dir: Folder | None = None, **settings: Any) -> "LocalStart":
    """Start a server as ``local`` does, for an ``AsyncClient``.

    ``async with async_local() as client:``, or ``client = await async_local()``, which ``await client.aclose()`` ends.
    """
    return LocalStart(models_dir, settings)


class LocalClient(Client):
    """A client of a server that ends when it is closed."""

    def __init__(self, started: StartedServer) -> None:
        transport = httpx.HTTPTransport(limits=LIMITS) if getproxies() else None  # no proxy reaches this machine
        super().__init__(started.url, api_key=started.key, transport=transport)
        self._started = started

    @property
    def has_ended(self) -> bool:
        """True once its server has ended."""
        return self._started.process.poll() is not None

    def close(self) -> None:
        """Close the connections, and end the server. A client of ``with_options`` leaves both."""
        super().close()
        if self._owns_http:
            self._started.end()


class AsyncLocalClient(AsyncClient):
    """An awaited client of a server that ends when it is closed."""

    def __init__(self, started: StartedServer) -> None:
        transport = httpx.AsyncHTTPTransport(limits=LIMITS) if getproxies() else None
        super().__init__(started.url, api_key=started.key, transport=transport)
        self._started = started

    async def aclose(self) -> None:
        """Close the connections, and end the server. A client of ``with_options`` leaves both."""
        await super().aclose()
        if self._owns_http:
            await anyio.to_thread.run_sync(self._started.end)


class LocalStart:
    """A server that is started when this is awaited or entered."""

    def __init__(self, models_dir: Folder | None, settings: Mapping[str, Any]) -> None:
        self._start = partial(_started, models_dir, settings)
        self._client: AsyncClient | None = None

    def __await__(self) -> Generator[Any, None, AsyncClient]:
        return self._make().__await__()

    async def __aenter__(self) -> AsyncClient:
        self._client = await self._make()
        return self._client

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _make(self) -> AsyncClient:
        return AsyncLocalClient(await anyio.to_thread.run_sync(self._start))


def _started(models_dir: Folder | None, settings: Mapping[str, Any]) -> StartedServer:
    check_installed()
    check_names(settings)
    own = {} if models_dir is None else {"models_dir": models_dir}
    log = tempfile.TemporaryFile()  # noqa: SIM115 - the server writes it as long as it lives; it has no name
    started = StartedServer({**settings, **own, "parent_pid": os.getpid()}, log)
    started.wait()
    started.end_with_this()
    return started
