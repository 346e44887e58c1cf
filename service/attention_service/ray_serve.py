"""The application on Ray Serve (extra ``ray``): ``serve run attention_service.ray_serve:build replicas=2``."""

from typing import Any, Final, Self

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from attention_service.api.access.layer import unsafe_start
from attention_service.api.app import create_app
from attention_service.api.observation.log_setup import configure_logging
from attention_service.settings import Settings

SESSION_ROUTER: Final = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
"""Ray's router that sends requests with the same ``x-session-id`` to the same replica, and others to any."""
_STARTS: Final = 3
"""Attempts to start a replica, after which Ray calls the deployment failed."""
_AFTER_DRAINING_S: Final = 10
"""Seconds in which a replica ends that has no requests any more."""


class Options(BaseModel):
    """Arguments of the application: ``args`` of a Serve config file, or ``name=value`` after its name in ``serve run``.

    ``settings`` are those of ``attention serve`` by their names, as in ``models_dir``; they win over the environment of
    the node on which a replica runs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int = Field(default=1, ge=1)
    """Replicas; with ``max_replicas`` the fewest."""

    max_replicas: int | None = Field(default=None, ge=1)
    """Replicas that Ray may start when requests wait. Default: their number is fixed."""

    target_ongoing_requests: float = Field(default=16, gt=0)
    """Requests at a time for each replica above which Ray starts another one. An open stream counts as a request."""

    max_ongoing_requests: int = Field(default=1024, ge=1)
    """Requests and streams that a replica takes at a time; others wait in Ray's proxy. Keep it above ``max_queue``:
    the service batches what waits in it, and refuses more itself."""

    num_gpus: int = Field(default=0, ge=0, le=1)
    """1 gives each replica a GPU of its own."""

    num_cpus: float = Field(default=1, gt=0)
    """Cores of each replica, by which Ray places it; also its threads of a computation."""

    sessions: bool = True
    """Find the replica of a session by its header. False in Ray's HAProxy mode, which refuses such a router."""

    settings: dict[str, Any] = Field(default_factory=dict)

    @field_validator("settings")
    @classmethod
    def _check_settings(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if unknown := sorted(settings.keys() - Settings.model_fields.keys()):
            raise ValueError(f"there are no such settings: {', '.join(unknown)}")
        return settings

    @model_validator(mode="after")
    def _check_most(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, less than replicas, which is {self.replicas}")
        return self


def settings_of(options: Options) -> Settings:
    """The settings of one replica, on the node where it runs.

    Nobody knows here who reaches Ray's proxies, so callers need API keys unless a setting says otherwise.
    """
    defaults = {
        "host": "0.0.0.0",  # noqa: S104 - nothing listens; Ray's proxies do
        "device": "cuda" if options.num_gpus else "cpu",
        "threads": max(int(options.num_cpus), 1),
        "replicas": options.max_replicas or options.replicas,
    }
    given = Settings(**options.settings).model_fields_set
    return Settings(**{name: value for name, value in defaults.items() if name not in given} | options.settings)


def build(options: Options) -> Application:
    """The application for Ray. Each replica makes the ASGI application in its own process, and is ready when it is."""

    def application() -> FastAPI:
        settings = settings_of(options)
        if (reason := unsafe_start(settings)) is not None:
            raise ValueError(reason)
        configure_logging(settings.log_level, settings.log_format)
        return create_app(settings, wait_until_ready=True, sends_request_id=False)

    class Replica:
        """One process of the service."""

        app: FastAPI

        async def check_health(self) -> None:
            """Raise Stuck if the device makes no progress. Ray then replaces the replica."""
            self.app.state.engine.runner.check_live()

    scale: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        scale = {
            "autoscaling_config": {
                "min_replicas": options.replicas,
                "max_replicas": options.max_replicas,
                "target_ongoing_requests": options.target_ongoing_requests,
            }
        }
    if options.sessions:
        scale["request_router_config"] = RequestRouterConfig(request_router_class=SESSION_ROUTER)
    deployment = serve.deployment(
        serve.ingress(application)(Replica),
        name="attention",
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        max_ongoing_requests=options.max_ongoing_requests,
        max_constructor_retry_count=_STARTS,
        graceful_shutdown_timeout_s=settings_of(options).drain_seconds + _AFTER_DRAINING_S,
        logging_config={"enable_access_log": False},  # the service writes its own
        **scale,
    )
    return deployment.bind()
