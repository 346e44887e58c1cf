"""``/health/live`` and ``/health/ready`` on a port and a thread of their own.

The server answers both on its own port too, when its event loop comes to it. Here they are answered however busy that
is and however many connections it has, so that an orchestrator does not restart a server that somebody floods.
"""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Final

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from attention_contract.errors import PROBLEM_MEDIA_TYPE, AttentionError, Loading, NotFound, Stuck
from attention_contract.schemas.server import Health
from attention_contract.wire import JSON, to_json
from attention_service.api.http_limits.connection_limits import ConnectionLimits
from attention_service.api.http_limits.guarded_http import GuardedHttp
from attention_service.api.http_limits.ticking_server import TickingServer
from attention_service.engine import Engine
from attention_service.settings import Settings

LOOP_DEAD_S: Final = 20.0
"""Seconds without a turn of the server's event loop after which it is dead."""


class HealthListener:
    """The listener of one server, and the application that answers there."""

    def __init__(self, served: FastAPI) -> None:
        self._served = served
        settings: Settings = served.state.settings
        self.state = SimpleNamespace(limits=ConnectionLimits(settings, lambda _: "health"))
        """The limits of its connections, which are those of the server's own."""
        self._server = TickingServer(
            uvicorn.Config(
                self, host=settings.host, port=settings.health_port or 0, http=GuardedHttp, ws="none", lifespan="on",
                log_config=None, access_log=False, server_header=False, timeout_keep_alive=settings.idle_timeout_s,
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._server.run, name="health", daemon=True)

    @property
    def port(self) -> int:
        """The port, once it listens."""
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    def start(self) -> None:
        """Listen until ``stop``."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port."""
        self._server.should_exit = True
        self._thread.join(2)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        try:
            status, kind, body = 200, JSON, to_json(self._health(scope["path"]))
        except AttentionError as error:
            status, kind, body = error.status, PROBLEM_MEDIA_TYPE, to_json(error.to_problem())
        headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        watching = asyncio.create_task(self.state.limits.watch())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        watching.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    def _health(self, path: str) -> Health:
        """Return what the server's own port answers. Raises what is wrong with it."""
        if path not in {"/health/live", "/health/ready"}:
            raise NotFound(f"{path[:80]}: this port answers /health/live and /health/ready")
        idle = time.monotonic() - self._served.state.limits.swept_at
        if idle > LOOP_DEAD_S:
            raise Stuck(f"the event loop has been blocked for {idle:.0f} s; restart the server")
        engine: Engine | None = getattr(self._served.state, "engine", None)
        if engine is None:
            raise Loading("the server is starting; try again in a moment")
        if path == "/health/ready":
            engine.check_ready()
            return engine.health("ready")
        engine.runner.check_live()
        return engine.health("live")
