"""One trace leads from the client through the server's operation to its phases. Unconfigured, there is none."""

import httpx
import numpy as np
import pytest

from attention_client import AsyncClient, Client
from attention_client.trace_context import trace_requests
from attention_contract.errors import ModuleNotFound
from attention_service.api.observation.tracing import telemetry_config
from attention_service.runtime.request_timing import PHASES
from attention_service.runtime.scheduling.executor import Executor
from attention_service.runtime.scheduling.passes import Pass
from tests.client.service import both
from tests.conftest import eventually, live_server

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
pytest.importorskip("opentelemetry.instrumentation.httpx", reason="needs the extra otel")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

QUERY = np.ones((2, 3, 8), "float32")


@pytest.fixture(scope="module")
def exporter():
    """The spans of client and server, which run in this process. OpenTelemetry lets a provider be set only once."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_TRACER_PROVIDER", provider)
        yield exporter


@pytest.fixture(scope="module")
def traced(exporter, tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("traced"), log_level="info") as url:
        yield url


@pytest.fixture
def spans(exporter, traced):
    """A function that returns the spans so far once the root has ended, by name."""
    exporter.clear()

    def ended():
        httpx.get(f"{traced}/health/live")  # whatever was answered before has its spans by then
        return exporter.get_finished_spans()

    return ended


def root():
    return trace.get_tracer("test").start_as_current_span("root")


def children(spans, parent):
    return [span for span in spans if span.parent is not None and span.parent.span_id == parent.context.span_id]


def only(spans, name):
    (found,) = [span for span in spans if span.name == name]
    return found


def assert_phases(spans, operation, phases=PHASES):
    below = children(spans, operation)
    assert sorted(span.name for span in below) == sorted(phases)
    for span in below:
        assert operation.start_time - 1e6 <= span.start_time <= span.end_time <= operation.end_time + 1e6
        if span.name == "compute":
            assert span.attributes["attention.batch"] >= 1
            assert span.attributes["attention.kernel"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_one_trace_from_the_client_to_the_phases(traced, spans, kind):
    with root() as outer:
        both(kind, traced, lambda client: client.attention.forward(QUERY, QUERY, QUERY, num_heads=2))
    found = spans()
    assert {span.context.trace_id for span in found} == {outer.get_span_context().trace_id}
    sent = only(found, "POST")
    received = only(found, "POST /v1/attention/forward")
    operation = only(found, "raw_forward")
    assert (sent.kind, received.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
    assert [sent.parent.span_id, received.parent.span_id, operation.parent.span_id] == [
        outer.get_span_context().span_id, sent.context.span_id, received.context.span_id,
    ]  # fmt: skip
    assert operation.attributes["attention.status"] == 200
    assert_phases(found, operation)


async def test_requests_of_one_pass_tell_its_size(traced, spans, monkeypatch):
    """The first pass waits on its thread until every request has come, so the others share the next one."""
    came, enter, run = [], Executor.run, Pass.run

    def entered(self, job, deadline=None):
        came.append(job)
        return enter(self, job, deadline)

    def waits(self, device):
        eventually(lambda: len(came) == 8)
        return run(self, device)

    monkeypatch.setattr(Executor, "run", entered)
    monkeypatch.setattr(Executor, "_stays", lambda *_: False)
    monkeypatch.setattr(Pass, "run", waits)

    def sizes():
        return sorted(span.attributes["attention.batch"] for span in spans() if span.name == "compute")

    async with AsyncClient(traced) as client:
        given = [{"query": QUERY, "key": QUERY, "value": QUERY, "num_heads": 2}] * 8
        replies = await client.map(client.attention.forward, given, concurrency=8)
    eventually(lambda: len(sizes()) == len(replies))
    assert sizes() == sorted(reply.ran.batch for reply in replies)
    assert max(sizes()) > 1


def test_steps_of_a_stream_belong_to_the_trace_that_opened_it(traced, spans):
    with root() as outer, Client(traced) as client:
        client.modules.create("traced", {"d_model": 8, "num_heads": 2}, seed=0)
        session = client.sessions.open("traced").id
        with client.sessions.stream() as stream:
            for _ in range(2):
                stream.step(session, QUERY[0])
    found = spans()
    steps = [span for span in found if span.name == "step_session"]
    assert len(steps) == 2
    for step in steps:
        assert step.context.trace_id == outer.get_span_context().trace_id
        assert_phases(found, step, [phase for phase in PHASES if phase != "read"])


def test_a_problem_has_its_code_and_the_log_line_its_trace(traced, spans, capfd):
    with root() as outer, Client(traced, retries=0) as client, pytest.raises(ModuleNotFound):
        client.modules.get("nobody")
    operation = only(spans(), "get_module")
    httpx.get(f"{traced}/metrics")  # writes the lines that wait
    assert operation.attributes["attention.code"] == "module_not_found"
    assert f"trace_id={outer.get_span_context().trace_id:032x}" in capfd.readouterr().err


def test_health_checks_and_scrapes_are_not_traced(traced, spans):
    httpx.get(f"{traced}/metrics")
    assert spans() == ()


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_variables_of_opentelemetry_turn_traces_on(monkeypatch, variables, wanted):
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = telemetry_config()
    assert (config["tracing"], config["auto_configure"]) == (wanted, wanted)


def test_a_client_of_a_program_without_traces_is_left_alone(monkeypatch):
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    with httpx.Client() as http:
        trace_requests(http)
        assert not getattr(http, "_is_instrumented_by_opentelemetry", False)
