"""``attention serve`` and ``python -m attention_service``: read the settings, run the server, stop it gracefully."""

import signal
import sys
from collections.abc import Sequence
from types import FrameType

import uvicorn
from pydantic import ValidationError
from pydantic_settings import CliApp

from attention_service.api.app import create_app
from attention_service.api.observing import configure_logging
from attention_service.runtime.device import resolve
from attention_service.settings import Settings


class Server(uvicorn.Server):
    """Uvicorn, telling the engine at once that it is to stop: readiness is lost before connections are."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no new work and finish what is in flight; a second Ctrl-C does not wait for it."""
        engine = getattr(self.config.app.state, "engine", None)  # type: ignore[union-attr]
        if engine is not None:
            engine.drain()
        # Not super(): it would raise the signal again at the end, and a clean stop would look like a death.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def serve(arguments: Sequence[str] | None = None) -> int:
    """Run the server until it is told to stop. Returns the exit status."""
    try:
        settings = CliApp.run(Settings, cli_args=list(sys.argv[1:] if arguments is None else arguments))
    except ValidationError as fault:
        for error in fault.errors(include_url=False):
            name = "_".join(str(part) for part in error["loc"])
            sys.stderr.write(f"--{name.replace('_', '-')} (ATTENTION_{name.upper()}): {error['msg']}\n")
        return 2
    try:
        resolve(settings.device)
        settings.models_dir.mkdir(parents=True, exist_ok=True)
    except ValueError as fault:
        sys.stderr.write(f"--device (ATTENTION_DEVICE): {fault}\n")
        return 2
    except OSError as fault:
        sys.stderr.write(f"--models-dir (ATTENTION_MODELS_DIR): {fault.strerror}: {settings.models_dir}\n")
        return 2
    configure_logging(settings.log_level, settings.log_format)
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=settings.drain_seconds,
        server_header=False,
    )
    server = Server(config)
    server.run()
    return 0 if server.started else 1


if __name__ == "__main__":
    raise SystemExit(serve())
