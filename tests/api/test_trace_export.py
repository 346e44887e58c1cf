"""A server whose environment names a collector sends its spans there, and finishes that before it stops."""

import http.server
import signal
import threading

import httpx
import pytest

from tests.api.processes import process

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def collector():
    """A collector of OTLP over HTTP: its address, and what it received."""
    received = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", received
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_spans_reach_the_collector(collector, tmp_path):
    address, received = collector
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
    with process(tmp_path, **variables) as (server, url):
        sent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert httpx.get(f"{url}/v1/modules", headers=sent).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    assert {path for path, _ in received} == {"/v1/traces"}
    resources = [each for _, request in received for each in request.resource_spans]
    names = {a.value.string_value for each in resources for a in each.resource.attributes if a.key == "service.name"}
    assert names == {"attention-service"}
    spans = {span.name: span for each in resources for scope in each.scope_spans for span in scope.spans}
    assert {"GET /v1/modules", "list_modules", "write"} <= spans.keys()
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert spans["GET /v1/modules"].parent_span_id.hex() == PARENT
