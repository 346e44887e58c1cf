"""Generator of the table in ``docs/monitoring.md``: ``python -m tools.docs.metrics_page`` writes it."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from prometheus_client.core import Metric

from attention_service.api.app import create_app
from attention_service.api.observation.access_log import Answered
from attention_service.api.observation.metrics import Metrics
from attention_service.api.serving import DrainingServer
from attention_service.cost import Estimate, Rates
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.prediction_accuracy import TimedRun
from attention_service.runtime.request_timing import PHASES, RequestTiming
from attention_service.settings import Settings
from tools.docs.page_parts import with_part
from tools.docs.snippets import ROOT

PAGE = ROOT / "docs" / "monitoring.md"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
"""Endings of the names of a metric's samples."""


@dataclass(frozen=True)
class Described:
    """One metric."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> set[str]:
        """The names of its time series."""
        return {self.name + suffix for suffix in SUFFIXES[self.kind]}


def metrics() -> list[Described]:
    """Return every metric of a server, by name."""
    with tempfile.TemporaryDirectory() as folder:
        return sorted(map(_described, _collected(Path(folder))), key=lambda each: each.name)


def _collected(folder: Path) -> Iterator[Metric]:
    """Yield the metrics of a server that has answered one request, so that each has its labels."""
    settings = Settings(_env_file=None, models_dir=folder)
    app = create_app(settings)
    DrainingServer(app)
    made: Metrics = next(route.endpoint.__self__ for route in app.routes if route.name == "metrics")
    rates = Rates(flops_per_s=1e11, bytes_per_s=1e10, overhead_s=1e-5)
    with patch("attention_service.runtime.device.torch_device.measure_rates", lambda _: rates):
        engine = Engine(folder, Device.open("cpu", 1), EngineSettings(memory_budget=2**20))
    made.watch(engine)
    engine.predictions.accuracy.record([TimedRun("fused", "forward", Estimate(1, 1, 1), 1.0, 1)])
    timing = RequestTiming(marks=[(phase, 0.0, 1.0) for phase in PHASES], code="cancelled")
    made.count([Answered(0.0, "POST", "/", "forward", 499, 1.0, "id", "anyone", timing)])
    yield from made.registry.collect()


def _described(metric: Metric) -> Described:
    labels = dict.fromkeys(name for sample in metric.samples for name in sample.labels if name != "le")
    return Described(metric.name, metric.type, tuple(labels), metric.documentation)


def table() -> str:
    """Return the table of all metrics."""
    rows = [
        f"| `{each.name}{'_total' * (each.kind == 'counter')}{_braced(each.labels)}` | {each.kind} | "
        f"{each.text.rstrip('.')} |\n"
        for each in metrics()
        if not each.name.startswith("process_")
    ]
    return "| metric, with its labels | type | meaning |\n|---|---|---|\n" + "".join(rows)


def _braced(labels: tuple[str, ...]) -> str:
    return f"{{{', '.join(labels)}}}" if labels else ""


def render() -> str:
    """Return the page with the present table."""
    return with_part(PAGE, "metrics", "tools.docs.metrics_page", f"\n{table()}")


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
