"""The commands ``attention serve``, ``calibrate`` and ``fetch``, and ``python -m attention_service``."""

import math
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import CliApp, CliPositionalArg, SettingsConfigDict

from attention_contract.errors import AttentionError
from attention_service.api.access.api_keys import FILE, create_key, read_keys
from attention_service.api.access.layer import needs_keys, unsafe_start
from attention_service.api.access.scopes import EVERY
from attention_service.api.app import create_app
from attention_service.api.descriptors import raise_descriptor_limit
from attention_service.api.log_setup import configure_logging
from attention_service.api.serving import Server
from attention_service.cost import Calibrated
from attention_service.modules.checkpoints import hub
from attention_service.runtime.calibration import stored
from attention_service.runtime.calibration.calibrating import SECONDS, Calibration, TooBusyError
from attention_service.runtime.device import BUDGET_SHARE, Device, resolve
from attention_service.settings import Settings

SettingsT = TypeVar("SettingsT", bound=Settings)
SWITCH_S = 5e-4
"""Seconds after which a busy thread gives the interpreter to the event loop. Python's default is ten times longer."""


class CalibrateSettings(Settings):
    """Measure the device, by which times are predicted, and keep what was found beside the modules.

    A server on the same device and model repository takes it up when it starts.
    """

    model_config = SettingsConfigDict(cli_prog_name="attention calibrate")


class FetchSettings(Settings):
    """Fetch a checkpoint from the Hugging Face hub into the model repository, on this machine."""

    model_config = SettingsConfigDict(cli_prog_name="attention fetch")

    repository: CliPositionalArg[str]
    """A repository of the hub, as in openai-community/gpt2."""

    revision: str | None = None
    """A branch, a tag or a commit; default: the main branch."""


def serve(arguments: Sequence[str] | None = None) -> int:
    """Run the server until it is stopped. Returns the exit status."""
    settings = _settings(Settings, arguments)
    if settings is None:
        return 2
    if not _can_listen(settings):
        return 1
    if not _may_start(settings):
        return 2
    configure_logging(settings.log_level, settings.log_format)
    raise_descriptor_limit()
    server = Server(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        timeout_graceful_shutdown=settings.drain_seconds,
    )
    sys.setswitchinterval(SWITCH_S)
    server.run()
    return 0 if server.started else 1


def _may_start(settings: Settings) -> bool:
    """Make the first key if that is asked for. Return True if callers need no key or there is one; if not, say so."""
    try:
        known = read_keys(settings.models_dir)
    except (OSError, ValueError) as fault:
        sys.stderr.write(f"{settings.models_dir / FILE}: the API keys cannot be read: {fault}\n")
        return False
    if settings.first_key and needs_keys(settings) and not known:
        with suppress(ValueError):  # another server on the same folder was faster
            key = create_key(settings.models_dir, "first", sorted(EVERY))
            sys.stdout.write(f"the API key `first`, which is shown only now: {key}\n")
            sys.stdout.flush()
    reason = unsafe_start(settings)
    if reason is not None:
        sys.stderr.write(reason)
    return reason is None


def _can_listen(settings: Settings) -> bool:
    """Return True if the port is free; if not, say so on standard error."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        socket.create_server((settings.host, settings.port), family=family).close()
    except OSError as fault:
        reason = str(fault.strerror).partition(" (while")[0].lower()
        sys.stderr.write(f"--port (ATTENTION_PORT): cannot listen on {settings.host}:{settings.port}: {reason}\n")
        return False
    return True


def calibrate(arguments: Sequence[str] | None = None) -> int:
    """Measure the device and keep what was found. Returns the exit status."""
    settings = _settings(CalibrateSettings, arguments)
    if settings is None:
        return 2
    device = Device.open(settings.device, settings.threads)
    budget = settings.memory_budget
    room = int(BUDGET_SHARE * device.free_bytes()) if budget is None else budget
    sys.stderr.write(f"measuring {device.name} ({device.model}) for at most {SECONDS:.0f} seconds\n")
    started = time.monotonic()
    calibration = Calibration(device, room)
    while calibration.step():
        if calibration.points % 20 == 0 and sys.stderr.isatty():
            sys.stderr.write(f"\r{calibration.points} requests")
    try:
        clock = calibration.clock()
    except TooBusyError as fault:
        sys.stderr.write(f"\r{fault}\n")
        return 1
    sys.stderr.write(f"\r{calibration.points} requests in {time.monotonic() - started:.0f} seconds\n")
    sys.stdout.write(_table(clock))
    try:
        stored.save(settings.models_dir, device, stored.Stored(clock, datetime.now(UTC), calibration.points))
    except OSError as fault:
        sys.stderr.write(f"what was found could not be kept: {fault.strerror}: {settings.models_dir}\n")
        return 1
    return 0


def fetch(arguments: Sequence[str] | None = None) -> int:
    """Fetch a checkpoint from the hub. Returns the exit status."""
    settings = _settings(FetchSettings, arguments)
    if settings is None:
        return 2
    try:
        folder = hub.fetch(settings.models_dir, settings.repository, settings.revision)
    except AttentionError as fault:
        sys.stderr.write(f"{fault.detail}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


def _table(clock: Calibrated) -> str:
    """A table of the spread of single runs around their prediction, by kind."""
    rows = [
        f"{kind:<24}{math.expm1(spread.low):+8.0%}{math.expm1(spread.high):+8.0%}\n"
        for kind, spread in sorted(clock.spreads.items())
    ]
    return f"{'nine of ten runs':<24}{'from':>8}{'to':>8}\n" + "".join(rows)


def _settings(kind: type[SettingsT], arguments: Sequence[str] | None) -> SettingsT | None:
    """The settings, checked; None where they can't be, which is said on standard error."""
    try:
        settings = CliApp.run(kind, cli_args=list(sys.argv[1:] if arguments is None else arguments))
    except ValidationError as fault:
        for error in fault.errors(include_url=False):
            name = "_".join(str(part) for part in error["loc"])
            sys.stderr.write(f"--{name.replace('_', '-')} (ATTENTION_{name.upper()}): {error['msg']}\n")
        return None
    try:
        resolve(settings.device)
        settings.models_dir.mkdir(parents=True, exist_ok=True)
    except ValueError as fault:
        sys.stderr.write(f"--device (ATTENTION_DEVICE): {fault}\n")
        return None
    except OSError as fault:
        sys.stderr.write(f"--models-dir (ATTENTION_MODELS_DIR): {fault.strerror}: {settings.models_dir}\n")
        return None
    return settings


if __name__ == "__main__":
    raise SystemExit(serve())
