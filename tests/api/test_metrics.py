"""Our own histogram shows what that of prometheus_client shows."""

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from attention_service.api.observation.metrics import Tally
from attention_service.runtime.planning.prediction_accuracy import RATIO_EDGES

EDGES = [(0.0005, 0.25, 1, 30), (1, 2, 4), tuple(RATIO_EDGES)]


def shown(collector):
    """The text of a collector, without when its counts began."""
    registry = CollectorRegistry()
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@pytest.mark.parametrize("edges", EDGES, ids=str)
@pytest.mark.parametrize("labels", [("operation",), ("kernel", "purpose")], ids=str)
def test_it_counts_as_the_histogram_of_the_library_does(rng, edges, labels):
    mine = Tally("some_seconds", "What it is about", labels, edges)
    theirs = Histogram("some_seconds", "What it is about", labels, buckets=edges, registry=None)
    assert shown(mine) == shown(theirs)  # before anything was counted
    values = [0.0, *edges, *(edge * 1.0001 for edge in edges), 1e9, *rng.exponential(2.0, 200).tolist()]
    for value in values:
        names = tuple(str(rng.choice(["a", 'b"\\\n'])) for _ in labels)
        mine.add([(names, value)])
        theirs.labels(*names).observe(value)
    assert shown(mine) == shown(theirs)
    assert sum("_bucket" in line for line in shown(mine)) >= (len(edges) + 1) * 2


def test_what_was_shown_stays_as_it_was(rng):
    tally = Tally("some_seconds", "What it is about", ("operation",), (1, 2))
    tally.add([(("a",), 1.5)])
    (before,) = tally.collect()
    samples = list(before.samples)
    tally.add([(("a",), 0.5)])
    assert before.samples == samples
    (after,) = tally.collect()
    assert [sample.value for sample in after.samples] == [1, 2, 2, 2, 2.0]
