"""The application: routes, middleware and the engine's life, put together."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import structlog
from asgi_correlation_id import CorrelationIdMiddleware
from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from attention_service import __version__
from attention_service.api import openapi, problems
from attention_service.api.observing import Metrics, Observe
from attention_service.api.routes import make_router
from attention_service.runtime.device import Device
from attention_service.runtime.engine import Engine
from attention_service.settings import Settings

log = structlog.get_logger(__name__)
_WEB = Path(__file__).parent.parent / "web"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def create_app(settings: Settings) -> FastAPI:
    """The ASGI application for these settings. Modules are loaded once it has started; until then it is not ready."""
    metrics = Metrics()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        device = await asyncio.to_thread(Device.open, settings.device, settings.threads)
        engine = Engine(settings.models_dir, device, settings.memory_budget, settings.max_queue)
        app.state.engine = engine
        metrics.watch(engine)
        loading = asyncio.create_task(_load(engine, settings))
        yield
        loading.cancel()
        await engine.stop()
        log.info("stopped")

    app = FastAPIOffline(
        title="Attention service", version=__version__, lifespan=life, swagger_ui_parameters={"tryItOutEnabled": True}
    )
    app.state.settings = settings
    app.include_router(make_router(settings))
    app.add_api_route("/metrics", metrics.page, name="metrics", include_in_schema=False)
    app.add_api_route("/", _page, name="page", include_in_schema=False)
    app.mount("/web", StaticFiles(directory=_WEB), name="web")
    document = openapi.document()
    app.openapi = lambda: document  # type: ignore[method-assign]
    problems.install(app)
    # The last one added is the outermost: every request has an id before anything else looks at it.
    app.add_middleware(Observe, metrics=metrics)
    app.add_middleware(
        CorrelationIdMiddleware,
        generator=lambda: uuid4().hex,
        validator=lambda given: _REQUEST_ID.fullmatch(given) is not None,
    )
    return app


async def _load(engine: Engine, settings: Settings) -> None:
    try:
        await engine.start()
    except Exception:
        log.exception("the store could not be loaded", models_dir=str(settings.models_dir))
        return
    if settings.calibrate:
        engine.recalibration.work = engine.measure_device
        if engine.calibration is None:
            engine.recalibration.start()
    for damage in engine.damaged:
        log.warning("a module was left out", reason=damage)
    log.info(
        "ready",
        device=str(engine.device.torch),
        modules=len(engine.library.list()),
        models_dir=str(settings.models_dir),
        memory_budget=engine.budget.total,
    )


async def _page(_: Request) -> FileResponse:
    return FileResponse(_WEB / "index.html")
