"""The application on uvicorn."""

import asyncio
import logging
import signal
import socket
import time
from types import FrameType
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from attention_contract.frames import MAX_FRAME_BYTES
from attention_service.api.http_limits.connection_limits import ConnectionLimits
from attention_service.api.http_limits.descriptors import backlog
from attention_service.api.http_limits.guarded_http import GuardedHttp
from attention_service.api.http_limits.guarded_stream import GuardedStream
from attention_service.api.http_limits.health_listener import HealthListener
from attention_service.api.http_limits.ticking_server import TickingServer
from attention_service.api.idle_exit import IdleExit
from attention_service.api.stop_limit import STOP_S, StopLimit
from attention_service.engine import Engine
from attention_service.settings import Settings

NOTICE_S: Final = 0.25
"""Seconds between the refusal of new work and the end of idle connections, in which their callers hear of the stop. A
request that comes on a connection when it is closed would be lost."""


def _no_debug(record: logging.LogRecord) -> bool:
    """Keep debug records out: they have every header of a WebSocket's handshake, the API key among them."""
    return record.levelno > logging.DEBUG


class DrainingServer(TickingServer):
    """Uvicorn that drains the engine at the signal to stop, before it closes connections."""

    def __init__(self, app: FastAPI, **settings: Any) -> None:
        """``settings``: of ``uvicorn.Config``."""
        own: Settings = app.state.settings
        defaults: dict[str, Any] = {
            "proxy_headers": bool(own.trusted_proxies),
            "forwarded_allow_ips": own.trusted_proxies,
            "ssl_certfile": own.ssl_certfile,
            "ssl_keyfile": own.ssl_keyfile,
            "http": GuardedHttp,
            "backlog": backlog(),
            "timeout_keep_alive": own.idle_timeout_s,
            "ws": GuardedStream,
            "ws_max_size": min(MAX_FRAME_BYTES, own.max_body_bytes),
            "ws_per_message_deflate": False,  # compressing numbers takes longer than sending them
        }
        self.stop_limit: StopLimit | None = None
        """The latest end of the process; None if the process is not to end with the server."""
        self.health = None if own.health_port is None else HealthListener(app)
        self.idle_exit = None if own.idle_exit_s is None else IdleExit(own.idle_exit_s, self._works_beside)
        logging.getLogger("uvicorn.error").addFilter(_no_debug)
        super().__init__(
            uvicorn.Config(app, log_config=None, access_log=False, server_header=False, **(defaults | settings))
        )

    @property
    def _limits(self) -> ConnectionLimits:
        limits: ConnectionLimits = self.config.app.state.limits  # type: ignore[union-attr]
        return limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and check connections from now on."""
        await super().startup(sockets)
        self._watching = asyncio.create_task(self._limits.watch())
        if self.health is not None:
            self.health.start()

    def _works_beside(self) -> int:
        """Return the number of works that go on without a request: the start, downloads and fits."""
        engine: Engine | None = getattr(self.config.app.state, "engine", None)  # type: ignore[union-attr]
        if engine is None or engine.state == "loading":
            return 1
        return len(engine.modules.fetches.under_way()) + len(engine.fits)

    async def on_tick(self, counter: int) -> bool:
        """Renew the date of replies, and stop the server if nobody has asked it for long enough."""
        state, idle = self.server_state, self.idle_exit
        if idle is not None and not self.should_exit and idle.has_come(state.total_requests, len(state.tasks)):
            logging.getLogger(__name__).info("nobody has asked for %g s (idle_exit_s): the server stops", idle.limit_s)
            self.handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no new work and finish what is in flight. A second Ctrl-C stops at once."""
        engine = getattr(self.config.app.state, "engine", None)  # type: ignore[union-attr]
        if engine is not None:
            engine.drain()
        # uvicorn's own handler raises the signal again at the end, so that a clean stop looks like a crash.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        drains = self.started and not self.force_exit
        self._end_within((self.config.timeout_graceful_shutdown or 0) + STOP_S if drains else STOP_S)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what came on streams and close them, then all else."""
        config, began = self.config, time.monotonic()
        engine = getattr(config.app.state, "engine", None)  # type: ignore[union-attr]
        if engine is not None and engine.state == "draining" and self.server_state.connections:
            await asyncio.sleep(NOTICE_S)
        self._limits.stop()
        allowed = config.timeout_graceful_shutdown
        await config.app.state.streams.close(allowed)  # type: ignore[union-attr]
        if allowed is not None:
            config.timeout_graceful_shutdown = max(allowed - int(time.monotonic() - began), 0)
        await super().shutdown(sockets)
        self._end_within(STOP_S)
        self._watching.cancel()
        if self.health is not None:
            self.health.stop()

    async def _wait_tasks_to_complete(self) -> None:
        await super()._wait_tasks_to_complete()
        self._end_within(STOP_S)  # all is answered, maybe early

    def _end_within(self, seconds: float) -> None:
        if self.stop_limit is not None:
            self.stop_limit.end_within(seconds)
