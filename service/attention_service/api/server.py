"""The application on uvicorn."""

import signal
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from attention_service.api.connection import Connection


class Server(uvicorn.Server):
    """Uvicorn, telling the engine at once that it is to stop: readiness is lost before connections are."""

    def __init__(self, app: FastAPI, **settings: Any) -> None:
        """``settings``: of ``uvicorn.Config``."""
        # Middleware that somebody added must see every request, so there is no express past it.
        http: Any = "auto" if app.user_middleware else partial(Connection, app.state.express)
        super().__init__(
            uvicorn.Config(app, http=http, log_config=None, access_log=False, server_header=False, **settings)
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no new work and finish what is in flight; a second Ctrl-C does not wait for it."""
        engine = getattr(self.config.app.state, "engine", None)  # type: ignore[union-attr]
        if engine is not None:
            engine.drain()
        # Not super(): it would raise the signal again at the end, and a clean stop would look like a death.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
