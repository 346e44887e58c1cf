"""The application on uvicorn."""

import signal
from functools import partial
from types import FrameType
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from attention_service.api.connection import Connection

KEEP_ALIVE_S: Final = 75
"""Seconds for which a connection stays open on which nothing comes. Longer than whoever calls keeps it (httpx and the
client of this service 5 s, nginx and the usual load balancers 60 s): one that the server closes just then is lost with
the request that is on its way."""


class Server(uvicorn.Server):
    """Uvicorn, telling the engine at once that it is to stop: readiness is lost before connections are."""

    def __init__(self, app: FastAPI, **settings: Any) -> None:
        """``settings``: of ``uvicorn.Config``."""
        # Middleware that somebody added must see every request, so there is no express past it.
        http: Any = "auto" if app.user_middleware else partial(Connection, app.state.express)
        settings = {"timeout_keep_alive": KEEP_ALIVE_S} | settings
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
