"""Checks of a start, each fault told in one line. They need no PyTorch, which takes seconds to import."""

import os
import re
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Final, TypeVar

from dotenv import dotenv_values
from pydantic import ValidationError
from pydantic_settings import CliApp

from attention_contract.errors import AttentionError
from attention_service.settings import Settings, listed

SettingsT = TypeVar("SettingsT", bound=Settings)
_PREFIX: Final = "ATTENTION_"
_OTHERS: Final = frozenset({"ATTENTION_URL", "ATTENTION_API_KEY", "ATTENTION_AUTOSTART"})
"""Variables of the client."""
_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")


def checked_settings(kind: type[SettingsT], arguments: Sequence[str] | None) -> SettingsT | None:
    """Return the settings; None if they are wrong, which is told on standard error."""
    try:
        settings = CliApp.run(kind, cli_args=list(sys.argv[1:] if arguments is None else arguments))
    except ValidationError as fault:
        _tell(
            f"{_named('_'.join(map(str, problem['loc'])))}: {problem['msg']}"
            for problem in fault.errors(include_url=False)
        )
        return None
    return None if _tell(_faults(settings)) else settings


def can_listen(settings: Settings) -> bool:
    """Return True if the ports are free; if not, tell it."""
    ports = {"port": settings.port, "health_port": settings.health_port}
    return not _tell(
        fault
        for name, port in ports.items()
        if port is not None
        for fault in _faults_of_port(name, settings.host, port)
    )


def _tell(faults: Iterator[str]) -> bool:
    """Write each on a line of standard error. Returns True if there was one."""
    has_warned = False
    for fault in faults:
        sys.stderr.write(f"{fault}\n")
        has_warned = True
    return has_warned


def _named(setting: str) -> str:
    return f"--{setting.replace('_', '-')} ({_PREFIX}{setting.upper()})"


def _faults(settings: Settings) -> Iterator[str]:
    yield from _misspelt()
    if _DEVICE.fullmatch(settings.device) is None:
        yield f"{_named('device')}: device {settings.device!r} is not known; expected auto, cpu, cuda or cuda:N"
    if settings.mcp and find_spec("mcp") is None:
        yield f"{_named('mcp')}: the package mcp is not installed: pip install 'attention-service[mcp]'"
    yield from _faults_of_certificate(settings)
    try:
        settings.models_dir.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        yield f"{_named('models_dir')}: {fault.strerror}: {settings.models_dir}"
        return
    yield from _faults_of_preload(settings)


def _faults_of_preload(settings: Settings) -> Iterator[str]:
    if not (names := listed(settings.preload)):
        return
    from attention_service.models.folders.model_catalogue import find_folder  # noqa: PLC0415
    from attention_service.modules.checkpoints.catalogue import paths  # noqa: PLC0415 - they import PyTorch

    for name in names:
        try:
            find_folder(settings.models_dir, name)
        except AttentionError as fault:
            near = get_close_matches(name, [*paths(settings.models_dir)], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{_named('preload')}: {name!r} cannot be loaded: {fault.detail}{hint}"


def _misspelt() -> Iterator[str]:
    """Variables, of the environment and of ``.env``, whose name is nearly that of a setting.

    Other names with the prefix may be there for somebody else: Kubernetes makes some of a service's name.
    """
    known = _OTHERS | {f"{_PREFIX}{name.upper()}" for name in Settings.model_fields}
    for name in sorted({*os.environ, *dotenv_values(".env")} - known):
        if name.startswith(_PREFIX) and (near := get_close_matches(name, known, 1, cutoff=0.85)):
            yield f"{name}: there is no such setting; did you mean {near[0]}?"


def _faults_of_certificate(settings: Settings) -> Iterator[str]:
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            yield f"{_named('ssl_keyfile')}: {key} is the key of no certificate; name that with --ssl-certfile"
        return
    for name, path in (("ssl_certfile", certificate), ("ssl_keyfile", key)):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as fault:
            yield f"{_named(name)}: {fault.strerror}: {path}"
            return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as fault:
        files = " and ".join(map(str, filter(None, (certificate, key))))
        yield f"{_named('ssl_certfile')}: expected a certificate and its key (PEM) in {files}: {fault}"


def _faults_of_port(name: str, host: str, port: int) -> Iterator[str]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as fault:
        reason = str(fault.strerror).partition(" (while")[0].lower()
        yield f"{_named(name)}: cannot listen on {host}:{port}: {reason}"
