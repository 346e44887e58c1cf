"""What the server says of its own predictions, over HTTP: as JSON and as metrics."""

import re

import httpx
import pytest

from tests.api.talk import post, problem
from tests.conftest import live_server

QUERY = {"dtype": "float32", "shape": [1, 4, 16, 8], "data": [0.1 * (i % 7) for i in range(4 * 16 * 8)]}
PATHS = {
    "forward": "/v1/attention/forward",
    "weights": "/v1/attention/weights",
    "gradients": "/v1/attention/gradients",
}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A client of a server of its own, so that nobody else's requests count."""
    with (
        live_server(tmp_path_factory.mktemp("models"), memory_budget=64 * 2**20) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def sample(text, name, **labels):
    """The value of one line of metrics; 0 where there is none."""
    for line in text.splitlines():
        found = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line)
        if found and dict(re.findall(r'(\w+)="([^"]*)"', found[1] or "")) == labels:
            return float(found[2])
    return 0.0


def test_every_question_says_what_was_predicted_and_the_report_adds_it_up(fresh):
    post(fresh, "/v1/modules", name="m", config={"d_model": 8, "num_heads": 2})
    seen = []
    for purpose, path in PATHS.items():
        for kernel in (None, "materialized"):
            body = {"query": QUERY} | ({"kernel": kernel} if kernel else {})
            seen += [(purpose, post(fresh, path, **body)["ran"]) for _ in range(3)]
        seen.append((purpose, post(fresh, f"/v1/modules/m/{purpose}", query=[[0.5] * 8] * 3)["ran"]))
    retrieved = post(fresh, "/v1/hopfield/retrieve", stored=[[1, -1], [1, 1]], states=[[0.5, 0.2]])
    seen.append(("hopfield", retrieved["ran"]))
    for _, ran in seen:
        assert 0 < ran["predicted_low_ms"] <= ran["predicted_ms"] <= ran["predicted_high_ms"]
        assert ran["compute_ms"] > 0

    report = fresh.get("/v1/complexity/accuracy").json()
    assert report["basis"] in {"calibrated", "rates"}
    rows = {(row["kernel"], row["purpose"]): row for row in report["predictions"]}
    expected = {}
    for purpose, ran in seen:
        expected.setdefault((ran["kernel"], purpose), []).append(ran)
    assert rows.keys() == expected.keys()
    metrics = fresh.get("/metrics").text
    for (kernel, purpose), runs in expected.items():
        row, labels = rows[kernel, purpose], {"kernel": kernel, "purpose": purpose}
        errors = [ran["compute_ms"] / ran["predicted_ms"] - 1 for ran in runs]
        inside = [ran["predicted_low_ms"] <= ran["compute_ms"] <= ran["predicted_high_ms"] for ran in runs]
        assert row["count"] == len(runs) == sum(row["histogram"]["counts"])
        assert len(row["histogram"]["counts"]) == len(row["histogram"]["edges"]) + 1
        assert row["mean_error"] == pytest.approx(sum(errors) / len(errors), rel=1e-6)
        assert row["coverage"] == pytest.approx(sum(inside) / len(inside))
        assert sample(metrics, "attention_prediction_ratio_count", **labels) == len(runs)
        assert sample(metrics, "attention_prediction_ratio_sum", **labels) == pytest.approx(sum(errors) + len(runs))
        assert sample(metrics, "attention_prediction_coverage", **labels) == pytest.approx(row["coverage"])


def test_refusals_and_calibrations_are_counted(fresh):
    before = fresh.get("/metrics").text
    large = {"dtype": "float32", "shape": [8192, 1], "data": [0.0] * 8192}
    assert problem(fresh.post(PATHS["forward"], json={"query": large, "return": ["weights"]}))["code"] == "over_budget"
    after = fresh.get("/metrics").text
    name = "attention_refusals_total"
    assert sample(after, name, code="over_budget") == sample(before, name, code="over_budget") + 1
    assert sample(after, name, code="overloaded") == sample(before, name, code="overloaded")
    assert "attention_recalibrations_total 0.0" in after
