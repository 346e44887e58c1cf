"""The command that starts a server on this machine: whether it can, and its command line."""

import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Final

from attention_client.environment import COMMAND_GROUP
from attention_client.errors import ServerNotStarted

INSTALL: Final = "pip install 'attention-service[server,transformers]'"
_NEEDED: Final = "attention_service", "fastapi", "pydantic_settings", "torch", "uvicorn"
"""Packages by which the extra ``server`` is recognized."""
CHOSEN: Final[Mapping[str, object]] = {
    "host": "127.0.0.1",
    "require_keys": True,
    "first_key": False,
    "trusted_proxies": "",
    "ssl_certfile": None,
    "ssl_keyfile": None,
    "health_port": None,
    "replicas": 1,
}
"""Settings of every started server, whatever the environment says. Port, key, parent and idle time are set beside."""
_SET_BESIDE: Final = frozenset({"port", "key_hash", "parent_pid", "idle_exit_s"})
DEFAULTS: Final[Mapping[str, object]] = {"log_level": "warning", "drain_seconds": 1, "hub": True}
"""Settings that differ from those of ``attention serve`` unless they are given, by name or by their variable: the only
caller is who started the server."""


def lack() -> str | None:
    """Return the reason why no server can be started here; None if one can."""
    missing = next((name for name in _NEEDED if not _is_installed(name)), None)
    return missing and f"the server is not installed on this machine ({missing} is missing): {INSTALL}"


def check_installed() -> None:
    """Raise ServerNotStarted if no server can be started here."""
    if (reason := lack()) is not None:
        raise ServerNotStarted(reason)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # ValueError: its entry in sys.modules is None
        return False


def check_names(settings: Mapping[str, object]) -> None:
    """Raise TypeError for a name that is no setting of the server, or that a started server sets itself."""
    if not settings:
        return
    entry = next(iter(entry_points(group=COMMAND_GROUP, name="serve")))
    known: Mapping[str, object] = entry.load().settings.model_fields
    for name in settings:
        if name in CHOSEN or name in _SET_BESIDE:
            raise TypeError(f"{name}: a server that is started so sets it itself; for another value: attention serve")
        if name not in known:
            near = get_close_matches(name, known, 3)
            hint = f"; did you mean {', '.join(near)}?" if near else "; docs/settings.md lists them"
            raise TypeError(f"{name}: there is no such setting{hint}")


def command_of(settings: Mapping[str, object]) -> list[str]:
    """Return the command line of a server with these settings. None is the word for no value."""
    flags = [f"--{name.replace('_', '-')}={_text(value)}" for name, value in settings.items()]
    return [sys.executable, "-P", "-m", "attention_service", *flags]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(os.fspath(value) if isinstance(value, os.PathLike) else value)
