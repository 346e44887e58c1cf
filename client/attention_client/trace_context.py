"""OpenTelemetry traces of a program continue on the server, if the program has set a tracer provider.

The spans are those of ``opentelemetry-instrumentation-httpx`` (extra ``otel``). A program that does not trace pays for
a look into ``sys.modules``.
"""

import sys

import httpx


def is_tracing() -> bool:
    """True if this program has set a tracer provider."""
    trace = sys.modules.get("opentelemetry.trace")
    return trace is not None and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def trace_requests(http: httpx.Client | httpx.AsyncClient) -> None:
    """Give each request of an httpx client a span and the header ``traceparent``, if this program traces.

    Nothing happens without the instrumentation, or if it is applied to every client already.
    """
    if not is_tracing():
        return
    try:
        from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor  # noqa: PLC0415 - an extra
    except ImportError:
        return
    everywhere = HTTPXClientInstrumentor().is_instrumented_by_opentelemetry
    if not (everywhere and isinstance(http._transport, httpx.HTTPTransport | httpx.AsyncHTTPTransport)):
        HTTPXClientInstrumentor.instrument_client(http)


def trace_headers() -> dict[str, str]:
    """Return the headers that name the current span, for the handshake of a WebSocket; none without a trace."""
    headers: dict[str, str] = {}
    if is_tracing():
        from opentelemetry import propagate  # noqa: PLC0415 - the program has it

        propagate.inject(headers)
    return headers
