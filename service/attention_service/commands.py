"""The work of the commands ``attention serve`` and ``fetch``, once their settings are checked."""

import gc
import signal
import sys
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn
from rich.progress import Progress as ProgressBar

from attention_contract.errors import AttentionError
from attention_contract.operations import ANY_KEY
from attention_service.api.access.api_keys import FILE, create_key, read_keys
from attention_service.api.access.layer import needs_keys, unsafe_start
from attention_service.api.app import create_app
from attention_service.api.http_limits.descriptors import raise_descriptor_limit
from attention_service.api.observation.log_setup import configure_logging
from attention_service.api.serving import DrainingServer
from attention_service.api.stop_limit import StopLimit
from attention_service.modules.checkpoints import hub
from attention_service.runtime.device.torch_device import resolve
from attention_service.settings import Settings

SWITCH_S = 5e-4
"""Seconds after which a busy thread gives the interpreter to the event loop. Python's default is ten times longer."""


def run_server(settings: Settings) -> int:
    """Run the server until it is stopped. Returns the exit status, with which the process soon ends in any case."""
    if not (_has_device(settings) and _may_start(settings)):
        return 2
    configure_logging(settings.log_level, settings.log_format)
    raise_descriptor_limit()
    server = DrainingServer(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        timeout_graceful_shutdown=settings.drain_seconds,
    )
    server.stop_limit = StopLimit(lambda: _status(server))
    gc.enable()
    sys.setswitchinterval(SWITCH_S)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # a terminal that closes; nohup ignores it
        signal.signal(signal.SIGHUP, server.handle_exit)
    server.run()
    return _status(server)


def _status(server: DrainingServer) -> int:
    return 0 if server.started else 1


def fetch_checkpoint(settings: Settings, repository: str, revision: str | None) -> int:
    """Fetch a checkpoint from the hub. Returns the exit status."""
    try:
        with ProgressBar(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=Console(stderr=True)
        ) as bar:
            task = bar.add_task(f"fetching {repository}", total=None)
            progress = hub.Progress(on_change=lambda now: bar.update(task, completed=now.bytes, total=now.total_bytes))
            folder = hub.fetch(settings.models_dir, repository, revision, progress=progress)
    except AttentionError as fault:
        sys.stderr.write(f"{fault.detail}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


def _has_device(settings: Settings) -> bool:
    """Return True if the device is there; if not, say so."""
    try:
        resolve(settings.device)
    except ValueError as fault:
        sys.stderr.write(f"--device (ATTENTION_DEVICE): {fault}\n")
        return False
    return True


def _may_start(settings: Settings) -> bool:
    """Make the first key if that is asked for. Return True if callers need no key or there is one; if not, say so."""
    try:
        known = read_keys(settings.models_dir)
    except (OSError, ValueError) as fault:
        sys.stderr.write(f"{settings.models_dir / FILE}: the API keys cannot be read: {fault}\n")
        return False
    if settings.first_key and needs_keys(settings) and not known:
        with suppress(ValueError):  # another server on the same folder was faster
            key = create_key(settings.models_dir, "first", sorted(ANY_KEY))
            sys.stdout.write(f"the API key `first`, which is shown only now: {key}\n")
            sys.stdout.flush()
    reason = unsafe_start(settings)
    if reason is not None:
        sys.stderr.write(reason)
    return reason is None
