"""A client that can be copied, pickled and used in forked processes: each process connects for itself."""

import hashlib
import json
import os
import weakref
from collections.abc import Mapping
from typing import Any

from attention_client.calls import call
from attention_client.client import Client
from attention_contract import operations
from attention_contract.errors import ModuleNotFound
from attention_contract.operations import Operation

ClientLike = Client | str | None
"""A client, the URL of a server, or None for the environment's ``ATTENTION_URL``."""


class Connection:
    """The way to one server. Threads may share it; a copy is the same connection, and a pickle holds the settings.

    A client that was given serves the process that made it. Another process, forked or with the pickle, makes a client
    of the same settings when it first needs one. A pickle may be stored, so it has no API key: the process that reads
    it takes ``ATTENTION_API_KEY``.
    """

    def __init__(self, client: ClientLike = None) -> None:
        given = client if isinstance(client, Client) else None
        self._settings = {"base_url": client} if given is None else given.settings
        self._client: tuple[int, Client | None] = (os.getpid(), given)
        self._versions: dict[str, str] = {}
        """The version of each module that this process made or found on the server, by name."""

    def client(self) -> Client:
        """The client of this process. Raises TypeError where the given one has settings that only it can have."""
        process, client = self._client
        if client is None or process != os.getpid():
            client = Client(**self._portable())
            weakref.finalize(self, client.close)
            self._client = (os.getpid(), client)  # of two threads that make one, the last: both can be used
        return client

    def attend(self, operation: Operation[Any], fields: Mapping[str, Any]) -> Any:
        """Send a request of raw attention and return the reply."""
        return self.client().send(call(operation, fields))

    def attend_by(self, config: Mapping[str, Any], operation: Operation[Any], fields: Mapping[str, Any]) -> Any:
        """Send a request to a module of this config, which is made if the server has none, and return the reply.

        The module is not durable, and all that have this config share it: requests bring their own parameters.
        """
        name = module_name(config)
        for last in (False, True):
            version = self._versions.get(name) or self._make(name, config)
            try:
                return self.attend(operation, {**fields, "name": name, "version": version})
            except ModuleNotFound:  # the server started anew
                self._versions.pop(name, None)
                if last:
                    raise
        return None

    def _make(self, name: str, config: Mapping[str, Any]) -> str:
        info = self.client().send(
            call(operations.create_module, {"name": name, "config": config, "seed": 0, "durable": False})
        )
        self._versions[name] = info.version
        return info.version

    def _portable(self) -> dict[str, Any]:
        if self._settings is None:
            raise TypeError(
                "client: a client with http or transport cannot move to another process; give a Client with settings "
                "only, or the URL of the server"
            )
        return self._settings

    def __deepcopy__(self, memo: dict[int, Any]) -> "Connection":
        return self

    def __getstate__(self) -> dict[str, Any]:
        settings = self._portable()
        return {"settings": {name: value for name, value in settings.items() if name != "api_key"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # as a new one
        self._settings = state["settings"]

    def __repr__(self) -> str:
        return f"Connection({(self._settings or {}).get('base_url')!r})"


def module_name(config: Mapping[str, Any]) -> str:
    """The name of the module of this config: equal for equal configs."""
    text = json.dumps(config, sort_keys=True)
    return f"torch-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
