"""The server's metrics for Prometheus."""

import math
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response

from attention_contract.errors import Cancelled
from attention_service.api.http_limits.connection_limits import ConnectionLimits
from attention_service.api.observation.access_log import Answered
from attention_service.api.observation.device_metrics import DeviceMetrics
from attention_service.api.observation.metrics_format import metrics_format
from attention_service.engine import Engine
from attention_service.models.server.model_environment import ModelEvent
from attention_service.runtime.planning.prediction_accuracy import RATIO_EDGES, TimedRun

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


MAX_CALLERS = 100
"""Callers that metrics name; each name makes time series of its own, which Prometheus keeps."""


class Metrics:
    """The server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "attention_requests",
            "Requests answered, by operation and status",
            ["operation", "status"],
            registry=self.registry,
        )
        self.seconds = Tally(
            "attention_request_seconds",
            "Seconds from the head of a request to the end of its response",
            ("operation",),
            _SECONDS,
        )
        self.phases = Tally(
            "attention_phase_seconds",
            "Seconds of each phase of a request: read, decode, queue, compute, encode, write",
            ("operation", "phase"),
            _SECONDS,
        )
        self.problems = Counter(
            "attention_problems", "Requests answered with a problem, by code and caller",
            ["code", "caller"], registry=self.registry,
        )  # fmt: skip
        self._callers: set[str] = set()
        self.cancelled = Counter(
            "attention_requests_cancelled", "Requests whose caller disconnected", ["operation"], registry=self.registry
        )

        self.ratio = Tally(
            "attention_prediction_ratio", "Ratio of measured to predicted time", ("kernel", "purpose"), RATIO_EDGES
        )
        self.batches = Tally("attention_batch_requests", "Requests that ran in one pass", ("purpose",), _BATCHES)
        for tally in (self.seconds, self.phases, self.ratio, self.batches):
            self.registry.register(tally)
        self.settle: list[Callable[[], None]] = []
        """Functions that add recorded values. They run before the metrics are rendered."""

    def count(self, answered: Sequence[Answered]) -> None:
        """Count requests."""
        self.seconds.add([((request.operation,), request.seconds) for request in answered])
        self.phases.add(
            [((request.operation, mark[0]), mark[2] - mark[1]) for request in answered for mark in request.timing.marks]
        )
        for request in answered:
            if (code := request.timing.code) is not None:
                self.problems.labels(code, self._label(request.caller)).inc()
        for (operation, status), count in Counts(map(attrgetter("operation", "status"), answered)).items():
            self.requests.labels(operation, str(status)).inc(count)
            if status == Cancelled.status:
                self.cancelled.labels(operation).inc(count)

    def _label(self, caller: str) -> str:
        """The label of a caller: its name, or ``other`` after the first ``MAX_CALLERS``."""
        if len(self._callers) < MAX_CALLERS:
            self._callers.add(caller)
        return caller if caller in self._callers else "other"

    def watch(self, engine: Engine) -> None:
        """Export the engine's memory and queue, its refusals, and the accuracy of its predictions."""
        gauges = {
            "attention_ready": ("1 while the server accepts work, else 0", lambda: float(engine.state == "ready")),
            "attention_modules": ("Resident modules", lambda: len(engine.library.list())),
            "attention_modules_left_out": (
                "Stored modules that are not served: damaged, or too large",
                lambda: engine.library.left_out,
            ),
            "attention_models_resident": ("Resident whole models", lambda: engine.models.resident),
            "attention_model_bytes": (
                "Bytes of the memory budget that whole models take",
                lambda: engine.models.environment.memory.bytes,
            ),
            "attention_model_waiting_requests": (
                "Requests that wait until a whole model takes them",
                lambda: engine.models.waiting,
            ),
            "attention_resident_bytes": ("Bytes of resident modules", lambda: engine.library.resident_bytes),
            "attention_in_flight_bytes": (
                "Estimated bytes that admitted requests hold, without their bodies",
                lambda: engine.budget.in_flight,
            ),
            "attention_kept_pass_bytes": (
                "Upper bound of the bytes of passes kept for gradients",
                lambda: engine.passes.bytes,
            ),
            "attention_body_bytes": ("Bytes of the bodies of current requests", lambda: engine.host.bodies),
            "attention_reply_bytes": ("Bytes of replies that are being sent", lambda: engine.host.replies),
            "attention_budget_bytes": ("The memory budget in bytes", lambda: engine.budget.total),
            "attention_host_budget_bytes": (
                "The budget of host memory on a GPU server in bytes; on a CPU, the budget of all memory",
                lambda: engine.host.total,
            ),
            "attention_host_in_flight_bytes": (
                "Bytes of host memory that admitted requests hold, without bodies and replies; on a CPU, of all memory",
                lambda: engine.host.in_flight,
            ),
            "attention_exceeded_bytes": (
                "Bytes by which the process exceeds its budget; no work begins until they are freed",
                lambda: engine.host.exceeded,
            ),
            "attention_waiting_requests": (
                "Requests that wait for memory or for the device",
                lambda: engine.budget.waiting,
            ),
            "attention_entrance_requests": (
                "Requests that wait before their bodies are read",
                lambda: len(engine.entrance),
            ),
            "attention_sessions": ("Live sessions", lambda: len(engine.sessions.registry)),
            "attention_session_bytes": ("Bytes of the pages of sessions", lambda: engine.sessions.pool.bytes),
            "attention_session_held_bytes": (
                "Bytes of memory for pages, including unused parts, and for kept replies of steps",
                lambda: engine.sessions.pool.held + engine.sessions.registry.reply_bytes,
            ),
            "attention_session_pages": ("Pages of sessions", lambda: engine.sessions.pool.pages),
            "attention_session_paged": (
                "1 if PyTorch's kernel for block tables computes steps of sessions",
                lambda: engine.sessions.kernel == "paged",
            ),
            "attention_session_shared_pages": (
                "Pages that several sequences share",
                lambda: engine.sessions.pool.shared_pages,
            ),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(read)
        self.registry.register(_EngineCounts(engine))
        self.registry.register(DeviceMetrics(engine.device))
        engine.predictions.accuracy.watchers.append(self._predicted)
        self.settle.append(engine.predictions.settle)

    def watch_streams(self, streams: Sized) -> None:
        """Export the number of open streams."""
        gauge = Gauge("attention_session_streams", "Open streams of steps", registry=self.registry)
        gauge.set_function(lambda: len(streams))

    def watch_connections(self, limits: ConnectionLimits) -> None:
        """Export the number of open connections, and of those that were refused or cut."""
        gauge = Gauge("attention_connections", "Open connections", registry=self.registry)
        gauge.set_function(lambda: len(limits))
        self.registry.register(_Ended(limits))

    def _predicted(self, runs: Sequence[TimedRun]) -> None:
        self.ratio.add([((run.kernel, run.purpose), run.seconds / run.predicted.median) for run in runs])
        self.batches.add([((run.purpose,), run.batch) for run in runs])

    async def page(self, request: Request) -> Response:
        """Metrics in the format that the scraper takes: OpenMetrics or Prometheus' text."""
        for settle in self.settle:
            settle()
        encode, kind = metrics_format(", ".join(request.headers.getlist("accept")))
        return Response(encode(self.registry), media_type=kind, headers={"vary": "Accept"})


class Tally(Collector):
    """A histogram for one thread. Counting takes a sixth of the time of the library's own, which is 2 µs a value."""

    def __init__(self, name: str, text: str, labels: Sequence[str], edges: Sequence[float]) -> None:
        self._family = partial(HistogramMetricFamily, name, text, labels=labels)
        self._edges = edges
        self._cells: dict[tuple[str, ...], list[float]] = {}
        """The count of each bucket and, last, the sum."""

    def add(self, values: Iterable[tuple[tuple[str, ...], float]]) -> None:
        """Count values, each with its labels, under the first edge that it does not exceed."""
        cells, edges = self._cells, self._edges
        for labels, value in values:
            cell = cells.get(labels)
            if cell is None:
                cell = cells[labels] = [0] * (len(edges) + 1) + [0.0]
            cell[bisect_left(edges, value)] += 1
            cell[-1] += value

    def collect(self) -> Iterator[Metric]:
        """The counts as they are now."""
        family = self._family()
        edges = [*map(floatToGoString, (*self._edges, math.inf))]
        for labels, (*counts, total) in self._cells.items():
            family.add_metric(labels, list(zip(edges, accumulate(counts), strict=True)), total)
        yield family


class _EngineCounts(Collector):
    """Metrics from the engine's own counts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The counts as they are now."""
        refusals = CounterMetricFamily(
            "attention_refusals",
            "Requests not admitted to memory or queue, by the code of the problem",
            labels=["code"],
        )
        for code, count in self._engine.refused.items():
            refusals.add_metric([code], count)
        yield refusals
        factors = self._engine.predictions.factors
        changes = 0 if factors is None else factors.changes
        yield CounterMetricFamily(
            "attention_recalibrations", "Corrections of predicted times by measured times", value=changes
        )
        pool = self._engine.sessions.pool
        counts = self._engine.sessions.registry.counts | {"prefix_hits": pool.hits, "prefix_misses": pool.misses}
        events = CounterMetricFamily(
            "attention_session_events", "Sessions opened and ended, steps, tokens, and pages found by prefix, by event",
            labels=["event"],
        )  # fmt: skip
        for event, count in counts.items():
            events.add_metric([event], count)
        yield events
        yield CounterMetricFamily(
            "attention_generated_tokens",
            "Tokens of finished generations",
            value=self._engine.models.environment.generated_tokens,
        )
        lives = CounterMetricFamily(
            "attention_model_events", "Whole models loaded and ended, by event", labels=["event"]
        )
        for event in get_args(ModelEvent):
            lives.add_metric([event], self._engine.models.environment.counts[event])
        yield lives
        coverage = GaugeMetricFamily(
            "attention_prediction_coverage",
            "Share of recent requests whose time was within the predicted interval; 0.9 is expected",
            labels=["kernel", "purpose"],
        )
        for kernel, purpose, share in self._engine.predictions.accuracy.coverage():
            coverage.add_metric([kernel, purpose], share)
        yield coverage


class _Ended(Collector):
    """The connections that the guard refused or cut."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits

    def collect(self) -> Iterator[Metric]:
        """The counts as they are now."""
        ended = CounterMetricFamily(
            "attention_connections_ended", "Connections refused or closed by the server", labels=["cause"]
        )
        for cause, count in self._limits.ended.items():
            ended.add_metric([cause], count)
        yield ended
