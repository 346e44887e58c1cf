"""OpenTelemetry traces: FastAPI's spans of requests and streams, and beneath them one span of each operation and phase.

Off unless the ``OTEL_*`` variables name a collector, or the program has set a tracer provider.
"""

import os
import time
from typing import Any

from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace
from opentelemetry.trace import SpanContext, StatusCode
from starlette.types import Scope

from attention_contract.schemas.attention import Ran
from attention_service import __version__
from attention_service.api.observation.access_log import Answered
from attention_service.runtime.request_timing import ModelRun

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PERIODIC = ("/health/", "/metrics")
"""Paths that are asked for all the time."""


def telemetry_config() -> TelemetryConfig:
    """FastAPI's telemetry: spans if traces are wanted, and nothing else, for ``/metrics`` and the log have the rest.

    FastAPI takes ``traceparent`` from requests, makes the exporter from the variables, and logs a warning where the
    extra ``otel`` is missing. If the program has a tracer provider, its exporters are the program's affair.
    """
    provided = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    named = not provided and _collector_named()
    if named and "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        os.environ.setdefault("OTEL_SERVICE_NAME", "attention-service")
    return {
        "tracing": provided or named,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "auto_configure": named,
        "exclude": _is_periodic,
    }


def _collector_named() -> bool:
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    none = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    return any(os.environ.get(name) for name in _ENDPOINTS) and not (disabled or none)


def _is_periodic(scope: Scope) -> bool:
    return str(scope.get("path", "")).startswith(_PERIODIC)


def add_spans(answered: Answered) -> SpanContext | None:
    """Add a span of the operation, and one of each of its phases, beneath the current span; return that one's context.

    None if the request is not traced. The phases are over, so their spans begin and end in the past.
    """
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    if context.trace_flags.sampled:
        _add_spans(answered)
    return context


def _add_spans(answered: Answered) -> None:
    tracer = trace.get_tracer("attention_service", __version__)
    since_1970 = time.time() - time.monotonic()
    ended = time.monotonic()
    timing = answered.timing
    # What passed since the request was timed would move its beginning behind that of its phases.
    started = min([ended - answered.seconds, *(began for _, began, _ in timing.marks)])
    whole = tracer.start_span(
        answered.operation,
        start_time=_nanoseconds(started + since_1970),
        attributes={
            "attention.request_id": answered.request_id,
            "attention.caller": answered.caller,
            "attention.status": answered.status,
            **({} if timing.code is None else {"attention.code": timing.code}),
        },
    )
    if answered.status >= 500:
        whole.set_status(StatusCode.ERROR, timing.code)
    beneath, runs = trace.set_span_in_context(whole), iter(timing.runs)
    for phase, began, end in timing.marks:
        attributes = _of_run(next(runs)) if phase == "compute" else None
        span = tracer.start_span(phase, beneath, start_time=_nanoseconds(began + since_1970), attributes=attributes)
        span.end(_nanoseconds(end + since_1970))
    whole.end(_nanoseconds(ended + since_1970))


def _of_run(ran: Ran | ModelRun) -> dict[str, Any]:
    """The attributes of a run. Requests that ran in one pass have its size as ``attention.batch``."""
    if isinstance(ran, ModelRun):
        return {f"attention.{name}": value for name, value in ran._asdict().items()}
    return {
        "attention.kernel": ran.kernel,
        "attention.device": ran.device,
        "attention.dtype": ran.dtype,
        "attention.batch": ran.batch,
        "attention.flops": float(ran.flops),
        "attention.predicted_ms": ran.predicted_ms,
        "attention.compute_ms": ran.compute_ms,
        "attention.cpu_ms": ran.cpu_ms,
        "attention.peak_bytes": ran.peak_bytes,
        **({} if ran.version is None else {"attention.version": ran.version}),
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
