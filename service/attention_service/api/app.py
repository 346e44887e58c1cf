"""The application: routes, middleware and the engine's life, put together."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from attention_contract import lists
from attention_contract.forms import Forms
from attention_service import __version__
from attention_service.api import openapi, problems
from attention_service.api.access import AccessLog
from attention_service.api.express import Express
from attention_service.api.lane import Lane, endpoints_of
from attention_service.api.observing import Metrics, Observe, Watch
from attention_service.api.routes import make_router
from attention_service.runtime.device import Device, keep_freed_memory
from attention_service.runtime.engine import Engine
from attention_service.settings import Settings

log = structlog.get_logger(__name__)
_WEB = Path(__file__).parent.parent / "web"
_KEPT = 1.0
"""Seconds in which compiled code that is kept is there. What must be made takes ten: until then JSON takes longer."""


def create_app(settings: Settings) -> FastAPI:
    """The ASGI application for these settings. Modules are loaded once it has started; until then it is not ready."""
    keep_freed_memory()
    metrics = Metrics()
    watch = Watch(metrics, AccessLog(settings.log_level, settings.log_format))

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        device = await asyncio.to_thread(Device.open, settings.device, settings.threads)
        engine = Engine(settings.models_dir, device, settings.memory_budget, settings.max_queue)
        app.state.engine = engine
        metrics.watch(engine)
        loading = asyncio.create_task(_load(engine, settings))
        yield
        loading.cancel()
        lists.give_up()
        await engine.stop()
        watch.settle()
        log.info("stopped")

    app = FastAPIOffline(
        title="Attention service", version=__version__, lifespan=life, swagger_ui_parameters={"tryItOutEnabled": True}
    )
    app.state.settings = settings
    app.state.forms = Forms()
    app.state.express = Express(
        lambda: getattr(app.state, "engine", None), app.state.forms, watch, settings.max_body_bytes
    )
    router = make_router(settings)
    app.include_router(router)
    app.add_api_route("/metrics", metrics.page, name="metrics", include_in_schema=False)
    app.add_api_route("/", _page, name="page", include_in_schema=False)
    app.mount("/web", StaticFiles(directory=_WEB), name="web")
    document = openapi.document()
    app.openapi = lambda: document  # type: ignore[method-assign]
    problems.install(app)
    routed = app.build_middleware_stack

    def outside_in() -> ASGIApp:
        # Middleware that somebody adds must see every request: with any, there is no lane past it.
        inner = routed() if app.user_middleware else Lane(routed(), endpoints_of(router))
        return Observe(inner, watch)

    app.build_middleware_stack = outside_in  # type: ignore[method-assign]
    return app


async def _load(engine: Engine, settings: Settings) -> None:
    compiling = asyncio.create_task(_compile())
    await asyncio.wait([compiling], timeout=_KEPT)
    try:
        await engine.start()
    except Exception:
        log.exception("the store could not be loaded", models_dir=str(settings.models_dir))
        return
    # What is there now stays: the collector need not look at it again and again, which takes long with so many imports.
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
    await compiling  # what reads and writes is measured too
    if settings.calibrate:
        engine.recalibration.work = engine.measure_device
        if engine.calibration is None:
            engine.recalibration.start()


async def _compile() -> None:
    try:
        await asyncio.to_thread(lists.load)
    except Exception:
        log.exception("JSON takes longer: what reads and writes its lists could not be compiled")


async def _page(_: Request) -> FileResponse:
    return FileResponse(_WEB / "index.html")
