"""What an operator sees: one log line and the metrics of each request."""

import logging
import math
import random
import re
import sys
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_contract.errors import Cancelled
from attention_service.api.access import AccessLog, Answered
from attention_service.runtime.planning.accuracy import RATIO_EDGES, Run
from attention_service.runtime.scheduling.later import Later

if TYPE_CHECKING:
    from attention_service.runtime.engine import Engine

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "attention_requests", "Requests answered", ["operation", "status"], registry=self.registry
        )
        self.seconds = Tally("attention_request_seconds", "Time to answer", ("operation",), _SECONDS)
        self.cancelled = Counter(
            "attention_requests_cancelled", "Requests whose caller went away", ["operation"], registry=self.registry
        )

        self.ratio = Tally(
            "attention_prediction_ratio", "Measured over predicted time", ("kernel", "purpose"), RATIO_EDGES
        )
        self.batches = Tally("attention_batch_requests", "Requests that ran at once", ("purpose",), _BATCHES)
        for tally in (self.seconds, self.ratio, self.batches):
            self.registry.register(tally)
        self.settle: list[Callable[[], None]] = []
        """Called before the metrics are shown: what was noted, to be counted later."""

    def count(self, answered: Sequence[Answered]) -> None:
        """Count requests."""
        for each in answered:
            self.seconds.add((each.operation,), each.seconds)
        for (operation, status), count in Counts((each.operation, each.status) for each in answered).items():
            self.requests.labels(operation, str(status)).inc(count)
            if status == Cancelled.status:
                self.cancelled.labels(operation).inc(count)

    def watch(self, engine: "Engine") -> None:
        """Show the engine's memory and queue, what it refused, and how its predictions fare."""
        gauges = {
            "attention_modules": ("Resident modules", lambda: len(engine.library.list())),
            "attention_resident_bytes": ("Bytes of resident modules", lambda: engine.library.resident_bytes),
            "attention_in_flight_bytes": ("Bytes that running requests hold", lambda: engine.budget.in_flight),
            "attention_body_bytes": ("Bytes of bodies that are read or answered", lambda: engine.budget.bodies),
            "attention_budget_bytes": ("The memory budget in bytes", lambda: engine.budget.total),
            "attention_waiting_requests": ("Requests that wait", lambda: engine.budget.waiting),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(read)
        self.registry.register(_Counted(engine))
        engine.accuracy.watchers.append(self._predicted)
        self.settle.append(engine.settle)

    def _predicted(self, run: Run) -> None:
        self.ratio.add((run.kernel, run.purpose), run.ratio)
        self.batches.add((run.purpose,), run.batch)

    async def page(self, _: Request) -> Response:
        """The metrics in Prometheus' text format."""
        for settle in self.settle:
            settle()
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


class Tally(Collector):
    """A histogram that is counted from one thread alone, for a tenth of the time that the library's own takes."""

    def __init__(self, name: str, text: str, labels: Sequence[str], edges: Sequence[float]) -> None:
        self._family = partial(HistogramMetricFamily, name, text, labels=labels)
        self._edges = edges
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def add(self, labels: tuple[str, ...], value: float) -> None:
        """Count one value: with the first edge that it does not exceed."""
        if labels not in self._counts:
            self._counts[labels], self._sums[labels] = [0] * (len(self._edges) + 1), 0.0
        self._counts[labels][bisect_left(self._edges, value)] += 1
        self._sums[labels] += value

    def collect(self) -> Iterator[Metric]:
        """The counts as they are now."""
        family = self._family()
        edges = [*map(floatToGoString, (*self._edges, math.inf))]
        for labels, counts in self._counts.items():
            family.add_metric(labels, list(zip(edges, accumulate(counts), strict=True)), self._sums[labels])
        yield family


class _Counted(Collector):
    """What the engine counts itself."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The counts as they are now."""
        refusals = CounterMetricFamily("attention_refusals", "Requests not admitted", labels=["code"])
        for code, count in self._engine.budget.refused.items():
            refusals.add_metric([code], count)
        yield refusals
        calibrations = CounterMetricFamily("attention_recalibrations", "Measurements of the device", labels=["outcome"])
        calibrations.add_metric(["done"], self._engine.recalibration.done)
        calibrations.add_metric(["failed"], self._engine.recalibration.failed)
        yield calibrations
        coverage = GaugeMetricFamily(
            "attention_prediction_coverage",
            "Share of the last requests that took as long as nine of ten should",
            labels=["kernel", "purpose"],
        )
        for kernel, purpose, share in self._engine.accuracy.coverage():
            coverage.add_metric([kernel, purpose], share)
        yield coverage


class Observe:
    """Middleware that gives each request an id, times it, counts it and logs a line for it."""

    def __init__(self, app: ASGIApp, watch: "Watch") -> None:
        self.app = app
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on and look at what comes back."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500
        identity = given_id(scope["headers"]) or self._watch.new_id()
        request_id.set(identity)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", identity.encode())]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            seconds = time.perf_counter() - started
            operation = scope.get("operation") or getattr(scope.get("route"), "name", None) or "unknown"
            self._watch.answered(scope["method"], scope["path"], operation, status, seconds, identity)


class Watch:
    """Counts and logs requests that were answered, a moment later."""

    def __init__(self, metrics: Metrics, access: AccessLog) -> None:
        self._metrics = metrics
        self._access = access
        self._later = Later(self._see_to)
        self._identities = random.Random()  # noqa: S311  # ids need to differ, not to be hard to guess
        metrics.settle.append(self._later.settle)

    def new_id(self) -> str:
        """An id for a request that brought none."""
        return f"{self._identities.getrandbits(128):032x}"

    def answered(self, method: str, path: str, operation: str, status: int, seconds: float, identity: str) -> None:
        """Note a request that was answered just now."""
        self._later.note(Answered(time.time(), method, path, operation, status, seconds, identity))

    def settle(self) -> None:
        """Count and log all that was noted."""
        self._later.settle()

    def _see_to(self, answered: list[Answered]) -> None:
        self._metrics.count(answered)
        self._access.write(answered)


def given_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The id that the caller gave the request, where it gave one that is fit to be repeated."""
    for name, value in headers:
        if name == b"x-request-id":
            given = str(value, "latin-1")
            return given if _REQUEST_ID.fullmatch(given) else None
    return None


def configure_logging(level: str, form: Literal["console", "json"]) -> None:
    """Structured events on standard error, from this service and from the libraries alike."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks without local variables: those are other people's tensors.
    without_locals = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    final: list[structlog.typing.Processor] = (
        [structlog.processors.ExceptionRenderer(without_locals), structlog.processors.JSONRenderer()]
        if form == "json"
        else [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final], foreign_pre_chain=shared
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
