"""The application on uvicorn."""

import signal
import socket
import time
from types import FrameType
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from attention_contract.frames import MAX_FRAME_BYTES

KEEP_ALIVE_S: Final = 75
"""Seconds for which an idle connection stays open. Clients and load balancers must close theirs first, or a request may
arrive on a closed connection: httpx closes its own after 5 s, nginx and the usual balancers after 60 s."""


class Server(uvicorn.Server):
    """Uvicorn that drains the engine at the signal to stop, before it closes connections."""

    def __init__(self, app: FastAPI, **settings: Any) -> None:
        """``settings``: of ``uvicorn.Config``."""
        settings = {
            "timeout_keep_alive": KEEP_ALIVE_S,
            "ws": "websockets-sansio",
            "ws_max_size": min(MAX_FRAME_BYTES, app.state.settings.max_body_bytes),
            "ws_per_message_deflate": False,  # compressing numbers takes longer than sending them
        } | settings
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, server_header=False, **settings))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no new work and finish what is in flight. A second Ctrl-C stops at once."""
        engine = getattr(self.config.app.state, "engine", None)  # type: ignore[union-attr]
        if engine is not None:
            engine.drain()
        # uvicorn's own handler raises the signal again at the end, so that a clean stop looks like a crash.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what came on streams and close them, then all else."""
        config, began = self.config, time.monotonic()
        allowed = config.timeout_graceful_shutdown
        await config.app.state.streams.close(allowed)  # type: ignore[union-attr]
        if allowed is not None:
            config.timeout_graceful_shutdown = max(allowed - int(time.monotonic() - began), 0)
        await super().shutdown(sockets)
