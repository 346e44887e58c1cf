"""The metrics in the format that a scraper asks for."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""As Prometheus 3 sends it."""
OPEN, TEXT_1 = "application/openmetrics-text; version=1.0.0", "text/plain; version=1.0.0"
TEXT = "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.sampled(accept=3, answered=3)
@pytest.mark.parametrize(
    ("accept", "answered"),
    [
        (PROMETHEUS_3, f"{OPEN}; charset=utf-8; escaping=allow-utf-8"),
        ("application/openmetrics-text", f"{OPEN}; charset=utf-8; escaping=underscores"),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.1", TEXT),
        ("application/openmetrics-text;version=1.0.0;q=0,text/plain", TEXT),
        ("text/plain;version=1.0.0;escaping=values", f"{TEXT_1}; charset=utf-8; escaping=values"),
        ('text/plain;version=1.0.0;escaping=a"b', f"{TEXT_1}; charset=utf-8; escaping=underscores"),
        ("application/openmetrics-text;version=9.0.0,*/*;q=0.1", TEXT),
        ("*/*", TEXT),
        ("application/json", TEXT),
        (";;,/,q=x", TEXT),
        ("", TEXT),
    ],
)
def test_a_scraper_gets_the_format_that_it_likes_best(http, accept, answered):
    reply = http.get("/metrics", headers={"accept": accept})
    assert reply.status_code == 200
    assert reply.headers["content-type"] == answered
    assert "accept" in reply.headers["vary"].lower()
    opened = answered.startswith("application/openmetrics-text")
    assert reply.text.endswith("# EOF\n") == opened
    families = {each.name: each for each in (parse_openmetrics if opened else parse_text)(reply.text)}
    assert families["attention_ready"].samples[0].value == 1
    assert families["attention_request_seconds"].type == "histogram"
