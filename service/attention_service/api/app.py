"""The application: routes, middleware and the engine's life, put together."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi_offline import FastAPIOffline
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import WebSocketRoute
from starlette.staticfiles import StaticFiles

from attention_contract.base import build_schemas
from attention_contract.errors import AttentionError
from attention_contract.schemas.models import LoadModel
from attention_contract.schemas.openai_api.sound_streams import SOUND_STREAM_PATH
from attention_service import __version__
from attention_service.api import documentation, problems
from attention_service.api.access.api_keys import KeyRing, limits_of, shares_of
from attention_service.api.access.layer import PROTOCOL, Access, name_of
from attention_service.api.access.quotas import Quotas
from attention_service.api.access.scopes import require_scopes
from attention_service.api.doors.agents import own_requests
from attention_service.api.doors.oip.inference_reply import HEADER_LENGTH
from attention_service.api.doors.oip.v2_errors import v2_form
from attention_service.api.doors.oip.v2_routes import add_v2_routes
from attention_service.api.doors.openai.openai_errors import openai_form
from attention_service.api.doors.openai.sound_stream import SoundStreams
from attention_service.api.http_limits.connection_limits import ConnectionLimits
from attention_service.api.observation.access_log import AccessLog
from attention_service.api.observation.metrics import Metrics
from attention_service.api.observation.telemetry import Observe, RequestLog
from attention_service.api.observation.tracing import telemetry_config
from attention_service.api.replicas import share_of
from attention_service.api.residency import keep_within_budget
from attention_service.api.routes import make_routes
from attention_service.api.session_stream import PATH as STREAM_PATH
from attention_service.api.session_stream import SessionStreams
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.models.server.model_environment import KeptPrefixes
from attention_service.runtime.device.freed_memory import keep_freed_memory
from attention_service.runtime.device.torch_device import Device
from attention_service.settings import Settings, listed

log = structlog.get_logger(__name__)
_WEB = Path(__file__).parent.parent / "web"

_COLLECTED_AFTER: Final = 20_000
"""New objects that start a garbage collection; 700 by default."""


def _engine_settings(settings: Settings) -> EngineSettings:
    """The settings of the server that its engine needs."""
    return EngineSettings(
        memory_budget=settings.memory_budget,
        host_memory_budget=settings.host_memory_budget,
        replicas=settings.replicas,
        max_queue=settings.max_queue,
        max_predicted_s=settings.max_predicted_s,
        stuck_s=settings.stuck_seconds,
        learns_times=settings.calibrate,
        max_modules=settings.max_modules,
        hub_limit=settings.hub_limit,
        recordings_limit=settings.recordings_limit,
        max_sessions=settings.max_sessions,
        session_ttl_s=settings.session_ttl_s,
        session_share=settings.session_share,
        session_pinned_share=settings.session_pinned_share,
        model_idle_s=settings.model_idle_seconds,
        model_devices=settings.model_devices,
        spare_model_process=settings.spare_model_process,
        prefixes=KeptPrefixes(settings.model_prefix_bytes, shared=settings.shared_prefixes),
    )


def create_app(
    settings: Settings | None = None, *, wait_until_ready: bool = False, sends_request_id: bool = True
) -> FastAPI:
    """The ASGI application, for any server.

    ``settings``: by default those of the environment and ``.env``. The application loads its modules after its start,
    and answers 503 until then; with ``wait_until_ready`` its start ends when they are loaded, and fails if they cannot
    be. ``sends_request_id``: False if a server or middleware around the application sets the header X-Request-ID of
    responses.
    """
    settings = share_of(settings or Settings())
    keep_freed_memory()
    build_schemas()
    metrics = Metrics()
    traces = telemetry_config()
    access = AccessLog(settings.log_level, settings.log_format)
    requests = RequestLog(metrics, access, traced=traces["tracing"])

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        device = await asyncio.to_thread(Device.open, settings.device, settings.threads, tf32=settings.tf32)
        engine = Engine(settings.models_dir, device, _engine_settings(settings))
        app.state.engine = engine
        app.state.limits.entrance = engine.entrance
        keys.share(shares_of(settings, engine.budget.total))
        metrics.watch(engine)
        if wait_until_ready:
            try:
                await engine.start()
            except BaseException:
                await engine.stop()
                raise
            kept = asyncio.create_task(_go_on(engine, settings))
        else:
            kept = asyncio.create_task(_load(engine, settings))
        async with optional_doors():
            yield
        kept.cancel()
        await engine.stop()
        requests.settle()
        log.info("stopped")

    app = FastAPIOffline(
        title="Attention service",
        version=__version__,
        description=documentation.DESCRIPTION,
        lifespan=life,
        telemetry=traces,
        swagger_ui_parameters={"tryItOutEnabled": True},
    )
    app.state.settings = settings
    keys, quotas = KeyRing(settings.models_dir, limits_of(settings), settings.replicas, settings.key_hash), Quotas()
    app.state.limits = ConnectionLimits(settings, partial(name_of, keys=keys))
    metrics.watch_connections(app.state.limits)
    app.router.routes[:0] = make_routes(siblings=settings.replicas > 1)
    app.state.streams = SessionStreams(requests, quotas)
    metrics.watch_streams(app.state.streams)
    app.router.routes.append(WebSocketRoute(STREAM_PATH, app.state.streams, name="session_stream"))
    sounds = SoundStreams(quotas.used, requests.message_log(SOUND_STREAM_PATH, "sound_stream"), PROTOCOL)
    app.router.routes.append(WebSocketRoute(SOUND_STREAM_PATH, sounds, name="sound_stream"))
    optional_doors = _add_optional_doors(app, settings)
    server: Any = {"tags": ["server"]}
    app.add_api_route(
        "/metrics", metrics.page, name="metrics", operation_id="metrics", response_class=_PlainText, **server
    )
    _add_page(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    require_scopes(app.routes)
    app.add_middleware(
        Access, settings=settings, keys=keys, quotas=quotas, agents_path=own_requests.PATH, exposed=HEADER_LENGTH
    )
    # Outside, so that what Access refuses is logged too.
    app.add_middleware(Observe, requests=requests, settings=settings, sends_request_id=sends_request_id)
    problems.install(app)
    return app


def _add_page(app: FastAPI) -> None:
    """Add the built-in page, its files, and the way to it."""
    app.add_api_route("/", _page, name="page", operation_id="page", response_class=_Html, tags=["server"])
    app.add_route("/open", _without_credentials, name="open", include_in_schema=False)
    # The page reads recordings by ranges, which are of the bytes as they lie in the file.
    app.mount("/web/recordings", StaticFiles(directory=_WEB / "recordings"), name="web")
    app.mount("/web", GZipMiddleware(StaticFiles(directory=_WEB)), name="web")


def _add_optional_doors(app: FastAPI, settings: Settings) -> Callable[[], AbstractAsyncContextManager[None]]:
    """Add the routes of other protocols that the settings ask for, and return the context in which they answer."""
    app.state.error_forms = [openai_form, v2_form] if settings.oip else [openai_form]
    if settings.oip:
        add_v2_routes(app.router.routes, siblings=settings.replicas > 1)
    if not settings.mcp:
        return nullcontext
    from attention_service.api.doors.agents.agent_door import AgentDoor  # noqa: PLC0415 - of an extra

    agents = AgentDoor(app)
    app.router.routes.append(agents.route())
    return agents.running


class _PlainText(Response):
    media_type = "text/plain"


class _Html(FileResponse):
    media_type = "text/html"


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
    await _go_on(engine, settings)


async def _go_on(engine: Engine, settings: Settings) -> None:
    """The work beside requests of an engine that is ready."""
    # Exempt all present objects from garbage collection: scanning the imported modules takes long. Requests leave no
    # cycles, and many at once hold more objects than start a collection by default.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER)
    log.info(
        "ready",
        device=engine.device.place,
        modules=len(engine.library.list()),
        models_dir=str(settings.models_dir),
        memory_budget=engine.budget.total,
    )
    await asyncio.gather(keep_within_budget(engine), _preload(engine, listed(settings.preload)))


async def _preload(engine: Engine, names: Sequence[str]) -> None:
    """Load whole models before anybody asks them."""
    for name in names:
        try:
            await engine.models.load(LoadModel(checkpoint=name))
        except AttentionError as fault:
            log.warning("a model was not loaded", model=name, reason=fault.detail)


async def _without_credentials(request: Request) -> RedirectResponse:
    """Lead a browser from an address with the key to the page: a page whose address has a key may send no requests."""
    return RedirectResponse(request.base_url)


async def _page(_: Request) -> FileResponse:
    """The built-in page."""
    return FileResponse(_WEB / "index.html")
