"""The application: routes, middleware and the engine's life, put together."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.telemetry import TelemetryConfig
from fastapi_offline import FastAPIOffline
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import WebSocketRoute
from starlette.staticfiles import StaticFiles

from attention_service import __version__
from attention_service.api import (  # the routes register their handlers
    documentation,
    problems,
    routes,  # noqa: F401
    session_routes,  # noqa: F401
)
from attention_service.api.access_log import AccessLog
from attention_service.api.handlers import make_routes
from attention_service.api.metrics import Metrics
from attention_service.api.session_stream import PATH as STREAM_PATH
from attention_service.api.session_stream import SessionStreams
from attention_service.api.telemetry import Observe, RequestLog
from attention_service.runtime.device import Device, keep_freed_memory
from attention_service.runtime.engine import Engine
from attention_service.settings import Settings

log = structlog.get_logger(__name__)
_WEB = Path(__file__).parent.parent / "web"


def create_app(settings: Settings) -> FastAPI:
    """The ASGI application for these settings. It loads its modules after its start and is not ready until then."""
    keep_freed_memory()
    metrics = Metrics()
    requests = RequestLog(metrics, AccessLog(settings.log_level, settings.log_format))

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        device = await asyncio.to_thread(Device.open, settings.device, settings.threads)
        engine = Engine(
            settings.models_dir,
            device,
            settings.memory_budget,
            settings.max_queue,
            settings.recordings_limit,
            settings.session_ttl_s,
            settings.session_share,
            settings.session_pinned_share,
        )
        app.state.engine = engine
        metrics.watch(engine)
        loading = asyncio.create_task(_load(engine, settings))
        yield
        loading.cancel()
        await engine.stop()
        requests.settle()
        log.info("stopped")

    app = FastAPIOffline(
        title="Attention service",
        version=__version__,
        description=documentation.DESCRIPTION,
        lifespan=life,
        separate_input_output_schemas=False,
        telemetry=_telemetry(),
        swagger_ui_parameters={"tryItOutEnabled": True},
    )
    app.state.settings = settings
    app.router.routes[:0] = make_routes()
    app.state.streams = SessionStreams(requests)
    metrics.watch_streams(app.state.streams)
    app.router.routes.append(WebSocketRoute(STREAM_PATH, app.state.streams, name="session_stream"))
    app.add_api_route("/metrics", metrics.page, name="metrics", tags=["server"], response_class=_PlainText)
    app.add_api_route("/", _page, name="page", tags=["server"], response_class=FileResponse)
    app.mount("/web", StaticFiles(directory=_WEB), name="web")
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    app.add_middleware(Observe, requests=requests)
    problems.install(app)
    return app


def _telemetry() -> TelemetryConfig:
    """FastAPI's own telemetry, if its environment variable asks for it. Otherwise no request looks for providers."""
    asked = os.environ.get("FASTAPI_OTEL_AUTO_CONFIGURE", "").lower() == "true"
    return {"tracing": asked, "metrics": asked, "logs": asked}


class _PlainText(Response):
    media_type = "text/plain"


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            separate_input_output_schemas=app.separate_input_output_schemas,
        )
        app.openapi_schema = documentation.complete(document)
    return app.openapi_schema


async def _load(engine: Engine, settings: Settings) -> None:
    try:
        await engine.start()
    except Exception:
        log.exception("the store could not be loaded", models_dir=str(settings.models_dir))
        return
    # Exempt all present objects from garbage collection: scanning the imported modules takes long.
    gc.collect()
    gc.freeze()
    for damage in engine.damaged:
        log.warning("a module was left out", reason=damage)
    log.info(
        "ready",
        device=engine.device.place,
        modules=len(engine.library.list()),
        models_dir=str(settings.models_dir),
        memory_budget=engine.budget.total,
    )
    if settings.calibrate:
        engine.recalibration.work = engine.measure_device
        if engine.calibration is None:
            engine.recalibration.start()


async def _page(_: Request) -> FileResponse:
    """The built-in page."""
    return FileResponse(_WEB / "index.html")
